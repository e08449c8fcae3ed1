"""Tests import from the doors of packages, so that a rearrangement inside a package breaks none of them."""

import json

import doors


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
