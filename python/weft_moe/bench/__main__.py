"""`python -m weft_moe.bench` is `weft-bench`."""

import sys

from .cli import main

sys.exit(main())
