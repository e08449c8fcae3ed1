"""QK-clip of attention weights that are DTensors: those of one process. Over gloo processes."""

import pytest
import torch
from cut_ranks import EVEN, UNEVEN, LayOut, Shapes, clip_attention, fsdp, fsdp_x_tp, hsdp, tp
from processes import Job, run_jobs
from torch import Tensor

CASES: dict[str, tuple[Shapes, LayOut]] = {
    "fsdp": (UNEVEN, fsdp),  # rows of heads are cut, and the last rank has fewer
    "hsdp": (EVEN, hsdp),
    "tp": (EVEN, tp),
    "fsdp x tp": (EVEN, fsdp_x_tp),
}


@pytest.fixture(scope="module")
def by_case() -> dict[str, list[dict[str, Tensor]]]:
    return run_jobs(4, {name: Job(clip_attention, case) for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_heads_of_dtensors_are_scaled_as_in_one_process(name: str, by_case: dict[str, list[dict[str, Tensor]]]) -> None:
    expected = clip_attention(CASES[name][0], None)
    before = clip_attention(CASES[name][0], None, clips=False)
    assert not any(torch.equal(expected[part], before[part]) for part in ("qkv", "column"))
    for found in by_case[name]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[part], expected[part]) for part in expected)
