"""Snapshots for background saves, taken on a device whose work runs later: the values of their moment, in every order.

More orders at night.
"""

from typing import Any

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from tiers import NIGHT
from torch import Tensor

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


def nobody_waits_for_the_copies(memory: Staging, device: Any, source: Tensor, target: Tensor) -> None:
    side = device.side_stream()
    side.wait_event(device.current_stream().record_event())
    with device.on(side):
        target.copy_(source, non_blocking=True)


def copies_do_not_wait_for_training(memory: Staging, device: Any, source: Tensor, target: Tensor) -> None:
    side = memory._sides.setdefault(source.device, device.side_stream())
    with device.on(side):
        target.copy_(source, non_blocking=True)


def a_source_is_given_back_while_it_is_copied(memory: Staging, device: Any, source: Tensor, target: Tensor) -> None:
    copy_from(memory, device, source.clone(), target)


copy_from = Staging._copy_from


@pytest.mark.parametrize(
    "fault", [nobody_waits_for_the_copies, copies_do_not_wait_for_training, a_source_is_given_back_while_it_is_copied]
)
def test_a_fault_in_the_order_of_staging_is_noticed(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "_copy_from", fault)
    assert any(repr(snapshots(seed)) != repr(EXPECTED) for seed in range(40))
