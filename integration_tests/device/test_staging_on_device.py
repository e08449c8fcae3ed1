"""Snapshots for background saves, taken on a device whose work runs later: the values of their moment, in every order.

More orders at night.
"""

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from tiers import NIGHT

from opt_checkpoint import sharded_like
from opt_checkpoint.run import async_save
from opt_checkpoint.run.async_save import Staging

NUM_ORDERS = 50 if NIGHT else 12
STEPS = 3


def snapshots_during_training() -> list[list[list[float]]]:
    """The values of the snapshot after each update, read by the host without another wait."""
    memory = Staging()
    weight, moment = torch.zeros(5), torch.zeros(3, 2)
    found = []
    for step in range(STEPS):
        weight.mul_(2).add_(1)
        moment.add_(step)
        snapshot = memory.snapshot({"weight": sharded_like("weight", weight), "moment": moment.t()})
        weight.add_(100)  # the next step begins before the host reads the snapshot
        found.append([snapshot["weight"].data.tolist(), *snapshot["moment"].tolist()])
        weight.sub_(100)
    return found


WEIGHTS, MOMENTS = [1.0, 3.0, 7.0], [0.0, 1.0, 3.0]
EXPECTED = [[[w] * 5, [m] * 3, [m] * 3] for w, m in zip(WEIGHTS, MOMENTS, strict=True)]


def snapshots(seed: int) -> list[list[list[float]]]:
    """Snapshots in the order that the seed determines."""

    def rank_main(one: DeferredRank) -> list[list[list[float]]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(async_save, "device_of", lambda device: one.device)
            return snapshots_during_training()

    (found,) = run_deferred(1, rank_main, seed=seed)
    return found


@pytest.mark.parametrize("seed", range(NUM_ORDERS))
def test_a_snapshot_holds_the_values_of_its_moment(seed: int) -> None:
    assert snapshots(seed) == EXPECTED
