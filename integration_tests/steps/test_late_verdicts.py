"""Saves and loads right after a step whose result the host has not read: an overflow, a refused norm, an error."""

import gc
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from on_device import FLAT, SHAPES, SIZE, backward, built, launch_rules_, launched, with_copies, zero
from parity import SPREADS, Net, Numbers, Spread, config, grads_of, roles_over, sharded_state
from processes import refusal
from tiers import NIGHT
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import ReplicaError
from opt_distributed.comm.device import HostCopy
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.step import outcome
from opt_stack import Optimizer, get_optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)
ORDERS = range(8 if NIGHT else 2)
SCALE = 2.0**8
GRAPHS = pytest.mark.parametrize("graphs", [False, True], ids=["as it is", "graph"])


def begun(one: DeferredRank, *, graphs: bool = False, guards: Sequence[Any] = ()) -> tuple[nn.Module, Optimizer]:
    """After three good steps, the last of them a replay where there are graphs; the scale has grown once."""
    model, optimizer = built(FLAT, one.comm, optimizer_cuda_graph=graphs)
    optimizer.stepper.guards.extend(guards)
    launch_rules_(optimizer)
    for step in (0, 2, 3):
        advance(model, optimizer, step, one)
        zero(model, optimizer)
    return model, optimizer


def advance(model: nn.Module, optimizer: Optimizer, step: int, one: DeferredRank, *, bad: bool = False) -> Any:
    backward(model, optimizer, step, one.comm, bad=bad)
    return optimizer.step()


def in_state_dict(model: nn.Module, optimizer: Optimizer) -> tuple[set[float], float]:
    """The saved counts and scale, read only afterwards."""
    saved = optimizer.state_dict()
    return {float(state["step"]) for state in saved["state"].values()}, saved["grad_scaler"]["scale"]


def in_sharded_state(model: nn.Module, optimizer: Optimizer) -> tuple[set[float], float]:
    saved = sharded_state(model, optimizer)["optimizer"]["state"]
    return {float(state["step"].data) for state in saved.values()}, optimizer.stepper.scaler.state_dict()["scale"]


def messages(of: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


READS = (in_state_dict, in_sharded_state)
REFUSED = "step 4 was refused, and its result has not been read: .* has different numbers on the ranks"
# What happens in the fourth step; counts and scale after it. The scale grows after two good steps, and falls at once
# after an overflow; a refused step, of which nobody has read the result, leaves it.
OUTCOMES = {"overflow": ({3.0}, SCALE), "good": ({4.0}, 4 * SCALE), "refused": ({3.0}, 2 * SCALE)}


@GRAPHS
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_save_right_after_a_step_has_its_counts_and_scale(outcome: str, graphs: bool) -> None:
    """Refused: ranks have different learning rates. A save warns of that once, and the next step raises it."""

    def rank_main(one: DeferredRank, first: int) -> tuple[set[float], float]:
        model, optimizer = begun(one, graphs=graphs)
        optimizer.param_groups[0]["lr"] += one.rank * (outcome == "refused")
        advance(model, optimizer, 4, one, bad=outcome == "overflow")
        found = READS[first](model, optimizer)
        assert READS[1 - first](model, optimizer) == found
        if outcome == "refused":
            with pytest.raises(ValueError, match="has different numbers on the ranks"):
                optimizer.step()
        return found

    def in_every_order() -> None:
        for seed in ORDERS:
            assert run_deferred(SIZE, partial(rank_main, first=seed % 2), seed=seed) == [OUTCOMES[outcome]] * SIZE

    warned = [text for text in messages(in_every_order) if "state_dict" in text]
    assert len(warned) == len(ORDERS) * SIZE * (outcome == "refused")
    assert all(re.match(rf"(sharded_)?state_dict\(\): {REFUSED}", text) for text in warned)


@GRAPHS
def test_a_load_after_an_overflow_sets_counts_scale_and_weights(graphs: bool) -> None:
    """Work queued before the load cannot undo it, and the next step continues from the loaded state."""

    def moments(saved: Any) -> Tensor:
        kept = [state[name] for state in saved["state"].values() for name in state if name.startswith("exp_avg")]
        return torch.cat([moment.flatten() for moment in kept])

    def rank_main(one: DeferredRank) -> tuple[Any, ...]:
        model, optimizer = begun(one, graphs=graphs)
        saved = with_copies(optimizer.state_dict())
        saved["grad_scaler"] = saved["grad_scaler"] | {"scale": 32.0, "growth_tracker": 0}
        for state in saved["state"].values():
            state["step"] = state["step"] + 7
        advance(model, optimizer, 4, one, bad=True)
        optimizer.load_state_dict(saved)
        zero(model, optimizer)
        loaded = in_state_dict(model, optimizer)
        same = torch.equal(moments(optimizer.state_dict()), moments(saved))
        advance(model, optimizer, 5, one)
        return loaded, same, in_state_dict(model, optimizer)

    for seed in ORDERS:
        assert run_deferred(SIZE, rank_main, seed=seed) == [(({10.0}, 32.0), True, ({11.0}, 32.0))] * SIZE


# --- warnings of a last step that was refused -------------------------------------------------------------------------


def refused_at_last(one: DeferredRank) -> tuple[nn.Module, Optimizer]:
    """The last step is refused, because ranks have different learning rates. Its result is not read."""
    model, optimizer = begun(one)
    optimizer.param_groups[0]["lr"] += one.rank
    advance(model, optimizer, 4, one)
    return model, optimizer


@pytest.mark.parametrize("then", [outcome.warn_of_deleted, outcome._warn_at_exit])
def test_a_refused_last_step_is_reported_at_exit(then: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may be collected while a graph is captured, or while another thread waits: nothing may wait then."""
    messages(outcome._warn_at_exit)  # of refused steps that earlier tests left unread
    kept: list[Optimizer] = []
    refuse = lambda: run_deferred(SIZE, lambda one: kept.append(refused_at_last(one)[1]), seed=0)
    refuse()
    found = messages(outcome._warn_at_exit)
    assert [bool(re.match(f"the interpreter exits: {REFUSED}", text)) for text in found] == [True] * SIZE
    refuse()
    arrives = HostCopy.arrives
    looks: list[float] = []
    monkeypatch.setattr(HostCopy, "arrives", lambda copy, within: looks.append(within) or arrives(copy, within))
    assert messages(lambda: (kept.clear(), gc.collect())) == []
    assert looks == []
    found = messages(then)
    assert [bool(re.match(f"the optimizer was deleted: {REFUSED}", text)) for text in found] == [True] * SIZE
    assert messages(then) == []


@pytest.mark.parametrize("ends", ["read", "next step", "overflow"])
def test_a_last_step_that_was_read_or_overflowed_is_not_reported(ends: str) -> None:
    """An overflow is not an error: the loss scale is lowered."""

    def rank_main(one: DeferredRank) -> None:
        model, optimizer = begun(one)
        optimizer.param_groups[0]["lr"] += one.rank * (ends != "overflow")
        result = advance(model, optimizer, 4, one, bad=ends == "overflow")
        if ends != "overflow":
            with pytest.raises(ValueError, match="has different numbers"):
                result.success if ends == "read" else optimizer.step()
        optimizer.state_dict()
        one.device.synchronize()

    assert messages(lambda: (run_deferred(SIZE, rank_main, seed=0), gc.collect())) == []


def test_the_recording_names_the_step_that_was_refused() -> None:
    """It named the next step as well, which raises the error."""

    def rank_main(one: DeferredRank) -> list[int]:
        _, optimizer = refused_at_last(one)
        with pytest.raises(ValueError, match="has different numbers"):
            optimizer.step()
        optimizer.recorder.report()
        return [*optimizer.recorder.refused]

    assert run_deferred(SIZE, rank_main, seed=0) == [[4]] * SIZE


def test_a_late_read_of_a_refused_step_keeps_later_errors() -> None:
    """Two steps are refused, each of which the next step raises; in between, the result of the first is read."""

    def rank_main(one: DeferredRank) -> list[bool]:
        model, optimizer = built(replace(FLAT, numbers=Numbers.FP32), one.comm)
        results: list[Any] = []
        raised: list[bool] = []

        def attempt(call: Callable[[], object]) -> None:
            raised.append("different numbers on the ranks" in refusal(call))

        for number, lr in enumerate((0.1, 0.1 + one.rank, 0.1, 0.1 + one.rank, 0.1)):
            backward(model, optimizer, number, one.comm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            attempt(lambda: results.append(optimizer.step()))
            if raised[-1]:  # the error of the step before
                attempt(lambda: results.append(optimizer.step()))
            if number >= 3:
                attempt(lambda: results[1].success)
            optimizer.zero_grad()
        assert optimizer.grad_norms_by_group  # of the last step, though an older one was read since
        return raised

    expected = [False, False, True, False, False, True, True, False, True]
    for seed in ORDERS:
        assert run_deferred(SIZE, rank_main, seed=seed) == [expected] * SIZE


# --- replicas and guards ----------------------------------------------------------------------------------------------


@GRAPHS
def test_a_write_on_one_replica_is_refused_a_step_later(graphs: bool) -> None:
    """The host learns from the verdict of a step that only one rank wrote; replicas were never compared."""
    case = replace(FLAT, spread=Spread.REPLICATED, numbers=Numbers.FP32)

    def rank_main(one: DeferredRank) -> str:
        model, optimizer = built(case, one.comm, optimizer_cuda_graph=graphs)
        launch_rules_(optimizer)
        for step in range(4):
            if (step, one.rank) == (3, 0):
                with torch.no_grad():
                    next(model.parameters()).mul_(2)
            advance(model, optimizer, step, one)
            zero(model, optimizer)
        for _ in range(2):  # a retry is refused, too
            backward(model, optimizer, 4, one.comm)
            with pytest.raises(ReplicaError, match="ranks hold different values of") as refused:
                optimizer.step()
            zero(model, optimizer)
        return str(refused.value)

    for seed in ORDERS:
        assert len(set(run_deferred(SIZE, rank_main, seed=seed))) == 1


class MyGuard:
    """A guard of a caller's own: no rank may see a number above its limit."""

    num_flags = 1

    def __init__(self, number: float = 0.0):
        self.number = number

    def flags(self, groups: object) -> list[float]:
        return [float(self.number > 10)]

    def is_wrong(self, sums: Tensor) -> Tensor:
        return sums > 0

    def error(self, sums: Any) -> Exception:
        return ValueError(f"{int(sums[0])} rank(s) have seen a number above 10; here {self.number}")


@GRAPHS
def test_a_guard_refuses_on_every_rank_and_keeps_the_loss_scale(graphs: bool) -> None:
    """`report` counts the step as refused, not as an overflow."""

    def rank_main(one: DeferredRank) -> tuple[str, float, bool]:
        guard = MyGuard()
        model, optimizer = begun(one, graphs=graphs, guards=[guard])
        guard.number = 7.0 + 5 * one.rank
        scale = optimizer.stepper.scaler.state_dict()
        before = [param.detach().clone() for param in model.parameters()]
        result = advance(model, optimizer, 4, one, bad=True)
        with pytest.raises(ValueError, match="have seen a number above 10") as refused:
            result.success  # noqa: B018  # read, which raises
        stayed = all(map(torch.equal, before, model.parameters()))
        *_, counts, _ = optimizer.report().splitlines()
        assert counts.endswith(f": {refused.value}")
        return str(refused.value), optimizer.stepper.scaler.state_dict() == scale, stayed

    expected = [(f"1 rank(s) have seen a number above 10; here {7.0 + 5 * rank}", True, True) for rank in range(SIZE)]
    for seed in ORDERS:
        assert run_deferred(SIZE, rank_main, seed=seed) == expected


def append(optimizer: Optimizer, rank: int) -> None:
    if rank == 0:
        optimizer.stepper.guards.append(MyGuard())


def with_flags(flags: Callable[[object], list[float]], optimizer: Optimizer, rank: int, *, of: str = "MyGuard") -> None:
    if rank == 0:
        [guard] = [guard for guard in optimizer.stepper.guards if type(guard).__name__ == of]
        vars(guard)["flags"] = flags


# What rank 0 does before which step, and what it and the other one raise. Both ranks begin with a guard.
WRONG_GUARDS: dict[str, tuple[Callable[[Optimizer, int], None], int, tuple[str, str]]] = {
    "other guards": (append, 0, ("ranks have different guards, by type and number of flags",) * 2),
    "changed": (append, 1, ("guards were changed after the first step", "1 other rank")),
    "raises": (partial(with_flags, lambda groups: [1 / 0]), 1, ("division by zero", "1 other rank")),
    "that of failed guards raises": (
        partial(with_flags, lambda groups: [1 / 0], of="UsableGrads"), 1, ("division by zero", "1 other rank")
    ),
    "flags": (
        partial(with_flags, lambda groups: [0.0, 0.0]), 1, ("MyGuard has 2 flags, but num_flags=1", "1 other rank")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_GUARDS)
def test_a_broken_guard_of_one_rank_is_an_error_on_every_rank(name: str) -> None:
    change, at, messages = WRONG_GUARDS[name]

    def rank_main(comm: ThreadComm) -> None:
        model = Net(torch.float32, SHAPES)
        optimizer = get_optimizer(config(**SPREADS["flat"]), [model], {}, pg_collection=roles_over(comm))
        optimizer.stepper.guards.append(MyGuard())
        for step in range(at + 1):
            model(grads_of(step, comm.rank, comm.size, SHAPES)).backward()
            before = [param.detach().clone() for param in model.parameters()]
            if step < at:
                optimizer.step()
        change(optimizer, comm.rank)
        with pytest.raises(Exception, match=messages[comm.rank]):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))

    run_threads(2, rank_main)
