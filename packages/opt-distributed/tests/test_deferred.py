"""The fake accelerator: work runs later, in order within a stream, in any order between streams."""

import gc
from typing import Any

import pytest
import torch
from fake_accelerator import DeadlockError, DeferredRank, ReleasedError, run_deferred

from opt_distributed.comm import Op
from opt_distributed.comm.collectives import Sizes
from opt_kernels.quantized import QuantizedTensor

SEEDS = range(20)


def outcomes(rank_main: Any, *, size: int = 1) -> set[Any]:
    """What rank 0 returns in the first orders."""
    return {run_deferred(size, rank_main, seed=seed)[0] for seed in SEEDS}


def test_a_host_read_waits_for_the_current_stream() -> None:
    def rank_main(one: DeferredRank) -> float:
        x = torch.zeros(())
        for _ in range(5):
            x = x * 2 + 1
        return float(x)

    assert outcomes(rank_main) == {31.0}


def test_a_host_read_does_not_wait_for_another_stream() -> None:
    def rank_main(one: DeferredRank) -> float:
        with one.device.on(one.device.side_stream()):
            x = torch.ones(()) + 1
        return float(x.nan_to_num(0.0))

    assert outcomes(rank_main) == {0.0, 2.0}


def test_what_a_tensor_subclass_computes_is_queued() -> None:
    """`to` came undivided from the subclass, was taken for a view, and converted what had not been computed yet."""

    def rank_main(one: DeferredRank) -> bool:
        values = torch.arange(32.0 * 32.0).view(32, 32)
        param = QuantizedTensor.of(values / 7, "blockwise")
        return torch.equal(param.to(torch.float64), param.dequantize().to(torch.float64))

    assert outcomes(rank_main) == {True}


def test_an_event_orders_two_streams() -> None:
    def rank_main(one: DeferredRank) -> float:
        side = one.device.side_stream()
        with one.device.on(side):
            x = torch.ones(()) + 1
        one.device.current_stream().wait_event(side.record_event())
        return float(x)

    assert outcomes(rank_main) == {2.0}


def test_memory_that_is_dropped_is_the_next_owners_while_other_streams_read_it() -> None:
    def rank_main(one: DeferredRank) -> float:
        side = one.device.side_stream()
        x = torch.ones(()) + 1
        side.wait_event(one.device.current_stream().record_event())
        with one.device.on(side):
            y = x * 1
        del x
        torch.zeros(())  # the allocator may give it the memory of `x`
        one.device.current_stream().wait_event(side.record_event())
        return float(y.nan_to_num(0.0))

    assert outcomes(rank_main) == {0.0, 2.0}


def test_memory_that_is_dropped_stays_for_its_own_stream() -> None:
    def rank_main(one: DeferredRank) -> float:
        x = torch.ones(()) + 1
        y = x * 1
        del x
        torch.zeros(())
        return float(y)

    assert outcomes(rank_main) == {2.0}


def test_memory_that_was_given_back_is_not_used() -> None:
    def rank_main(one: DeferredRank) -> None:
        x = torch.ones(3)
        one.device.release_(x)
        x.add_(1.0)

    with pytest.raises(ReleasedError, match="was freed"):
        run_deferred(1, rank_main, seed=0)


def test_memory_that_was_taken_back_has_no_values() -> None:
    def rank_main(one: DeferredRank) -> tuple[bool, float]:
        x = torch.ones(3)
        one.device.release_(x)
        one.device.take_back_(x)
        is_garbage = bool(x.isnan().all())
        return is_garbage, float(x.zero_().sum())

    assert outcomes(rank_main) == {(True, 0.0)}


def test_a_backward_pass_is_deferred_too() -> None:
    def rank_main(one: DeferredRank) -> tuple[float, ...]:
        x = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        (x**3).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return tuple(x.grad.tolist())

    assert outcomes(rank_main) == {(3.0, 12.0)}


def test_random_numbers_do_not_depend_on_the_order() -> None:
    def rank_main(one: DeferredRank) -> tuple[float, ...]:
        numbers = torch.Generator().manual_seed(1)
        first, second = torch.randn(2, generator=numbers), torch.randn(2, generator=numbers)
        return (*first.tolist(), *second.tolist())

    assert len(outcomes(rank_main)) == 1


def collectives(one: DeferredRank) -> tuple[Any, ...]:
    x = torch.arange(4.0) + 10 * one.rank
    total, largest, shard, full, out = x.clone(), x.clone(), torch.empty(2), torch.empty(8), torch.empty(4)
    one.comm.all_reduce_(total)
    one.comm.all_reduce_(largest, op=Op.MAX)
    one.comm.reduce_scatter_(shard, x.clone())
    one.comm.all_gather_(full, x)
    uneven = Sizes(received=[1, 3], sent=[1, 3]) if one.rank == 0 else Sizes(received=[3, 1], sent=[3, 1])
    one.comm.all_to_all_(out, x, sizes=uneven)
    sent = x.clone()
    one.comm.broadcast_(sent, src=1)
    return tuple(tuple(found.tolist()) for found in (total, largest, shard, full, out, sent))


def test_collectives_compute_what_their_names_say() -> None:
    (found,) = outcomes(collectives, size=2)
    assert found == (
        (10.0, 12.0, 14.0, 16.0),
        (10.0, 11.0, 12.0, 13.0),
        (10.0, 12.0),
        (0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0),
        (0.0, 10.0, 11.0, 12.0),
        (10.0, 11.0, 12.0, 13.0),
    )


def test_a_collective_is_not_done_when_the_call_returns() -> None:
    def rank_main(one: DeferredRank) -> float:
        x = torch.ones(())
        pending = one.comm.all_reduce_(x, async_op=True)
        one.comm.gather_objects(None)  # both have called it
        early = float(x)
        pending.wait()
        assert float(x) == 2.0
        return early

    assert outcomes(rank_main, size=2) == {1.0, 2.0}


def test_collectives_that_ranks_call_in_another_order_are_refused() -> None:
    def rank_main(one: DeferredRank) -> None:
        x, y = torch.ones(2), torch.ones(4)
        if one.rank == 0:
            one.comm.all_reduce_(x)
        else:
            one.comm.all_gather_(y, x)

    with pytest.raises(RuntimeError, match="collective 0 is"):
        run_deferred(2, rank_main, seed=0)


def test_a_rank_that_never_comes_is_a_deadlock() -> None:
    def rank_main(one: DeferredRank) -> None:
        if one.rank == 0:
            one.comm.all_reduce_(torch.ones(2))

    with pytest.raises(DeadlockError, match="collectives of"):
        run_deferred(2, rank_main, seed=0)


def test_an_order_repeats_with_its_seed() -> None:
    def rank_main(one: DeferredRank) -> tuple[Any, ...]:
        x = torch.ones(())
        pending = one.comm.all_reduce_(x, async_op=True)
        seen = [float(x) for _ in range(5)]
        pending.wait()
        return tuple(seen)

    for seed in SEEDS:
        assert run_deferred(2, rank_main, seed=seed) == run_deferred(2, rank_main, seed=seed)


class Cycle:
    """Garbage that only the collector can free, whose finalizer reads a tensor."""

    def __init__(self, finalized: list[float]):
        self.itself, self.finalized, self.value = self, finalized, torch.ones(())

    def __del__(self) -> None:
        self.finalized.append(float(self.value + 1))


def test_no_finalizer_runs_in_the_middle_of_a_task() -> None:
    """The finalizer of another test's optimizer read its last step, and took the task that was about to run."""
    finalized: list[float] = []

    def rank_main(one: DeferredRank) -> int:
        garbage = [Cycle(finalized) for _ in range(5)]
        garbage.clear()
        young, old, _ = gc.get_threshold()
        cells = [[number] for number in range(3 * young * old)]  # enough for collections of both generations
        return len(finalized) * len(cells)

    assert run_deferred(1, rank_main, seed=0) == [0]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        run_deferred(1, lambda one: 1 / 0, seed=0)
    assert gc.isenabled()
