"""Packages and tests import from the doors of other packages, so that a rearrangement inside one breaks no other."""

import json
import re
from importlib import import_module

import doors
import pytest


def test_imports_past_the_doors_become_no_more() -> None:
    allowed = json.loads(doors.RECORD.read_text())
    # A file that was cut in two imports the same names twice: hence a fiftieth more.
    grown = {folder: count for folder, count in doors.counts().items() if count > allowed.get(folder, 0) * 1.02 + 1}
    assert grown == {}, (
        "import from a door of the package; `python integration_tests/project/doors.py` lists the others"
    )


def test_every_way_past_a_door_is_noticed() -> None:
    assert (
        doors.inside("from opt_config import OptimizerConfig\nimport opt_config\nfrom opt_kernels import hooks") == []
    )
    assert doors.inside("from opt_stack.megatron.clip_grads import count_zeros_fp32\nimport torch.nn") == []
    assert doors.inside("from opt_config.validate import problems, check") == [
        "opt_config.validate.problems",
        "opt_config.validate.check",
    ]
    assert doors.inside("import opt_config.validate") == ["opt_config.validate"]
    assert doors.inside("from opt_config import validate") == ["opt_config.validate"]


def test_packages_import_each_other_through_doors() -> None:
    found = {}
    for path in sorted(doors.ROOT.glob("packages/*/src/**/*.py")):
        package = path.relative_to(doors.ROOT).parts[3]
        past = [name for name in doors.inside(path.read_text()) if name.split(".")[0] != package]
        if past:
            found[str(path.relative_to(doors.ROOT))] = past
    assert found == {}, "export these names in the __init__.py of a folder of their package, or use another one"


def test_readmes_use_doors_only() -> None:
    found = {}
    for path in [doors.ROOT / "README.md", *sorted(doors.ROOT.glob("packages/*/README.md"))]:
        programs = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        past = [name for program in programs for name in doors.inside(program)]
        if past:
            found[str(path.relative_to(doors.ROOT))] = past
    assert found == {}


ROOMS = {
    "opt_checkpoint": ("state",),
    "opt_distributed": ("buffers", "comm", "finalize", "layout", "pieces", "saving", "step"),
    "opt_kernels": ("backends", "codecs", "formulas", "hooks", "matrices", "quantized", "rules", "works"),
    "opt_paramgroups": ("dtensor", "overrides"),
}


@pytest.mark.parametrize("room", [f"{package}.{name}" for package, names in ROOMS.items() for name in names])
def test_a_room_says_what_it_is_for_and_offers_few_names(room: str) -> None:
    module = import_module(room)
    assert module.__doc__
    # More would mean that the cut between packages is in the wrong place: move code, not names.
    assert len(module.__all__) <= 32
    assert all(hasattr(module, name) for name in module.__all__)
