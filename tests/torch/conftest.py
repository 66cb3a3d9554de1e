"""Where torchtitan is not installed, tests find a stand-in of its interface."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "double"))
