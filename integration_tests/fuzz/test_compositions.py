"""Compositions of rule, numbers, sharding, groups and faults against float64 on one process; see the package."""

import re
from typing import Any

import pytest
from processes import FSDP2_RUNS
from tiers import NIGHT

from fuzz.drawing import draw
from fuzz.running import check_seed
from opt_distributed.buffers.param_sync import ParamSync
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.step import Scaler
from opt_kernels.params import Main

BY_DEFAULT = 2000 if NIGHT else 48


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    only, count = (metafunc.config.getoption(name, default=None) for name in ("--fuzz-seed", "--fuzz-cases"))
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(count or BY_DEFAULT) if only is None else [only])


def test_compositions_have_weights_and_verdicts_of_one_process(seed: int) -> None:
    if not FSDP2_RUNS and re.search("layout='?(fsdp2|hsdp)", repr(draw(seed))):
        pytest.skip("this torch runs FSDP2 on GPUs only")
    if found := check_seed(seed):
        pytest.fail(found, pytrace=False)


def without_last_rank(comm: Any, shard: Any, full: Any, *, async_op: bool = False) -> Any:
    return REDUCE_SCATTER(comm, shard, full * 0 if comm.rank == comm.size - 1 else full, async_op=async_op)


REDUCE_SCATTER = ThreadComm.reduce_scatter_
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a reduction that forgets a rank": (ThreadComm, "reduce_scatter_", without_last_rank),
    "parameters that nobody waits for": (ParamSync, "wait_for", lambda self, ids: None),
    "a loss scale that never changes": (Scaler, "update", lambda self, found_inf, *, unless=None: None),
    "mains that are not restored": (Main, "set_", lambda self, value: None),
    "parameters that are not gathered": (ParamSync, "publish", lambda self, memory, *, together: None),
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads = [seed for seed in range(120) if not draw(seed).setup.processes]
    monkeypatch.setattr(*FAULTS[fault])
    assert any(check_seed(seed) for seed in in_threads)
