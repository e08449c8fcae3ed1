"""Offload to the host of a device that runs its work later: the bits are a CPU's, in every legal order of the work.

More orders at night.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fake_accelerator import run_deferred
from offloaded import small_parts, train
from on_device import NUM_ORDERS, SIZE, equal, launched, layouts, train_on_host
from parity import Case, Numbers, Spread, Wrapping

from opt_distributed import run_threads
from opt_distributed.comm.device import _DONE as DONE
from opt_distributed.pieces import HostMain, HostSide, StepNumbers, Update

pytestmark = pytest.mark.usefixtures(launched.__name__, small_parts.__name__)


@pytest.mark.parametrize("case", layouts(), ids=str)
def test_every_order_gives_the_bits_of_a_step_without_offload(case: Case) -> None:
    """One of the steps overflows."""
    expected = run_threads(SIZE, partial(train_on_host, case))
    for seed in range(max(2, NUM_ORDERS)):
        fields = {"overlap_cpu_optimizer_d2h_h2d": seed % 2 == 0, "optimizer_offload_fraction": (0.5, 1.0)[seed % 2]}
        found = run_deferred(SIZE, partial(train, case, **fields), seed=seed)
        assert all(map(equal, found, expected)), f"seed {seed}"


FLAT = Case(
    size=SIZE, spread=Spread.FLAT, numbers=Numbers.BF16, rule="adam", clips=True, wrapping=Wrapping.OVERLAP
)  # fmt: skip
DIRECT = replace(FLAT, numbers=Numbers.FP32)
Patch = pytest.MonkeyPatch


def the_host_does_not_wait_for_gradients(patch: Patch) -> None:
    wait = HostSide.wait

    def early(side: HostSide, update: Update) -> Update:
        side._arrived = DONE
        return wait(side, update)

    patch.setattr(HostSide, "wait", early)


def the_host_updates_in_spite_of_the_verdict(patch: Patch) -> None:
    wait = StepNumbers.wait
    patch.setattr(StepNumbers, "wait", lambda numbers: (False, wait(numbers)[1]))


def last_steps_verdict_is_taken(patch: Patch) -> None:
    patch.setattr(StepNumbers, "forget", lambda numbers: None)


def copies_do_not_wait_for_the_reduction(patch: Patch) -> None:
    patch.setattr(HostSide, "_begin", lambda side: side.device.side_stream())


def nobody_waits_for_returned_parameters(patch: Patch) -> None:
    def return_(side: HostSide, pieces: Any) -> None:
        with side.device.on(side.device.side_stream()):
            for piece in pieces:
                piece.main.target.copy_(piece.main.staged, non_blocking=True)

    patch.setattr(HostSide, "return_", return_)


def parameters_are_returned_before_the_update(patch: Patch) -> None:
    wait, return_ = HostSide.wait, HostSide.return_

    def early(side: HostSide, update: Update) -> Update:
        return_(side, update.ready.pieces)
        return wait(side, update)

    patch.setattr(HostSide, "wait", early)
    patch.setattr(HostSide, "return_", lambda side, pieces: None)


def gradients_are_given_back_while_they_are_copied(patch: Patch) -> None:
    fetch = HostSide.fetch_

    def of_copies(side: HostSide, update: Update) -> None:
        with side.device.on(side.device._compute):
            copies = [grad.clone() for grad in update.ready.grads]
        fetch(side, update._replace(ready=update.ready._replace(grads=copies)))

    patch.setattr(HostSide, "fetch_", of_copies)


def staging_is_written_while_it_is_copied(patch: Patch) -> None:
    return_ = HostSide.return_

    def and_write(side: HostSide, pieces: Any) -> None:
        return_(side, pieces)
        with side.device.on_host():
            for piece in pieces:
                piece.main.staged.zero_()

    patch.setattr(HostSide, "return_", and_write)


def parameters_that_an_update_reads_are_not_fetched(patch: Patch) -> None:
    patch.setattr(HostMain, "reads_param", False)


FAULTS: dict[str, tuple[Callable[[Patch], None], Case]] = {
    plant.__name__.replace("_", " "): (plant, case)
    for plant, case in [
        (the_host_does_not_wait_for_gradients, FLAT),
        (the_host_updates_in_spite_of_the_verdict, FLAT),
        (last_steps_verdict_is_taken, FLAT),
        (copies_do_not_wait_for_the_reduction, FLAT),
        (nobody_waits_for_returned_parameters, FLAT),
        (parameters_are_returned_before_the_update, FLAT),
        (gradients_are_given_back_while_they_are_copied, FLAT),
        (staging_is_written_while_it_is_copied, FLAT),
        (parameters_that_an_update_reads_are_not_fetched, DIRECT),
    ]
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_order_of_copies_is_noticed(name: str) -> None:
    plant, case = FAULTS[name]
    expected = run_threads(SIZE, partial(train_on_host, case))

    def is_noticed(seed: int) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found = run_deferred(SIZE, partial(train, case), seed=seed)
        return not all(map(equal, found, expected))

    assert any(map(is_noticed, range(20)))
