"""Buffers: one memory and its views, how a bucket is summed, the ring of scratch buckets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from opt_distributed import CollectiveError, run_threads
from opt_distributed.buffers import ParamAndGradBuffer, ReducedGrads, StorageError
from opt_distributed.buffers.wires import InFlight, SumInFp32, Wire
from opt_distributed.comm import Alone, Axes, Comm, device
from opt_distributed.comm.collectives import Pending
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.layout import Layout, LayoutError, ParamShape, flat_layout, replicated_layout, whole_layout
from opt_paramgroups import ParamId

SHAPES = ((7, 9), (1,), (), (0, 3), (65, 2), (128,))
CPU = torch.device("cpu")


def make_params(*shapes: tuple[int, ...]) -> dict[ParamId, nn.Parameter]:
    numbers = torch.Generator().manual_seed(7)
    return {
        ParamId(0, f"p{index}"): nn.Parameter(torch.randn(shape, generator=numbers))
        for index, shape in enumerate(shapes)
    }


def make_buffer(
    params: Mapping[ParamId, nn.Parameter],
    *,
    num_shards: int = 2,
    sharded: bool = True,
    planner: Callable[..., Layout] = flat_layout,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    holds_grads: bool = True,
) -> ParamAndGradBuffer:
    shapes = [ParamShape(id=id, shape=tuple(param.shape)) for id, param in params.items()]
    layout = planner(shapes, num_shards=num_shards, bucket_size=100) if sharded else replicated_layout(shapes)
    options = {"device": device, "sharded": sharded, "holds_grads": holds_grads}
    return ParamAndGradBuffer(layout, params, param_dtype=dtype, grad_dtype=torch.float32, **options)


def test_params_keep_their_values_and_become_views_of_one_tensor() -> None:
    params = make_params(*SHAPES)
    params[ParamId(0, "transposed")] = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    for name, part in zip(("left", "right"), torch.arange(6.0).split(3)):  # neighbours, which share no memory
        params[ParamId(0, name)] = nn.Parameter(part)
    before = {id: param.detach().clone() for id, param in params.items()}
    buffer = make_buffer(params)
    assert buffer.param_data is not None
    assert all(torch.equal(param, before[id]) for id, param in params.items())
    buffer.param_data.fill_(3.0)
    assert all(bool((param == 3.0).all()) for param in params.values())


def test_params_that_return_to_freed_addresses_are_taken_in() -> None:
    """As if the device gave the memory of the buffer to them: they counted as parameters that had not left it."""
    params = make_params((2, 2), (3,))
    before = [param.detach().clone() for param in params.values()]
    buffer = make_buffer(params)
    for param in params.values():
        param.data = param.data.clone()
    assert not buffer.take_back_(frees=True)
    buffer._moved.before = [param.data_ptr() for param in params.values()]
    assert buffer.take_back_() == list(params)
    assert buffer.param_data is not None
    memory = buffer.param_data.untyped_storage().data_ptr()
    assert {param.untyped_storage().data_ptr() for param in params.values()} == {memory}
    assert all(map(torch.equal, params.values(), before))


def test_a_buffer_without_gradients_has_no_memory_for_them() -> None:
    assert make_buffer(make_params(*SHAPES), holds_grads=False).grad_data.numel() == 0


def test_gradient_views_cover_the_buffer_except_its_padding() -> None:
    """Shards of a bucket are the bucket. A piece is flat unless it is the whole parameter."""
    buffer = make_buffer(make_params(*SHAPES), num_shards=4)
    for id in buffer.params:
        buffer.grad_view(id).fill_(1.0)
    assert buffer.grad_data.sum() == buffer.layout.params_numel
    assert [buffer.grad_view(id).shape for id in buffer.params] == [torch.Size(shape) for shape in SHAPES]
    buffer.grad_data.copy_(torch.arange(buffer.layout.numel))
    for index in range(len(buffer.layout.buckets)):
        assert torch.equal(torch.cat([buffer.result(index, rank) for rank in range(4)]), buffer.grad_bucket(index))
    assert buffer.grad_piece(ParamId(0, "p0"), slice(0, 63)).shape == (7, 9)
    assert buffer.grad_piece(ParamId(0, "p0"), slice(3, 63)).shape == (60,)


SQUARE = make_params((2, 2))


def overlapping() -> dict[ParamId, nn.Parameter]:
    memory = torch.ones(10)
    return {ParamId(0, "whole"): nn.Parameter(memory), ParamId(0, "part"): nn.Parameter(memory[4:6])}


def with_layout_of(*shapes: tuple[int, ...]) -> ParamAndGradBuffer:
    layout = whole_layout([ParamShape(id=ParamId(0, f"p{i}"), shape=s) for i, s in enumerate(shapes)], num_shards=1)
    dtype = torch.float32
    return ParamAndGradBuffer(layout, SQUARE, param_dtype=dtype, grad_dtype=dtype, device=CPU, sharded=True)


FROZEN = {ParamId(0, "p"): nn.Parameter(torch.ones(2), requires_grad=False)}
REFUSALS: dict[str, tuple[type[ValueError], Callable[[], object]]] = {
    "p0 is torch.float32 in a buffer of torch.bf": (StorageError, lambda: make_buffer(SQUARE, dtype=torch.bfloat16)),
    "p0 is on cpu, the buffer on meta": (StorageError, lambda: make_buffer(SQUARE, device=torch.device("meta"))),
    "p does not require a gradient": (StorageError, lambda: make_buffer(FROZEN)),
    "whole and part share memory; tie parameters": (StorageError, lambda: make_buffer(overlapping())),
    "layout and parameters differ in: p1": (LayoutError, lambda: with_layout_of((2, 2), (3,))),
    "layout and parameters differ in: p0;": (LayoutError, lambda: with_layout_of((2, 3))),
    "planned for 2 shards, but the group has 1 ranks": (
        LayoutError,
        lambda: make_buffer(SQUARE).start_gather(0, Alone()),
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_parameters_that_cannot_share_a_buffer_are_refused(message: str) -> None:
    kind, build = REFUSALS[message]
    with pytest.raises(kind, match=message):
        build()


def wire_result(wire_of: Callable[[Comm], Wire], parts: Tensor) -> Tensor:
    """(size, n) gradients of each rank -> (n,) what the ranks' shards hold, joined."""

    def rank_main(comm: ThreadComm) -> Tensor:
        full = parts[comm.rank].clone()
        shard = full.view(comm.size, -1)[comm.rank]
        InFlight(wire_of(comm).stages(full, shard), "test", device=device.Device(), is_staged=False).finish()
        return shard

    return torch.cat(run_threads(len(parts), rank_main))


def test_sums_in_fp32_are_the_float64_sums_rounded_once_to_bf16() -> None:
    # 256 + 1 is 256 in bf16, which has 8 bits: a bf16 running sum stays there, an fp32 one is 259, then 260.
    parts = torch.tensor([[256.0] * 4, *[[1.0] * 4] * 3]).to(torch.bfloat16)
    assert wire_result(SumInFp32, parts).tolist() == [260.0] * 4
    for size in (1, 2, 3, 4):
        parts = torch.randn(size, 12 * 64, generator=torch.Generator().manual_seed(size)).to(torch.bfloat16)
        exact = parts.to(torch.float64).sum(0)
        # Half a unit in the last of 8 bits, and fp32 additions, whose errors are far smaller.
        assert ((wire_result(SumInFp32, parts) - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def test_a_failed_collective_says_which_it_was() -> None:
    class Lost:
        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    with pytest.raises(CollectiveError, match="bucket 3 of dense: connection closed by peer"):
        InFlight(iter([Lost()]), "bucket 3 of dense", device=device.Device(), is_staged=False).finish()


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
    """The first of two ranks; the other rank's gradients are zeros."""

    log: list[str] = field(default_factory=list)
    failing: tuple[int, ...] = ()
    size = 2

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        number = sum(entry.startswith("start") for entry in self.log) % NUM_BUCKETS
        self.log.append(f"start {number}")
        return Travelling(self, number, shard, full)


def make(comm: TravellingComm) -> tuple[ReducedGrads, dict[ParamId, Tensor | None]]:
    params = {ParamId(0, f"p{index}"): nn.Parameter(torch.zeros(64)) for index in range(NUM_BUCKETS)}
    layout = flat_layout([ParamShape(id=id, shape=(64,)) for id in params], num_shards=2, bucket_size=64)
    shards = ReducedGrads(layout, params, Axes(dp=comm, tp=Alone()), dtype=torch.float32, device=CPU)
    return shards, {id: torch.full((64,), 1.0 + index) for index, id in enumerate(params)}


def test_a_bucket_is_filled_while_the_bucket_before_it_travels() -> None:
    comm = TravellingComm()
    shards, grads = make(comm)
    for _ in range(2):
        comm.log.clear()
        shards.reduce_(grads)
        assert comm.log == [
            "start 0",
            "start 1",
            "wait 0",
            "start 2",
            "wait 1",
            "start 3",
            "wait 2",
            "wait 3",
        ]
        owned = shards.pieces
        assert {id: sums.unique().tolist() for id, sums in owned.items()} == {
            id: [1.0 + index] for index, id in enumerate(grads)
        }
    shards.reduce_({id: None if id.name == "p0" else grad for id, grad in grads.items()})
    assert not owned[ParamId(0, "p0")].any()  # in scratch that another bucket has used


def test_every_rank_has_all_sums_of_a_layout_without_shards() -> None:
    """They were zeros if memory for shards was made for the only shard."""
    params = {ParamId(0, f"p{index}"): nn.Parameter(torch.zeros(3, 2)) for index in range(2)}
    layout = flat_layout([ParamShape(id=id, shape=(3, 2)) for id in params], num_shards=1, bucket_size=6)

    def rank_main(comm: ThreadComm) -> list[list[float]]:
        grads = ReducedGrads(layout, params, Axes(dp=comm, tp=Alone()), dtype=torch.float32, device=CPU)
        grads.reduce_({id: torch.full((3, 2), comm.rank + 1.0 + index) for index, id in enumerate(params)})
        return [grads.pieces[id].unique().tolist() for id in params]

    assert run_threads(2, rank_main) == [[[3.0], [5.0]]] * 2


@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (1, 2)], ids=str)
def test_memory_of_a_failed_reduction_is_freed_after_the_others(failing: tuple[int, ...]) -> None:
    comm = TravellingComm(failing=failing)
    shards, grads = make(comm)
    with pytest.raises(CollectiveError, match=f"gradient bucket {failing[0]}: a peer is gone"):
        shards.reduce_(grads)
    started, waited = ([e.split()[1] for e in comm.log if e.startswith(kind)] for kind in ("start", "wait"))
    assert sorted(waited) == sorted(started)
    assert all(scratch.untyped_storage().nbytes() == 0 for scratch in shards._scratch)
