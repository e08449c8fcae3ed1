"""After an error in the middle of a step, partial results are refused and no error is lost."""

from typing import Any

import pytest
import torch
from parity import roles_over
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import CollectiveError, run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.comm import Comm
from opt_distributed.comm.collectives import Pending
from opt_stack import Optimizer, get_optimizer


class Failed:
    def wait(self) -> None:
        raise RuntimeError("connection reset by peer")


class FailingComm(RecordingComm):
    """Drop the results of some collectives, the same ones on all ranks."""

    fails = ""  # the kind of collective that is lost from now on
    at_start = False  # it cannot even be started

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self._lost("reduce_scatter") or super().reduce_scatter_(shard, full, async_op=async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self._lost("all_gather") or super().all_gather_(full, shard, async_op=async_op)

    def _lost(self, kind: str) -> Pending | None:
        if kind == self.fails and self.at_start:
            Failed().wait()
        return Failed() if kind == self.fails else None


def make_model() -> nn.Sequential:
    """Equal weights on all ranks, which are threads of one process."""
    model, generator = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.Generator().manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, generator=generator)
    return model


def wrapped(comm: Comm, *, bucket_size: int | None = None, overlaps: bool = False) -> tuple[Any, Optimizer]:
    fields = {"use_distributed_optimizer": True, "overlap_param_gather": overlaps}
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=bucket_size, **fields)
    model = DistributedDataParallel(ddp, make_model(), groups=roles_over(comm))
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, **fields)
    return model, get_optimizer(config, [model], pg_collection=roles_over(comm))


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
        model, optimizer = wrapped(comm, bucket_size=20, overlaps=True)
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


def test_an_update_that_raised_half_way_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first units were updated, and a second call updated them with the same gradients again."""

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ValueError("the rule is broken")

    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(optimizer="muon", lr=0.1, clip_grad=0.0), [model])
    backward(model)
    assert not optimizer.prepare_grads()
    monkeypatch.setattr(type(optimizer.stepper.units[-1].rule), "update_", broken)
    with pytest.raises(ValueError, match="the rule is broken"):
        optimizer.step_with_ready_grads()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="no gradients are ready"):
        optimizer.step_with_ready_grads()
