"""Where tests save a series."""

import uuid
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["directory", pytest.param("memory", marks=pytest.mark.needs_extra)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "directory":
        return tmp_path / "run"
    pytest.importorskip("obstore")
    return f"memory://{uuid.uuid4().hex}/run"
