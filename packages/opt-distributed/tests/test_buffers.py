"""Buffers: one memory and its views, how a bucket is summed, the ring of scratch buckets, what hangs on a parameter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from data_parallel_net import bucket_of, shard_of
from torch import Tensor, nn

from opt_distributed import CollectiveError, run_threads
from opt_distributed.buffers import ParamAndGradBuffer, ReducedGrads, StorageError
from opt_distributed.buffers.bucket import GradBucket, Reduction
from opt_distributed.buffers.main_grad import bind_main_grad, main_grad, take_grad_
from opt_distributed.buffers.wires import InFlight, SumEverywhere, SumInFp32, SumToShards, Wire
from opt_distributed.comm import Alone, Axes, Comm
from opt_distributed.comm.collectives import Pending, Sizes
from opt_distributed.comm.threads import ThreadComm, World
from opt_distributed.layout import Layout, LayoutError, ParamShape, flat_layout, replicated_layout, whole_layout
from opt_paramgroups import ParamId

SHAPES = ((7, 9), (1,), (), (0, 3), (65, 2), (128,))
CPU = torch.device("cpu")


def make_params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[ParamId, nn.Parameter]:
    numbers = torch.Generator().manual_seed(7)
    values = (torch.randn(shape, generator=numbers).to(dtype) for shape in shapes)
    return {ParamId(0, f"p{index}"): nn.Parameter(value) for index, value in enumerate(values)}


def make_buffer(
    params: Mapping[ParamId, nn.Parameter],
    *,
    num_shards: int = 2,
    sharded: bool = True,
    planner: Callable[..., Layout] = flat_layout,
    param_dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> ParamAndGradBuffer:
    shapes = [ParamShape(id=id, shape=tuple(param.shape)) for id, param in params.items()]
    layout = planner(shapes, num_shards=num_shards, bucket_size=100) if sharded else replicated_layout(shapes)
    return ParamAndGradBuffer(
        layout, params, param_dtype=param_dtype, grad_dtype=torch.float32, device=device, sharded=sharded
    )


# --- storage --------------------------------------------------------------------------------------


def test_parameters_keep_their_values_and_become_views_of_one_tensor() -> None:
    params = make_params(*SHAPES)
    before = {id: param.detach().clone() for id, param in params.items()}
    buffer = make_buffer(params)
    assert buffer.param_data is not None
    for id, param in params.items():
        assert torch.equal(param, before[id])
        assert param.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
    buffer.param_data.fill_(3.0)
    assert all(bool((param == 3.0).all()) for param in params.values())


def test_a_transposed_parameter_keeps_its_values_in_the_buffer() -> None:
    value = torch.arange(6.0).view(2, 3).t()
    params = {ParamId(0, "w"): nn.Parameter(value)}
    make_buffer(params)
    assert torch.equal(params[ParamId(0, "w")], torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_replicated_parameters_stay_where_they_are() -> None:
    params = make_params((3, 3))
    before = params[ParamId(0, "p0")].data_ptr()
    buffer = make_buffer(params, sharded=False)
    assert params[ParamId(0, "p0")].data_ptr() == before
    assert buffer.param_data is None


def test_gradient_views_cover_the_buffer_without_touching_padding() -> None:
    buffer = make_buffer(make_params(*SHAPES))
    for id in buffer.params:
        buffer.grad_view(id).fill_(1.0)
    assert buffer.grad_data.sum() == buffer.layout.params_numel
    assert [buffer.grad_view(id).shape for id in buffer.params] == [torch.Size(shape) for shape in SHAPES]


def test_shards_of_a_bucket_are_the_bucket() -> None:
    buffer = make_buffer(make_params(*SHAPES), num_shards=4)
    buffer.grad_data.copy_(torch.arange(buffer.layout.numel))
    for index in range(len(buffer.layout.buckets)):
        shards = [buffer.result(index, rank) for rank in range(4)]
        assert torch.equal(torch.cat(shards), buffer.grad_bucket(index))


def test_a_piece_is_flat_unless_it_is_the_whole_parameter() -> None:
    buffer = make_buffer(make_params((7, 9)))
    assert buffer.grad_piece(ParamId(0, "p0"), slice(0, 63)).shape == (7, 9)
    assert buffer.grad_piece(ParamId(0, "p0"), slice(3, 63)).shape == (60,)


REFUSALS: dict[str, tuple[Callable[[], object], type[ValueError], str]] = {
    "another dtype": (
        lambda: make_buffer(make_params((2, 2)), param_dtype=torch.bfloat16),
        StorageError,
        "p0 is torch.float32 in a buffer of torch.bfloat16; parameters of one dtype share a buffer",
    ),
    "another device": (
        lambda: make_buffer(make_params((2, 2)), device=torch.device("meta")),
        StorageError,
        "p0 is on cpu, the buffer on meta",
    ),
    "frozen": (
        lambda: make_buffer({ParamId(0, "p"): nn.Parameter(torch.ones(2), requires_grad=False)}),
        StorageError,
        "p does not require a gradient",
    ),
    "shared memory": (lambda: make_buffer(_overlapping()), StorageError, "whole and part share memory; tie parameters"),
    "unplanned": (lambda: _with_layout_of((2, 2), (3,)), LayoutError, "layout and parameters differ in: p1"),
    "another size": (lambda: _with_layout_of((2, 3)), LayoutError, "layout and parameters differ in: p0;"),
}


def _overlapping() -> dict[ParamId, nn.Parameter]:
    memory = torch.ones(10)
    return {ParamId(0, "whole"): nn.Parameter(memory), ParamId(0, "part"): nn.Parameter(memory[4:6])}


def _with_layout_of(*shapes: tuple[int, ...]) -> ParamAndGradBuffer:
    layout = whole_layout(
        [ParamShape(id=ParamId(0, f"p{index}"), shape=shape) for index, shape in enumerate(shapes)], num_shards=1
    )
    dtype = torch.float32
    return ParamAndGradBuffer(
        layout, make_params((2, 2)), param_dtype=dtype, grad_dtype=dtype, device=CPU, sharded=True
    )


@pytest.mark.parametrize(("build", "kind", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_parameters_that_cannot_share_a_buffer_are_refused(
    build: Callable[[], object], kind: type[ValueError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        build()


# --- sums over ranks --------------------------------------------------------------------------------


def grid(comm: ThreadComm, rows: list[World], columns: list[World]) -> Axes:
    """Rank r of 4 as shard r % 2 of instance r // 2."""
    instance, shard = divmod(comm.rank, 2)
    return Axes(dp=ThreadComm(rows[instance], shard), tp=Alone(), inter=ThreadComm(columns[shard], instance))


@pytest.mark.parametrize("sharded", [True, False], ids=["shards", "everywhere"])
@pytest.mark.parametrize("instances", [1, 2])
def test_a_reduction_sums_over_all_replicas_and_a_gather_shows_every_shard(sharded: bool, instances: int) -> None:
    world_size = 2 * instances
    rows, columns = [World(2) for _ in range(2)], [World(2) for _ in range(2)]

    def rank_main(comm: ThreadComm) -> None:
        axes = grid(comm, rows, columns) if instances == 2 else Axes(dp=comm, tp=Alone())
        buffer = make_buffer(make_params(*SHAPES), sharded=sharded)
        reduced = ReducedGrads(buffer.layout, buffer.params, axes, dtype=torch.float32, device=CPU)
        reduced.reduce_({id: torch.full_like(param, comm.rank + 1.0) for id, param in buffer.params.items()})
        total = world_size * (world_size + 1) / 2
        for _, piece in buffer.layout.owned(axes.dp.rank if sharded else 0):
            assert bool((reduced.piece(piece.id, piece.of_param) == total).all())
        if sharded:
            assert buffer.param_data is not None
            expected = buffer.param_data.clone()
            for index in range(len(buffer.layout.buckets)):
                mine = shard_of(buffer, index, axes.dp.rank).clone()
                bucket_of(buffer, index).fill_(float("nan"))
                shard_of(buffer, index, axes.dp.rank).copy_(mine)
            buffer.gather_(axes.dp)
            assert torch.equal(buffer.param_data, expected)

    run_threads(world_size, rank_main)


WHOLE = [(24, 40), (3,), (10, 7), (200,), (30, 30), (1,), (0, 4), (16, 16), (90,), (7, 20), (70, 2), (9, 9), (50,)]


@pytest.mark.parametrize(
    ("size", "instances", "in_fp32"), [*((n, 1, fp32) for n in (2, 3, 4, 6) for fp32 in (False, True)), (2, 2, False)]
)
def test_owners_of_whole_parameters_exchange_one_chunk_more_than_owners_of_equal_shards(
    size: int, instances: int, in_fp32: bool
) -> None:
    """The bytes of a reduce-scatter and of an all-gather, and what each rank sends of its chunk or shard."""
    rows, columns = [World(2) for _ in range(2)], [World(2) for _ in range(2)]
    numbers = torch.Generator().manual_seed(7)
    grads = {  # integers: sums are exact
        id: torch.randint(-999, 999, (size * instances, *param.shape), generator=numbers).float()
        for id, param in make_params(*WHOLE).items()
    }

    def rank_main(comm: ThreadComm) -> None:
        axes = grid(comm, rows, columns) if instances == 2 else Axes(dp=comm, tp=Alone())
        recorded = RecordedBytes(axes.dp)
        axes = replace(axes, dp=recorded)
        buffer = make_buffer(make_params(*WHOLE), num_shards=size, planner=whole_layout)
        buckets = buffer.layout.buckets
        assert sum(bool(bucket.cuts) for bucket in buckets) >= 2
        for id, parts in grads.items():
            buffer.grad_view(id).copy_(parts[comm.rank])
        reduction = Reduction(
            name="whole", wire=SumInFp32(axes.dp) if in_fp32 else SumToShards(axes.dp, axes.inter), axes=axes
        )
        for index in range(len(buckets)):
            bucket = GradBucket(buffer, index, reduction)
            bucket.launch(1)
            bucket.advance()
            bucket.finish()
        for _, piece in buffer.layout.owned(axes.dp.rank):
            assert torch.equal(buffer.grad_view(piece.id), grads[piece.id].sum(0))
        assert recorded.sent <= 4 * sum(bucket.numel for bucket in buckets)  # (size - 1) chunks, and one
        assert buffer.param_data is not None
        values, recorded.sent = buffer.param_data.clone(), 0
        for index in range(len(buckets)):
            mine = shard_of(buffer, index, axes.dp.rank).clone()
            bucket_of(buffer, index).fill_(float("nan"))
            shard_of(buffer, index, axes.dp.rank).copy_(mine)
        buffer.gather_(axes.dp)
        assert torch.equal(buffer.param_data, values)  # padding is zero again
        shards = [shard_of(buffer, index, axes.dp.rank).numel() for index in range(len(buckets))]
        chunks = sum(bucket.numel for bucket in buckets) // size
        assert recorded.sent <= 4 * ((size - 1) * chunks + sum(shards))

    run_threads(size * instances, rank_main)


class RecordedBytes:
    """Counts the bytes that this rank sends to others, as a ring does."""

    def __init__(self, comm: Comm):
        self.comm, self.rank, self.size, self.sent = comm, comm.rank, comm.size, 0

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        self.sent += shard.nbytes * (self.size - 1)
        return self.comm.reduce_scatter_(shard, full, async_op=async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        self.sent += shard.nbytes * (self.size - 1)
        return self.comm.all_gather_(full, shard, async_op=async_op)

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        own = x.numel() // self.size if sizes is None else sizes.sent[self.rank]
        self.sent += (x.numel() - own) * x.element_size()
        return self.comm.all_to_all_(out, x, sizes=sizes, async_op=async_op)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)


def test_a_layout_for_another_number_of_ranks_is_refused() -> None:
    buffer = make_buffer(make_params((8, 8)), num_shards=2)
    with pytest.raises(LayoutError, match="planned for 2 shards, but the group has 1 ranks"):
        buffer.gather_(Alone())


def wire_result(wire_of: Callable[[Comm], Wire], parts: Tensor) -> Tensor:
    """(size, n) gradients of each rank -> (n,) what the ranks' shards hold, joined."""

    def rank_main(comm: ThreadComm) -> Tensor:
        full = parts[comm.rank].clone()
        shard = full.view(comm.size, -1)[comm.rank]
        InFlight(wire_of(comm).stages(full, shard), "test").finish()
        return shard

    return torch.cat(run_threads(len(parts), rank_main))


def test_sums_in_fp32_lose_nothing_that_bf16_sums_lose() -> None:
    # 256 + 1 is 256 in bf16, which has 8 bits: a bf16 running sum stays there, an fp32 one is 259, then 260.
    parts = torch.tensor([[256.0, 256.0, 256.0, 256.0], *[[1.0, 1.0, 1.0, 1.0]] * 3]).to(torch.bfloat16)
    running = parts[0] + parts[1] + parts[2] + parts[3]
    assert running.tolist() == [256.0] * 4
    assert wire_result(SumInFp32, parts).tolist() == [260.0] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fp32_sums_are_the_float64_sums_rounded_to_bf16(size: int) -> None:
    numbers = torch.Generator().manual_seed(size)
    parts = torch.randn(size, 12 * 64, generator=numbers).to(torch.bfloat16)
    exact = parts.to(torch.float64).sum(0)
    found = wire_result(SumInFp32, parts).to(torch.float64)
    # One rounding to bf16 (half a unit in the last of 8 bits), and fp32 additions, which are nothing beside it.
    assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_wires_leave_the_same_sum(size: int) -> None:
    parts = torch.arange(float(size * 12)).view(size, 12)  # small integers: every order of adding is exact
    wires: list[Callable[[Comm], Wire]] = [SumInFp32, lambda comm: SumToShards(comm, Alone())]
    wires.append(lambda comm: SumEverywhere(comm, Alone()))
    for wire_of in wires:
        assert (
            wire_result(wire_of, parts[:, : 24 // size * size]).tolist() == parts.sum(0)[: 24 // size * size].tolist()
        )


def test_a_failed_collective_says_which_it_was() -> None:
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    with pytest.raises(CollectiveError, match="bucket 3 of dense: connection closed by peer"):
        InFlight(iter([Lost()]), "bucket 3 of dense").finish()


def test_threads_raise_the_error_that_stopped_the_others() -> None:
    """What another rank made of the broken barrier was raised in its place, if that rank came first."""

    def rank_main(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise KeyError("the cause")
        try:
            comm.gather_objects(0)
        except Exception as error:
            raise CollectiveError("sum of the statistics") from error

    with pytest.raises(KeyError, match="the cause"):
        run_threads(2, rank_main)


# --- what hangs on a parameter -----------------------------------------------------------------------


def test_gradients_are_taken_into_main_grad_in_its_own_dtype() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    bind_main_grad(param, torch.zeros(3))
    for _ in range(2):
        param.grad = torch.full((3,), 0.5, dtype=torch.bfloat16)
        take_grad_(param, "param")
    assert main_grad(param).tolist() == [1.0, 1.0, 1.0]
    assert param.grad is None


FUSED = {
    "not fused": (False, False, 1.0),
    "fused, returns garbage": (True, False, 0.0),
    "fused, returns zeros to be added": (True, True, 1.0),
}


@pytest.mark.parametrize(("added", "zero_out", "expected"), FUSED.values(), ids=FUSED.keys())
def test_what_a_fused_kernel_has_added_is_not_added_twice(added: bool, zero_out: bool, expected: float) -> None:
    param: Any = nn.Parameter(torch.ones(1))
    bind_main_grad(param, torch.zeros(1))
    param.grad_added_to_main_grad, param.zero_out_wgrad = added, zero_out
    param.grad = torch.ones(1)
    take_grad_(param, "param")
    assert main_grad(param).item() == expected


NUM_BUCKETS = 4


@dataclass
class Travelling:
    """A reduction that writes its result when it is awaited, whatever the bucket holds by then."""

    comm: "TravellingComm"
    number: int
    shard: Tensor
    full: Tensor

    def wait(self) -> None:
        self.comm.log.append(f"wait {self.number}")
        if self.number in self.comm.failing:
            raise RuntimeError("a peer is gone")
        assert self.full.untyped_storage().nbytes(), "its memory was given back while it travelled"
        self.shard.copy_(self.full[: self.shard.numel()])


@dataclass
class TravellingComm(Alone):
    """The first of two ranks; the other one's gradients are zeros."""

    log: list[str] = field(default_factory=list)
    failing: tuple[int, ...] = ()
    size = 2

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        number = sum(entry.startswith("start") for entry in self.log) % NUM_BUCKETS
        self.log.append(f"start {number}")
        return Travelling(self, number, shard, full)


def make(comm: TravellingComm) -> tuple[ReducedGrads, dict[ParamId, Tensor | None]]:
    params = {ParamId(0, f"p{index}"): nn.Parameter(torch.zeros(64)) for index in range(NUM_BUCKETS)}
    shapes = [ParamShape(id=id, shape=(64,)) for id in params]
    layout = flat_layout(shapes, num_shards=2, bucket_size=64)
    assert len(layout.buckets) == NUM_BUCKETS
    axes = Axes(dp=comm, tp=Alone())
    shards = ReducedGrads(layout, params, axes, dtype=torch.float32, device=torch.device("cpu"))
    return shards, {id: torch.full((64,), 1.0 + index) for index, id in enumerate(params)}


def test_a_bucket_is_filled_while_the_one_before_it_travels() -> None:
    comm = TravellingComm()
    shards, grads = make(comm)
    for _ in range(2):
        comm.log.clear()
        shards.reduce_(grads)
        assert comm.log == [
            "start 0", "start 1", "wait 0", "start 2", "wait 1", "start 3", "wait 2", "wait 3",
        ]  # fmt: skip
        owned = {piece.id: shards.piece(piece.id, piece.of_param) for _, piece in shards.layout.owned(0)}
        assert owned.keys() == grads.keys()
        for id, grad in grads.items():
            assert grad is not None
            assert owned[id].unique().tolist() == grad.unique().tolist()


@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (1, 2)], ids=str)
def test_where_a_reduction_fails_memory_is_given_back_after_the_others(failing: tuple[int, ...]) -> None:
    comm = TravellingComm(failing=failing)
    shards, grads = make(comm)
    with pytest.raises(CollectiveError, match=f"gradient bucket {failing[0]}: a peer is gone"):
        shards.reduce_(grads)
    started = [entry.split()[1] for entry in comm.log if entry.startswith("start")]
    waited = [entry.split()[1] for entry in comm.log if entry.startswith("wait")]
    assert sorted(waited) == sorted(started)
    assert all(scratch.untyped_storage().nbytes() == 0 for scratch in shards._scratch)
