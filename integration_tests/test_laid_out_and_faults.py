"""Over gloo processes: parameters that `fully_shard` laid out, and ranks that fail."""

from typing import Any

import pytest
import torch
from laid_out_ranks import raise_in_backward, train_fsdp, train_whole
from worlds import Job, run_jobs, run_processes

from opt_config import OptimizerConfig

# Two ranks' means are summed in another order than one batch: a few 2**-24 of a gradient, which Adam and Muon turn into
# the same share of lr = 0.02, more where elements are small beside the others.
# AdaptiveMuon divides each element of an update by its own size.
RTOL, ATOL = 1e-4, {"adam": 2e-5, "muon": 2e-5, "adaptive_muon": 2e-4}


RULES = {
    "adamw": {"optimizer": "adam"},
    "muon": {"optimizer": "muon"},
    "adaptive muon, distributed": {"optimizer": "adaptive_muon", "muon_tp_mode": "distributed"},
}
CONFIGS = {
    name: OptimizerConfig(lr=0.02, weight_decay=0.1, clip_grad=0.1, muon_fp32_matmul_prec="highest", **rule)
    for name, rule in RULES.items()
}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    """What two ranks made of sharded models."""
    trained = {name: Job(train_fsdp, (config,)) for name, config in CONFIGS.items()}
    return run_jobs(2, trained)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_torch_sharded_takes_the_step_of_the_whole_model(name: str, two: dict[str, list[Any]]) -> None:
    """Elementwise rules on the local shards, Muon on matrices brought together; norms count each element once.

    Muon's tensor-parallel mode is "blockwise" by default; what FSDP2 cuts is nobody's block, so it does not apply.
    """
    config = CONFIGS[name]
    want = train_whole(config)
    for got in two[name]:
        for param, weight in want.weights.items():
            torch.testing.assert_close(got.weights[param], weight, rtol=RTOL, atol=ATOL[config.optimizer])
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-5, atol=0)
        assert got.inf_norm == pytest.approx(want.inf_norm, rel=1e-4)
    assert sum(rank.state_bytes for rank in two[name]) == want.state_bytes


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_rank_that_raises_in_backward_leaves_the_others_an_error_and_their_weights(wrapped: bool) -> None:
    waiting, raised = run_processes(2, raise_in_backward, wrapped)
    assert (raised.error, raised.changed) == ("RuntimeError: no memory left on this rank", False)
    assert waiting.error.startswith("CollectiveError: step 2, ")
    assert "gradient" in waiting.error
    assert "bucket 0" in waiting.error
    assert not waiting.changed
