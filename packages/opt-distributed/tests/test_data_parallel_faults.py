"""Faults: what goes wrong in a wrapped model is an error with a remedy, on every rank that would go on."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from data_parallel_net import SHARDED, Config, backward, over
from processes import world_of_one
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, StorageError
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.pieces import check_marks
from opt_paramgroups import describe

OVERLAP = replace(SHARDED, overlap_grad_reduce=True, bucket_size=20)
ONES = torch.ones(1, 4)


def errors_of(size: int, rank_main: Callable[[ThreadComm], object]) -> list[str]:
    """What every rank raised."""

    def caught(comm: ThreadComm) -> str:
        try:
            rank_main(comm)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found: list[str] = run_threads(size, caught)
    return found


def wrap(config: Config = SHARDED, *, per_token: bool = False) -> DistributedDataParallel:
    return DistributedDataParallel(config, nn.Linear(4, 4), groups=over(Alone()), calculate_per_token_loss=per_token)


def other_experts(rank: int) -> nn.Module:
    model = nn.Linear(4, 4 + rank % 2, bias=False)
    model.weight.allreduce = False  # type: ignore[attr-defined]
    return model


def dtypes_in_another_order(rank: int) -> nn.Module:
    """Each buffer is the same on all ranks, but not the order in which they travel."""
    children = {"wide": nn.Linear(4, 4), "narrow": nn.Linear(4, 4, dtype=torch.bfloat16)}
    return nn.ModuleDict({name: children[name] for name in sorted(children, reverse=rank != 1)})


def averaged_on_one(rank: int) -> Config:
    return replace(SHARDED, average_in_collective=rank == 1)


DIFFERENT: dict[str, Callable[[int], tuple[Config, nn.Module]]] = {
    "layout of chunk 0, fp32 dense": lambda rank: (SHARDED, nn.Linear(4, 5 if rank == 1 else 4)),
    "layout of chunk 0, fp32 experts": lambda rank: (SHARDED, other_experts(rank)),
    "average_in_collective is False on rank 0 and True on": lambda rank: (averaged_on_one(rank), nn.Linear(4, 4)),
    "order of buffers is chunk 0, fp32 dense, flat sh": lambda rank: (SHARDED, dtypes_in_another_order(rank)),
}


@pytest.mark.parametrize("message", DIFFERENT)
def test_ranks_with_different_models_are_refused_on_every_rank(message: str) -> None:
    def rank_main(comm: ThreadComm) -> None:
        config, model = DIFFERENT[message](comm.rank)
        DistributedDataParallel(config, model, groups=over(comm))

    for error in errors_of(3, rank_main):
        assert error.startswith("LayoutError: data-parallel ranks [1] laid their buffers out differently from rank 0")
        assert f"; {message}" in error


def with_shared_memory(model: nn.Linear) -> nn.Module:
    model.bias = nn.Parameter(model.weight.data[0])
    return model


def with_rows_that_do_not_fit(model: nn.Linear) -> nn.Module:
    model.weight.head_rows = 3  # type: ignore[assignment]
    return model


def laid_out(model: nn.Linear) -> nn.Linear:
    with world_of_one():
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
    return model


def test_a_marked_dtensor_outside_of_its_peers_is_refused() -> None:
    """Its gradient would stay that of one rank."""

    def rank_main(comm: ThreadComm) -> None:
        axes = Axes(dp=Alone(), tp=comm)
        check_marks(params, metas, Roles(dense=axes, expert=axes, everyone=comm), qk_layernorm=False)

    model = laid_out(nn.Linear(4, 4, bias=False))
    model.weight.sequence_parallel = True  # type: ignore[assignment]
    metas = describe([model])
    params = dict.fromkeys(metas, model.weight)
    for error in errors_of(2, rank_main):
        assert "'weight' is a DTensor marked sequence_parallel: its gradient would not be summed over the" in error


@pytest.mark.parametrize(
    ("change", "wraps", "refused"),
    [
        (with_shared_memory, "LayoutError", "StorageError: bias and weight share memory"),
        (with_rows_that_do_not_fit, "ValueError", "ConfigError: weight: head_rows=3 of shape (4, 4)"),
        (lambda model: nn.LazyLinear(4), "ValueError", "ConfigError: parameter 'weight' is uninitialized"),
        (laid_out, "LayoutError", "LayoutError: weight is a DTensor, laid out already; leave the model unwrapped"),
    ],
)
def test_a_model_one_rank_cannot_lay_out_is_refused_on_all(
    change: Callable[[nn.Linear], nn.Module], wraps: str, refused: str
) -> None:
    changed = change(nn.Linear(4, 4))

    def rank_main(comm: ThreadComm) -> None:
        DistributedDataParallel(SHARDED, changed if comm.rank == 1 else nn.Linear(4, 4), groups=over(comm))

    first, second = errors_of(2, rank_main)
    assert first.startswith(f"{wraps}: rank 1 refused: {refused}")
    assert second.startswith(refused)


def test_any_error_of_a_rank_while_building_reaches_every_rank() -> None:
    """The other ranks waited for it until the group's timeout."""

    def fail(numel: int, **how: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    def rank_main(comm: ThreadComm) -> None:
        if comm.rank == 1:
            comm.allocate = fail  # type: ignore[assignment, method-assign]
        DistributedDataParallel(SHARDED, nn.Linear(4, 4), groups=over(comm))

    failed = "OutOfMemoryError: no memory"
    assert errors_of(2, rank_main) == [f"LayoutError: rank 1 refused: {failed}", failed]


def test_a_broadcast_on_some_ranks_only_is_refused_on_all() -> None:
    def rank_main(comm: ThreadComm) -> None:
        DistributedDataParallel(SHARDED, nn.Linear(4, 4), groups=over(comm), broadcast_params=comm.rank == 0)

    refused = "ValueError: broadcast_params is [True, False], by rank; pass the same on all ranks"
    assert errors_of(2, rank_main) == [refused] * 2


INSTANCES = replace(SHARDED, num_distributed_optimizer_instances=2)
AVERAGED = Config(average_in_collective=True)
REFUSALS: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "instances=2, but the groups make up 1; pass an inter_dist_opt group": (ValueError, lambda: wrap(INSTANCES)),
    "average_in_collective=True averages, calc": (ValueError, lambda: wrap(AVERAGED, per_token=True)),
    "overlap_param_gather=False: parameters": (ValueError, lambda: wrap().enable_forward_pre_hook()),
    r"left its buffer \(torch.float32 on cpu\) and is": (StorageError, lambda: wrap().to(torch.bfloat16)),
    "is now torch.bfloat16 on cpu; convert": (StorageError, lambda: wrap(Config()).to(torch.bfloat16)),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_contradictions_of_groups_loss_or_buffers_are_refused(message: str) -> None:
    kind, call = REFUSALS[message]
    with pytest.raises(kind, match=message):
        call()


def test_a_backward_after_the_reduction_is_an_error_on_all_ranks() -> None:
    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(OVERLAP, nn.Linear(4, 4), groups=over(comm))
        backward(ddp(ONES).sum())
        ddp.finish_grad_sync()
        ddp.zero_grad_buffer()
        backward(ddp(ONES).sum())
        backward(ddp(ONES).sum())

    for error in errors_of(2, rank_main):
        assert error.startswith("GradientError: gradient 2 of ")
        assert error.endswith("the first iteration had 1; run all but the last backward pass inside no_sync()")


def test_two_gradients_of_one_parameter_do_not_complete_a_bucket() -> None:
    ddp = wrap(OVERLAP)
    for names in (["weight", "bias"], ["weight", "weight", "bias"]):
        ddp.zero_grad_buffer()
        for name in names:
            backward(getattr(ddp.module, name).sum())
        ddp.finish_grad_sync()
    assert (ddp.module.weight.main_grad == 2).all()
    assert (ddp.module.bias.main_grad == 1).all()


@pytest.mark.parametrize("config", [SHARDED, OVERLAP, Config()], ids=["flat", "flat, overlap", "replicated"])
def test_a_backward_onto_reduced_gradients_is_an_error(config: Config) -> None:
    ddp = wrap(config)
    backward(ddp(ONES).sum())
    ddp.finish_grad_sync()
    ddp.finish_grad_sync()
    with pytest.raises(GradientError, match="arrived after the reduction; call zero_grad_buffer"):
        backward(ddp(ONES).sum())
