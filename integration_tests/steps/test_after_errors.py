"""After an error in the middle of a step, partial results are refused and no error is lost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from on_device import SHAPES, SIZE, built
from parity import Case, Numbers, Spread, Wrapping, grads_of, roles_over
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import CollectiveError, run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.comm import Comm
from opt_distributed.comm.collectives import Pending
from opt_distributed.step import StepResult
from opt_stack import Optimizer, get_optimizer

Module = TypeVar("Module", bound=nn.Module)


class Failed:
    def wait(self) -> None:
        raise RuntimeError("connection reset by peer")


@dataclass
class FailingComm(RecordingComm):
    """Drop the results of some collectives, the same ones on all ranks."""

    inner: Comm
    fails: str = ""  # the kind of collective that is lost from now on
    at_start: bool = False  # it cannot even be started
    calls: list[Any] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self._lost("reduce_scatter") or super().reduce_scatter_(shard, full, async_op=async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self._lost("all_gather") or super().all_gather_(full, shard, async_op=async_op)

    def _lost(self, kind: str) -> Pending | None:
        if kind == self.fails and self.at_start:
            Failed().wait()
        return Failed() if kind == self.fails else None

    __hash__ = object.__hash__


def make_model() -> nn.Sequential:
    return initialised(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def initialised(model: Module) -> Module:
    """Give all ranks, which are threads of one process, equal weights."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, generator=generator)
    return model


def wrapped(comm: Comm, *, bucket_size: int | None = None, **fields: Any) -> tuple[DistributedDataParallel, Optimizer]:
    roles = roles_over(comm)
    overlaps = fields.get("overlap_param_gather", False)
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=bucket_size, overlap_param_gather=overlaps
    )
    model = DistributedDataParallel(wrapping, make_model(), groups=roles)
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, use_distributed_optimizer=True, **fields)
    return model, get_optimizer(config, [model], pg_collection=roles)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().mean().backward()


@pytest.mark.parametrize("at_start", [True, False], ids=["not started", "not completed"])
def test_gradients_whose_reduction_failed_are_refused_until_they_are_zeroed(at_start: bool) -> None:
    """The second step used what the failed reduction had left in the buffer."""

    def rank_main(inner: Comm) -> None:
        comm = FailingComm(inner)
        model, optimizer = wrapped(comm)
        backward(model)
        comm.fails, comm.at_start = "reduce_scatter", at_start
        with pytest.raises(CollectiveError, match="connection reset by peer"):
            optimizer.step()
        comm.fails = ""
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(UnusableGradientError, match=r"the reduction of bucket 0 of .* dense, .* failed"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
        backward(model)
        assert optimizer.step().success

    run_threads(2, rank_main)


def test_parameters_whose_gather_failed_cannot_be_read_until_they_are_gathered_again() -> None:
    """The first read raised; the next one, such as a save in an `except` block, returned stale values."""

    def rank_main(inner: Comm) -> None:
        comm = FailingComm(inner)
        model, optimizer = wrapped(comm, bucket_size=20, overlap_param_gather=True)
        backward(model)
        comm.fails = "all_gather"
        optimizer.step()
        comm.fails = ""
        for _ in range(2 + len(model.param_sync.buckets)):
            with pytest.raises(CollectiveError, match="connection reset by peer"):
                model.state_dict()
        model.start_param_sync(force_sync=True)
        values = model.state_dict()
        assert all(torch.equal(value, values[name]) for name, value in comm.gather_objects(values)[0].items())
        optimizer.zero_grad()
        backward(model)
        assert optimizer.step().success

    run_threads(2, rank_main)


def broken(*args: Any, **kwargs: Any) -> None:
    raise ValueError("the rule is broken")


def test_an_update_that_raised_half_way_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first units were updated, and a second call updated them with the same gradients again."""
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(optimizer="muon", lr=0.1, clip_grad=0.0), [model])
    backward(model)
    assert not optimizer.prepare_grads()
    rule = optimizer.stepper.units[-1].rule
    monkeypatch.setattr(type(rule), "update_", broken)
    with pytest.raises(ValueError, match="the rule is broken"):
        optimizer.step_with_ready_grads()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no gradients are ready"):
        optimizer.step_with_ready_grads()


FLAT = Case(size=SIZE, spread=Spread.FLAT, numbers=Numbers.FP32, rule="adam", clips=True, wrapping=Wrapping.PLAIN)


def results_of(one: DeferredRank) -> list[str]:
    """Errors of calls in order. Rank 1 applies another learning rate in two steps; the step after each raises that."""
    model, optimizer = built(FLAT, one.comm)
    raised: list[str] = []
    results: list[StepResult] = []

    def attempt(call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:
            raised.append(type(error).__name__)
        else:
            raised.append("")

    def step(lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        results.append(optimizer.step())

    for number, lr in enumerate((0.1, 0.1 + one.rank, 0.1, 0.1 + one.rank, 0.1)):
        optimizer.scale_loss(model(grads_of(number, one.rank, one.size, SHAPES))).backward()
        attempt(partial(step, lr))
        if raised[-1]:  # the error of the step before
            attempt(partial(step, lr))
        if number == 3:
            attempt(lambda: results[1].success)
        optimizer.zero_grad()
    return raised


def test_a_late_read_of_a_refused_step_does_not_hide_the_error_of_a_later_one() -> None:
    expected = ["", "", "HyperError", "", "", "HyperError", "HyperError", ""]
    for seed in range(3):
        assert run_deferred(SIZE, results_of, seed=seed) == [expected] * SIZE
