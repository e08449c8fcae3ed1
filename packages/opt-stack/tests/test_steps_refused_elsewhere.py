"""What other ranks wrote or refused: over optimizer instances, on an accelerator, and after the optimizer is gone."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from stack_models import over
from torch import nn

from opt_checkpoint import sharded_model
from opt_distributed import HyperError, ReplicaError, run_threads
from opt_distributed.buffers import UnusableGradientError
from opt_distributed.comm import Alone, Axes, Comm, Roles, device
from opt_distributed.comm.threads import World
from opt_kernels.backends import grad_stats
from opt_stack import Optimizer, OptimizerConfig, get_optimizer


class _Queued(device.Device):
    """A host that reports errors as late as an accelerator does."""

    is_asynchronous = True


@pytest.fixture
def accelerator() -> Iterator[None]:
    queued = _Queued()
    with patch.object(device, "device_of", lambda _: queued):
        yield


def made(roles: Roles, **fields: object) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(16, 16)
    with torch.no_grad():
        model.weight.copy_(torch.arange(256.0).view(16, 16) % 7 - 3)
        model.bias.zero_()
    return model, get_optimizer(OptimizerConfig(lr=1e-2, **fields), [model], pg_collection=roles)


def step(model: nn.Module, optimizer: Optimizer) -> bool:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return optimizer.step().success


def on_two_instances(program: Callable[[int, Roles], None]) -> list[Exception | None]:
    """Run a program on two instances of two shards; return the exception of every rank."""
    shards, places = ([World(2).comms() for _ in range(2)] for _ in range(2))

    def rank_main(comm: Comm) -> Exception | None:
        instance, shard = divmod(comm.rank, 2)
        axes = Axes(dp=shards[instance][shard], tp=Alone(), inter=places[shard][instance])
        try:
            program(comm.rank, Roles(dense=axes, expert=axes, everyone=comm, instance=shards[instance][shard]))
        except Exception as error:
            return error
        return None

    return run_threads(4, rank_main)


def write_weight(model: nn.Module, optimizer: Optimizer) -> None:
    model.weight.detach().add_(1.0)
    optimizer.reload_model_params()


def assign_moment(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[model.weight]["exp_avg"] = torch.full((16, 16), 9.0)


def assign_state(model: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.state[model.weight]
    optimizer.state[model.weight] = {**state, "exp_avg": torch.full((16, 16), 9.0)}


WRITES = [(write_weight, writers, sharded) for writers in ((0, 1), (0,)) for sharded in (False, True)]
WRITES += [(assign_moment, (0,), False), (assign_state, (0,), False)]


@pytest.mark.parametrize(("write", "writers", "sharded"), WRITES)
def test_what_one_instance_or_rank_wrote_is_refused_on_all(
    write: Callable[[nn.Module, Optimizer], None], writers: tuple[int, ...], sharded: bool
) -> None:
    """Replicas went on with different moments."""

    def program(rank: int, roles: Roles) -> None:
        model, optimizer = made(roles, use_distributed_optimizer=sharded)
        step(model, optimizer)
        if rank in writers:
            write(model, optimizer)
        step(model, optimizer)

    assert [type(error) for error in on_two_instances(program)] == [ReplicaError] * 4


@pytest.mark.parametrize("sharded", [False, True])
def test_each_element_of_two_instances_state_is_saved_once(sharded: bool) -> None:
    saving = set()

    def program(rank: int, roles: Roles) -> None:
        model, optimizer = made(roles, use_distributed_optimizer=sharded)
        state = optimizer.sharded_state_dict(sharded_model(model))
        if not any(state["state"]["weight"]["exp_avg"].replica_id):
            saving.add(rank)

    assert on_two_instances(program) == [None] * 4
    assert saving == ({0, 1} if sharded else {0})


def test_instances_of_one_rank_compare_their_groups() -> None:
    def rank_main(comm: Comm) -> None:
        axes = Axes(dp=Alone(), tp=Alone(), inter=comm)
        model, optimizer = made(Roles(dense=axes, expert=axes, everyone=comm, instance=Alone()))
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + comm.rank)
        with pytest.raises(HyperError, match="different numbers"):
            step(model, optimizer)

    run_threads(2, rank_main)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("reads", [False, True])
def test_weights_written_before_a_refused_step_are_not_forgotten(reads: bool) -> None:
    # On an accelerator the refusal of the step hid that rank 0 had written, and replicas differed from then on.
    def rank_main(comm: Comm) -> list[str]:
        model, optimizer = made(over(comm))
        step(model, optimizer)
        if comm.rank == 0:
            with torch.no_grad():
                model.weight.add_(1.0)
            optimizer.reload_model_params()
        seen = []
        for number in range(3):
            model.weight.grad = torch.ones(16, 16)
            model.bias.grad = torch.ones(16)
            if number == 0 and comm.rank == 1:
                model.weight.grad = model.weight.grad.to_sparse()
            try:
                result = optimizer.step()
                seen.append(str(result.success) if reads else "unread")
            except Exception as error:
                seen.append(type(error).__name__)
        return seen

    for seen in run_threads(2, rank_main):
        assert seen[1:] == ["ReplicaError", "ReplicaError"], seen


class _Unreadable(torch.Tensor):
    """A gradient that no operation accepts."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., object], *arguments: object) -> object:
        if "__get__" in str(func):
            return super().__torch_function__(func, *arguments)
        raise NotImplementedError(f"{func} of this gradient")


def unreadable(model: nn.Module) -> None:
    model.weight.grad = model.weight.grad.as_subclass(_Unreadable)


def unswept(model: nn.Module) -> None:
    """As with a dtype that kernels of statistics lack."""
    model.weight.grad.fill_(13.0)


def stats_without_13(grads: Sequence[torch.Tensor], **options: Any) -> Any:
    if any(bool((grad == 13.0).any()) for grad in grads):
        raise NotImplementedError("a sum of squares of this gradient")
    return grad_stats(grads, **options)


@pytest.mark.parametrize(("spoil", "error"), [(unreadable, UnusableGradientError), (unswept, NotImplementedError)])
def test_a_gradient_that_one_rank_cannot_use_is_refused_on_all(
    spoil: Callable[[nn.Module], None], error: type[Exception]
) -> None:
    """It raised on this rank, before the step's all-reduce, in which the others waited."""

    def rank_main(comm: Comm) -> None:
        axes = Axes(dp=comm, tp=Alone()) if spoil is unreadable else Axes(dp=Alone(), tp=comm)
        model, optimizer = made(Roles(dense=axes, expert=axes, everyone=comm))
        step(model, optimizer)
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones(16, 16)
        model.bias.grad = torch.ones(16)
        if comm.rank == 1:
            spoil(model)
        with pytest.raises(error if comm.rank == 1 else UnusableGradientError, match=r"of this gradient|1 other rank"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        assert step(model, optimizer)

    with patch("opt_distributed.step.verdict.grad_stats", stats_without_13):
        run_threads(2, rank_main)


@pytest.mark.usefixtures("accelerator")
def test_a_result_that_nobody_reads_keeps_no_parameter_alive() -> None:
    def rank_main(comm: Comm) -> weakref.ref[torch.Tensor]:
        model, optimizer = made(over(comm))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        return weakref.ref(model.weight)

    found = run_threads(2, rank_main)
    gc.collect()
    assert [param() for param in found] == [None, None]
