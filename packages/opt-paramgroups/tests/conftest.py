"""Lets the tests import the small models in this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
