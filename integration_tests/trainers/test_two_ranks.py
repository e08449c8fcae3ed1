"""Trainers on two ranks: the run of one process with the joined batch, their clipping included; and a resumed run."""

from pathlib import Path

import pytest
import torch
from processes import FSDP2_RUNS, run_processes

for trainer in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(trainer)  # an optional session installs the trainers

import trainer_ranks  # noqa: E402

# Two halves of a batch are summed in another order than its rows at once: a few roundings a step.
NEEDS_FSDP2 = pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(
    "rank_main",
    [
        trainer_ranks.accelerate_ddp,
        pytest.param(trainer_ranks.accelerate_fsdp2, marks=NEEDS_FSDP2),
        pytest.param(trainer_ranks.accelerate_fsdp2_rank_0_loads, marks=NEEDS_FSDP2),
        pytest.param(trainer_ranks.accelerate_fsdp2_saved_before_the_first_step, marks=NEEDS_FSDP2),
        trainer_ranks.accelerate_with_our_wrapper,
        trainer_ranks.lightning_ddp,
        trainer_ranks.lightning_fsdp2,
        trainer_ranks.hf_trainer_ddp,
        trainer_ranks.hf_trainer_factory,
    ],
    ids=lambda rank_main: rank_main.__name__,
)
def test_two_ranks_are_one_process_with_the_joined_batch(rank_main, tmp_path: Path) -> None:
    alone = trainer_ranks.train_alone()
    assert min(alone.norms) > 2 * trainer_ranks.MAX_NORM  # so that clipping matters at every step
    for unbroken, resumed in run_processes(2, rank_main, tmp_path):
        if unbroken.norms:
            torch.testing.assert_close(torch.tensor(unbroken.norms), torch.tensor(alone.norms), **CLOSE)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(unbroken.weights[name], weight, **CLOSE, msg=name)
            assert torch.equal(resumed.weights[name], unbroken.weights[name]), name
