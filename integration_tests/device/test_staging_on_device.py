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

WEIGHTS = [1.0, 3.0, 7.0]
MOMENTS = [0.0, 1.0, 3.0]


@pytest.mark.parametrize("seed", range(50 if NIGHT else 12))
def test_a_snapshot_holds_the_values_of_its_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main(one: DeferredRank) -> list[list[list[float]]]:
        """The values of the snapshot after each update, read by the host without another wait."""
        monkeypatch.setattr(async_save, "device_of", lambda device: one.device)
        memory = Staging()
        found = []
        weight = torch.zeros(5)
        moment = torch.zeros(3, 2)
        for step in range(3):
            weight.mul_(2).add_(1)
            moment.add_(step)
            snapshot = memory.snapshot({"weight": sharded_like("weight", weight), "moment": moment.t()})
            weight.add_(100)  # the next step begins before the host reads the snapshot
            found.append([snapshot["weight"].data.tolist(), *snapshot["moment"].tolist()])
            weight.sub_(100)
        return found

    expected = [[[weight] * 5, [moment] * 3, [moment] * 3] for weight, moment in zip(WEIGHTS, MOMENTS, strict=True)]
    assert run_deferred(1, rank_main, seed=seed) == [expected]
