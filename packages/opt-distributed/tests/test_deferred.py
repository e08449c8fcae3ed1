"""The fake accelerator: work runs later, in order within a stream, in any order between streams."""

from typing import Any

import pytest
import torch
from fake_accelerator import DeadlockError, DeferredRank, ReleasedError, run_deferred

from opt_kernels.quantized import QuantizedTensor

SEEDS = range(20)


def outcomes(rank_main: Any, *, size: int = 1) -> set[Any]:
    """What rank 0 returns in the first orders."""
    return {run_deferred(size, rank_main, seed=seed)[0] for seed in SEEDS}


def read_of_another_stream(rank: DeferredRank) -> float:
    with rank.device.on(rank.device.side_stream()):
        x = torch.ones(()) + 1
    return float(x.nan_to_num(0.0))


def memory_dropped_while_another_stream_reads_it(rank: DeferredRank) -> float:
    side = rank.device.side_stream()
    x = torch.ones(()) + 1
    side.wait_event(rank.device.current_stream().record_event())
    with rank.device.on(side):
        y = x * 1
    del x
    torch.zeros(())  # the allocator may give it the memory of `x`
    rank.device.current_stream().wait_event(side.record_event())
    return float(y.nan_to_num(0.0))


def memory_taken_back(rank: DeferredRank) -> tuple[bool, float]:
    x = torch.ones(3)
    rank.device.release_(x)
    rank.device.take_back_(x)
    is_garbage = bool(x.isnan().all())
    return is_garbage, float(x.zero_().sum())


def backward_pass(rank: DeferredRank) -> tuple[float, ...]:
    x = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    (x**3).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return tuple(x.grad.tolist())


def tensor_subclass(rank: DeferredRank) -> bool:
    """`to` came undivided from the subclass, was taken for a view, and converted what had not been computed yet."""
    param = QuantizedTensor.of(torch.arange(32.0 * 32.0).view(32, 32) / 7, "blockwise")
    return torch.equal(param.to(torch.float64), param.dequantize().to(torch.float64))


OUTCOMES: list[tuple[Any, set[Any]]] = [
    (read_of_another_stream, {0.0, 2.0}),
    (memory_dropped_while_another_stream_reads_it, {0.0, 2.0}),
    (memory_taken_back, {(True, 0.0)}),
    (backward_pass, {(3.0, 12.0)}),
    (tensor_subclass, {True}),
]


@pytest.mark.parametrize(("rank_main", "expected"), OUTCOMES)
def test_what_the_host_reads_in_some_order(rank_main: Any, expected: set[Any]) -> None:
    assert outcomes(rank_main) == expected


def test_a_collective_is_not_done_when_the_call_returns_and_an_order_repeats_with_its_seed() -> None:
    def rank_main(rank: DeferredRank) -> tuple[float, ...]:
        x = torch.ones(())
        pending = rank.comm.all_reduce_(x, async_op=True)
        rank.comm.gather_objects(None)  # both have called it
        early = tuple(float(x) for _ in range(5))
        pending.wait()
        assert float(x) == 2.0
        return early

    assert {early[0] for early in outcomes(rank_main, size=2)} == {1.0, 2.0}
    for seed in SEEDS:
        assert run_deferred(2, rank_main, seed=seed) == run_deferred(2, rank_main, seed=seed)


def uses_freed_memory(rank: DeferredRank) -> None:
    x = torch.ones(3)
    rank.device.release_(x)
    x.add_(1.0)


def calls_another_collective(rank: DeferredRank) -> None:
    x, y = torch.ones(2), torch.ones(4)
    rank.comm.all_reduce_(x) if rank.rank == 0 else rank.comm.all_gather_(y, x)


def never_comes(rank: DeferredRank) -> None:
    if rank.rank == 0:
        rank.comm.all_reduce_(torch.ones(2))


@pytest.mark.parametrize(
    ("size", "rank_main", "kind", "message"),
    [
        (1, uses_freed_memory, ReleasedError, "was freed"),
        (2, calls_another_collective, RuntimeError, "collective 0 is"),
        (2, never_comes, DeadlockError, "collectives of"),
    ],
)
def test_a_mistake_of_a_rank_is_an_error(size: int, rank_main: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run_deferred(size, rank_main, seed=0)
