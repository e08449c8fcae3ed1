"""Norms, clipping and collectives of a step on any layout, in whole steps and in halves.

After an error in the middle of a step, partial results are refused and no error is lost.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import SHAPES, SPREADS, Net, config, grads_of, roles_over, step_once
from recording_comm import Call, RecordingComm
from torch import Tensor, nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_distributed import CollectiveError, run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.comm import Comm
from opt_distributed.comm.collectives import Pending
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.hooks import CautiousDecay, CentralizeGradient, ClipUpdateRms, RelativeUpdate
from opt_stack import Optimizer, get_optimizer


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf], ids=["1", "3", "inf"])
def test_other_norms_are_those_of_the_mean_gradient(spread: str, norm_type: float) -> None:
    """They are of unscaled gradients, and each element counts once on any layout."""

    def norm(comm: ThreadComm) -> float:
        net = Net(torch.float32)
        adam = config(loss_scale=8.0, **SPREADS[spread])
        optimizer = get_optimizer(adam, [net], {}, pg_collection=roles_over(comm))
        optimizer.scale_loss(net(grads_of(0, comm.rank, comm.size))).backward()
        assert not optimizer.prepare_grads()
        return optimizer.get_grad_norm(norm_type)

    everything = torch.cat([grad.double().flatten() for grad in grads_of(0, 0, 1).values()])
    want = torch.linalg.vector_norm(everything, norm_type).item()
    assert run_threads(3, norm) == pytest.approx([want] * 3, rel=1e-6)


BETWEEN: dict[str, tuple[Callable[[Optimizer], object], str]] = {
    "another norm": (lambda optimizer: optimizer.clip_grad_norm(0.5), r"clip to different norms: \[0\.5, 1\.0\]"),
    "another rate": (lambda optimizer: optimizer.param_groups[0].update(lr=0.5), "has different numbers on the ranks"),
    "no rate": (lambda optimizer: optimizer.param_groups[0].update(lr=None), "lr of group 'default' is None"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_changes_between_halves_of_a_step_are_refused_on_all(name: str) -> None:
    """Its weights were updated with another number than those of its replicas, without an error."""
    change, message = BETWEEN[name]

    def rank_main(comm: ThreadComm) -> None:
        net = Net(torch.float32)
        optimizer = get_optimizer(config(), [net], {}, pg_collection=roles_over(comm))
        net(grads_of(0, comm.rank, comm.size)).backward()
        before = [param.detach().clone() for param in net.parameters()]
        assert not optimizer.prepare_grads()
        if comm.rank == 1:
            change(optimizer)
        with pytest.raises(ValueError, match=message):
            optimizer.step_with_ready_grads()
        assert all(map(torch.equal, before, net.parameters()))

    run_threads(2, rank_main)


def test_norms_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_grad=0.5; allowed are True .* and False"):
        get_optimizer(config(), [Net(torch.float32)], {ParamKey(name="first.weight"): {"clip_grad": 0.5}})
    optimizer = get_optimizer(config(), [Net(torch.float32)], {})
    with pytest.raises(ValueError, match=r"clip_grad=-1\.0; pass a norm above 0, or 0 for no clipping"):
        optimizer.clip_grad_norm(-1.0)
    with pytest.raises(ValueError, match="grad_norm_group 'other': allowed are '', 'mtp'"):
        optimizer.has_grad_norm_group("other")
    assert not optimizer.has_grad_norm_group("mtp")
    assert optimizer.get_grad_stats_parallel_group() is None


# --- collectives ------------------------------------------------------------------------------------------------------


def calls_of_a_step(spread: str, rule: str, hooks: Any = ()) -> tuple[list[Call], Optimizer]:
    """The collectives of a second step, on the first of two ranks."""

    def rank_main(comm: ThreadComm) -> tuple[list[Call], Optimizer]:
        recorded = RecordingComm(comm)
        made = step_once(config(optimizer=rule, **SPREADS[spread]), recorded, hooks=hooks)
        recorded.calls.clear()
        made.step()
        return recorded.calls, made

    return run_threads(2, rank_main)[0]


@pytest.mark.parametrize(
    ("spread", "rule"), [("replicated", "adam"), ("flat", "adam"), ("whole", "muon"), ("whole", "adam")]
)
def test_a_step_reduces_and_gathers_once_with_one_small_sum(spread: str, rule: str) -> None:
    calls, optimizer = calls_of_a_step(spread, rule)
    buffers = [buffer.layout for buffer in optimizer.plan.buffers]
    numel = sum(layout.numel for layout in buffers)
    num_buckets = sum(len(layout.buckets) for layout in buffers)
    by_kind = {kind: [call.numel for call in calls if call.kind == kind] for kind in {call.kind for call in calls}}
    # Two norms; non-finite elements, zeros; the sum and number of losses; flags of six guards; three of each group's
    # numbers; whether each parameter has a gradient.
    statistics = by_kind["all_reduce"].pop()
    assert statistics <= 12 + 3 * len(optimizer.param_groups) + len(SHAPES)
    # Of shards that differ in size, after a reduction and before a gather.
    exchanged = 2 * sum(bool(bucket.cuts) for layout in buffers for bucket in layout.buckets)
    assert len(by_kind.pop("all_to_all", ())) == exchanged
    if spread == "replicated":
        assert by_kind.keys() == {"all_reduce"}
        assert sum(by_kind["all_reduce"]) == numel
        return
    assert by_kind.pop("all_reduce") == []
    assert by_kind.keys() == {"reduce_scatter", "all_gather"}
    assert [(sum(sizes), len(sizes)) for sizes in by_kind.values()] == [(numel, num_buckets)] * 2


NORMS = (ClipUpdateRms(), RelativeUpdate())
CENTERS = (CentralizeGradient(),)


@pytest.mark.parametrize(
    ("hooks", "spread", "rule", "more"),
    [
        (NORMS, "flat", "adam", 1),
        ((CautiousDecay(),), "flat", "adam", 0),
        (NORMS, "replicated", "adam", 0),  # replicas hold whole parameters
        (NORMS, "whole", "muon", 1),  # of Adam's parameters
        (CENTERS, "flat", "adam", 1),
        ((*CENTERS, ClipUpdateRms()), "flat", "adam", 2),
        (CENTERS, "replicated", "adam", 0),
    ],
)
def test_hooks_of_cut_parameters_take_one_collective(hooks: Any, spread: str, rule: str, more: int) -> None:
    plain, found = ([call.kind for call in calls_of_a_step(spread, rule, given)[0]] for given in ((), hooks))
    assert sorted(found) == sorted([*plain, *["all_reduce"] * more])


# --- after an error ---------------------------------------------------------------------------------------------------


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
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    generator = torch.Generator().manual_seed(0)
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
def test_grads_of_a_failed_reduction_are_refused_until_zeroed(at_start: bool) -> None:
    """The second step used what the failed reduction had left in the buffer."""

    def rank_main(inner: Comm) -> None:
        comm = FailingComm(inner)
        model, optimizer = wrapped(comm)
        backward(model)
        comm.fails = "reduce_scatter"
        comm.at_start = at_start
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


def test_params_of_a_failed_gather_are_unreadable_until_gathered() -> None:
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
