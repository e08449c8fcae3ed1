"""Faults: what goes wrong in a wrapped model is an error with a remedy, on every rank that would go on."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from data_parallel_net import Unfinished, over
from processes import world_of_one
from recording_comm import RecordingComm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from opt_config import DistributedDataParallelConfig
from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, StorageError
from opt_distributed.comm import Alone
from opt_distributed.comm.threads import ThreadComm

Config = DistributedDataParallelConfig
SHARDED = Config(use_distributed_optimizer=True)
OVERLAP = Config(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=20)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def errors_of(size: int, rank_main: Callable[[ThreadComm], object]) -> list[str]:
    """What every rank raised."""

    def caught(comm: ThreadComm) -> str:
        try:
            rank_main(comm)
        except (ValueError, GradientError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found: list[str] = run_threads(size, caught)
    return found


# --- ranks that do not fit together ------------------------------------------------------------------------


def another_model(rank: int) -> tuple[Config, nn.Module]:
    return SHARDED, nn.Linear(4, 5 if rank == 1 else 4)


def other_experts(rank: int) -> tuple[Config, nn.Module]:
    model = nn.Linear(4, 4 + rank % 2, bias=False)
    model.weight.allreduce = False  # type: ignore[attr-defined]
    return SHARDED, model


def another_configuration(rank: int) -> tuple[Config, nn.Module]:
    return replace(SHARDED, average_in_collective=rank == 1), nn.Linear(4, 4)


def dtypes_in_another_order(rank: int) -> tuple[Config, nn.Module]:
    """Each buffer is the same on all ranks, but not the order in which they travel."""
    children = {"wide": nn.Linear(4, 4), "narrow": nn.Linear(4, 4, dtype=torch.bfloat16)}
    return SHARDED, nn.ModuleDict({name: children[name] for name in sorted(children, reverse=rank != 1)})


DIFFERENT = {
    another_model: "layout of chunk 0, fp32 dense",
    other_experts: "layout of chunk 0, fp32 experts",
    another_configuration: "average_in_collective is False on rank 0 and True on rank 1",
    dtypes_in_another_order: "order of buffers is chunk 0, fp32 dense, flat shards, fp32 gradients, chunk 0, bf16",
}


@pytest.mark.parametrize(("make", "message"), DIFFERENT.items())
def test_ranks_with_different_models_are_refused_on_every_rank(
    make: Callable[[int], tuple[Config, nn.Module]], message: str
) -> None:
    def rank_main(comm: ThreadComm) -> None:
        config, model = make(comm.rank)
        DistributedDataParallel(config, model, groups=over(comm))

    for error in errors_of(3, rank_main):
        assert error.startswith("LayoutError: data-parallel ranks [1] laid their buffers out differently from rank 0")
        assert f"; {message}" in error


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one rank, which suffices for placements."""
    with world_of_one():
        yield init_device_mesh("cpu", (1,))


def test_a_parameter_that_is_laid_out_already_is_refused_on_every_rank(mesh: DeviceMesh) -> None:
    def rank_main(comm: ThreadComm) -> None:
        model = nn.Linear(4, 4)
        if comm.rank == 1:
            model.weight = nn.Parameter(laid_out)
        DistributedDataParallel(SHARDED, model, groups=over(comm))

    laid_out = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
    refused = "is a DTensor, laid out already; leave the model unwrapped, the step takes it as is"
    other, own = errors_of(2, rank_main)
    assert own == f"LayoutError: weight {refused}"
    assert other == f"LayoutError: rank 1 refused: LayoutError: weight {refused}"


def with_shared_memory(model: nn.Linear) -> nn.Module:
    model.bias = nn.Parameter(model.weight.data[0])
    return model


def with_rows_that_do_not_fit(model: nn.Linear) -> nn.Module:
    model.weight.head_rows = 3  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("change", "wraps", "refused"),
    [
        (with_shared_memory, "LayoutError", "StorageError: bias and weight share memory"),
        (with_rows_that_do_not_fit, "ValueError", "ConfigError: weight: head_rows=3 of shape (4, 4)"),
        (lambda model: nn.LazyLinear(4), "ValueError", "ConfigError: parameter 'weight' is uninitialized"),
    ],
)
def test_a_model_that_one_rank_cannot_lay_out_is_refused_on_every_rank(
    change: Callable[[nn.Linear], nn.Module], wraps: str, refused: str
) -> None:
    def rank_main(comm: ThreadComm) -> None:
        model = nn.Linear(4, 4)
        DistributedDataParallel(SHARDED, change(model) if comm.rank == 1 else model, groups=over(comm))

    first, second = errors_of(2, rank_main)
    assert first.startswith(f"{wraps}: rank 1 refused: {refused}")
    assert second.startswith(refused)


def test_a_broadcast_that_only_some_ranks_ask_for_is_refused_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> None:
        DistributedDataParallel(SHARDED, nn.Linear(4, 4), groups=over(comm), broadcast_params=comm.rank == 0)

    refused = "ValueError: broadcast_params is [True, False], by rank; pass the same on all ranks"
    assert errors_of(2, rank_main) == [refused] * 2


# --- configurations that the groups or the loss contradict ---------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "instances without groups": (
        lambda: wrap(replace(SHARDED, num_distributed_optimizer_instances=2)),
        "num_distributed_optimizer_instances=2, but the groups make up 1; pass an inter_dist_opt group",
    ),
    "means of sums": (
        lambda: wrap(Config(average_in_collective=True), per_token=True),
        "average_in_collective=True averages, calculate_per_token_loss=True sums; set one of them to False",
    ),
    "hooks without overlap": (
        lambda: wrap(SHARDED).enable_forward_pre_hook(),
        "overlap_param_gather=False: parameters",
    ),
}


def wrap(config: Config, *, per_token: bool = False) -> DistributedDataParallel:
    return DistributedDataParallel(config, nn.Linear(4, 4), groups=over(Alone()), calculate_per_token_loss=per_token)


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_meant_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# --- gradients out of turn ---------------------------------------------------------------------------------------


def test_a_backward_after_the_bucket_has_left_is_an_error_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(OVERLAP, nn.Linear(4, 4), groups=over(comm))
        backward(ddp(torch.ones(1, 4)).sum())
        ddp.finish_grad_sync()
        ddp.zero_grad_buffer()
        backward(ddp(torch.ones(1, 4)).sum())
        backward(ddp(torch.ones(1, 4)).sum())

    for error in errors_of(2, rank_main):
        assert error.startswith("GradientError: gradient 2 of ")
        assert error.endswith("the first iteration had 1; run all but the last backward pass inside no_sync()")


@pytest.mark.parametrize("config", [SHARDED, OVERLAP, Config()], ids=["flat", "flat, overlap", "replicated"])
def test_a_backward_onto_reduced_gradients_is_an_error(config: Config) -> None:
    ddp = wrap(config)
    backward(ddp(torch.ones(1, 4)).sum())
    ddp.finish_grad_sync()
    ddp.finish_grad_sync()
    with pytest.raises(GradientError, match="arrived after the reduction; call zero_grad_buffer"):
        backward(ddp(torch.ones(1, 4)).sum())


def test_a_backward_that_raised_leaves_no_trace_after_zero_grad_buffer() -> None:
    def rank_main(comm: ThreadComm) -> list[Tensor]:
        first = nn.Linear(4, 4)
        ddp = DistributedDataParallel(OVERLAP, nn.Sequential(first, nn.Linear(4, 4)), groups=over(comm))
        for param in ddp.parameters():
            param.data.fill_(0.5)

        def step() -> list[Tensor]:
            ddp.zero_grad_buffer()
            backward(ddp(torch.ones(1, 4)).sum())
            ddp.finish_grad_sync()
            return [bucket.result.clone() for bucket in ddp.grad_sync.buckets]

        before = step()
        ddp.zero_grad_buffer()
        x = torch.ones(1, 4, requires_grad=True)
        hook = first.register_full_backward_hook(_raise)
        with pytest.raises(ArithmeticError):
            backward(ddp(x).sum())
        hook.remove()
        after = step()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return after

    run_threads(2, rank_main)


def _raise(*_: object) -> None:
    raise ArithmeticError("in backward")


def test_gradients_on_the_wire_cannot_be_scaled() -> None:
    ddp = DistributedDataParallel(
        replace(SHARDED, reduce_scatter_with_fp32_accumulation=True), nn.Linear(4, 4), groups=over(Unfinished())
    )
    ddp.start_grad_sync()
    with pytest.raises(
        GradientError, match=r"cannot be scaled while they are being reduced; call finish_grad_sync\(\)"
    ):
        ddp.scale_gradients(0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_check_for_nan_names_the_parameter_and_stops_every_rank(value: float) -> None:
    def rank_main(comm: ThreadComm) -> None:
        config = Config(use_distributed_optimizer=True)
        config.check_for_nan_in_grad = True
        model = nn.Linear(4, 4)
        ddp = DistributedDataParallel(config, model, groups=over(comm))
        loss = ddp(torch.ones(1, 4)).sum()
        backward(loss * value if comm.rank == 1 else loss)
        ddp.finish_grad_sync()

    first, second = errors_of(2, rank_main)
    where = "bucket 0 of chunk 0, fp32 dense, flat shards, fp32 gradients"
    assert first == f"UnusableGradientError: gradients in {where} are not finite on another rank"
    assert second == "UnusableGradientError: gradients of bias, weight are not finite on this rank"


# --- models that change after they were wrapped --------------------------------------------------------------------


@pytest.mark.parametrize("config", [SHARDED, Config()], ids=["flat", "replicated"])
def test_a_model_that_is_converted_after_wrapping_is_refused(config: Config) -> None:
    ddp = wrap(config)
    with pytest.raises(
        StorageError, match=r"left its buffer \(torch.float32 on cpu\) and is now torch.bfloat16 on cpu"
    ):
        ddp.to(torch.bfloat16)


def test_a_conversion_that_changes_nothing_is_none() -> None:
    ddp = wrap(SHARDED)
    assert ddp.to("cpu").float() is ddp


# --- what Megatron-Core gets wrong here ------------------------------------------------------------------------------


def test_ranks_without_a_parameter_in_a_bucket_take_part_in_it() -> None:
    """Megatron-Core stops with "empty bucket encountered" where padding is all that a rank holds of a bucket."""

    def rank_main(comm: ThreadComm) -> list[int]:
        ddp = DistributedDataParallel(OVERLAP, nn.Linear(8, 5, bias=False), groups=over(comm))
        for _ in range(2):
            ddp.zero_grad_buffer()
            backward(ddp(torch.ones(1, 8)).sum())
            ddp.finish_grad_sync()
            ddp.synced_buffers[0].publish_()
        return [piece.numel for piece in ddp.synced_buffers[0].owned()]

    assert run_threads(3, rank_main) == [[40], [], []]


def test_a_group_of_mixed_dtypes_keeps_each_gradient_with_its_parameter() -> None:
    """Megatron-Core pairs states with parameters by position, and swaps those of a 16-bit and an fp32 parameter."""
    model = nn.Module()
    model.narrow = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    model.wide = nn.Parameter(torch.ones(8, 8))
    ddp = DistributedDataParallel(SHARDED, model, groups=over(Alone()))
    backward(2 * model.narrow.sum() + 3 * model.wide.sum())
    ddp.finish_grad_sync()
    found = {
        piece.id.name: buffer.memory.grad_piece(piece.id, piece.of_param)
        for buffer in ddp.synced_buffers
        for piece in buffer.owned()
    }
    assert torch.equal(found["narrow"], torch.full((4, 4), 2.0, dtype=torch.bfloat16))
    assert torch.equal(found["wide"], torch.full((8, 8), 3.0))


def test_two_wrappers_with_different_configurations_work_side_by_side() -> None:
    """Megatron-Core's reduction is a module's global: the last wrapper's choice becomes everybody's."""
    recorded = [RecordingComm(Alone()), RecordingComm(Alone())]
    configs = [replace(SHARDED, reduce_scatter_with_fp32_accumulation=True), SHARDED]
    wrapped = [
        DistributedDataParallel(config, nn.Linear(4, 4), groups=over(comm))
        for config, comm in zip(configs, recorded, strict=True)
    ]
    for ddp in wrapped:
        ddp.finish_grad_sync()
    assert [[call.kind for call in comm.calls if call.numel] for comm in recorded] == [["all_to_all"], ["all_reduce"]]


def test_gradients_without_memory_are_refused_until_it_is_back() -> None:
    ddp = wrap(SHARDED)
    ddp.offload_grad_buffers()
    assert all(buffer.memory.grad_data.untyped_storage().nbytes() == 0 for buffer in ddp.synced_buffers)
    with pytest.raises(
        GradientError, match=r"was freed by offload_grad_buffers\(\); call restore_grad_buffers\(\) first"
    ):
        backward(ddp(torch.ones(1, 4)).sum())
    with pytest.raises(GradientError, match="was freed"):
        ddp.finish_grad_sync()
    ddp.restore_grad_buffers()
    backward(ddp(torch.ones(1, 4)).sum())
    ddp.finish_grad_sync()
    result = ddp.grad_sync.buckets[0].result
    assert set(result.tolist()) == {0.0, 1.0}
