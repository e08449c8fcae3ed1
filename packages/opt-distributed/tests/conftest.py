"""Where the tests find the modules that they share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `delayed_comm`
