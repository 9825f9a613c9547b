"""Where things are; importing it puts the packages on the path."""

import sys
from pathlib import Path

CONFORMANCE = Path(__file__).resolve().parents[1]
PACKAGES = [str(CONFORMANCE / "tools"), str(CONFORMANCE / "reference")]
sys.path[:0] = PACKAGES
