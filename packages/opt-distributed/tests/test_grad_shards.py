"""Gradients of a plain module under ZeRO-1: one bucket is filled while another is on the wire."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from opt_distributed.buffers.reduced import ReducedGrads
from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm.collectives import Alone, Pending
from opt_distributed.comm.groups import Axes
from opt_distributed.layout import ParamShape, flat_layout
from opt_paramgroups import ParamId

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
