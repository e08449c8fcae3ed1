"""Compositions of rule, numbers, sharding, groups and faults against float64 on one process; see the package."""

import re

import pytest
from processes import FSDP2_RUNS
from tiers import NIGHT

from fuzz.drawing import draw
from fuzz.running import check_seed

BY_DEFAULT = 2000 if NIGHT else 64


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    only, count = (metafunc.config.getoption(name, default=None) for name in ("--fuzz-seed", "--fuzz-cases"))
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(count or BY_DEFAULT) if only is None else [only])


def test_a_composition_has_the_weights_norms_and_verdicts_of_one_process(seed: int) -> None:
    if not FSDP2_RUNS and re.search("layout='?(fsdp2|hsdp)", repr(draw(seed))):
        pytest.skip("this torch runs FSDP2 on GPUs only")
    found = check_seed(seed)
    if found:
        pytest.fail(found, pytrace=False)
