"""The tests of object stores against a server that speaks S3; `nox -s s3` installs it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
collect_ignore_glob = [] if find_spec("moto") else ["test_*.py"]  # a run over the whole repository leaves them out
