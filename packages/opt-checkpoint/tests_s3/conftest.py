"""The tests of object stores against a server that speaks S3; `nox -s s3` installs it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
