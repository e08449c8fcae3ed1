"""The gallery shows every curve."""

import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest

import opt_scheduler

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = [
    pytest.mark.needs_extra,
    pytest.mark.skipif(not DOCS.exists(), reason="the tests were copied without docs"),
]


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    pytest.importorskip("matplotlib", reason="the gallery needs the [plot] extra")
    return runpy.run_path(str(DOCS / "gallery.py"))


def test_every_function_that_builds_a_schedule_is_shown(gallery: dict[str, Any]) -> None:
    functions = [getattr(opt_scheduler, name) for name in opt_scheduler.__all__]
    building = {
        function.__name__
        for function in functions
        if inspect.isfunction(function) and inspect.signature(function).return_annotation is opt_scheduler.Schedule
    }
    assert len(building) > 25
    missing = building - set(gallery["EXPRESSIONS"])
    assert not missing, f"add an expression to EXPRESSIONS in docs/gallery.py, and run it, for {sorted(missing)}"
