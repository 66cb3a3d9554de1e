"""`python -m weft_moe.train` is `weft-train`."""

import sys

from .cli import main

sys.exit(main())
