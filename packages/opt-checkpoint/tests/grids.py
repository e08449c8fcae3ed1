"""Random parallel grids: the state of a small model on the ranks of (pipeline, tensor, data) worlds.

Everything is derived from whole tensors, so what a rank should hold after a load is known without the code under test.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint import PerParam, ShardedTensor, make_sharded_optimizer_tensor, make_sharded_state

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float16)


class Param(NamedTuple):
    """Tensor parallelism cuts `cut_axis`; `stack` counts the layers along a prepended axis, 0 for none."""

    key: str
    shape: tuple[int, ...]
    cut_axis: int | None
    stack: int
    dtype: torch.dtype

    @property
    def global_shape(self) -> tuple[int, ...]:
        return ((self.stack,) if self.stack else ()) + self.shape


class Grid(NamedTuple):
    """A world: `pp` stages (which also deal out stacks), `tp` cuts, `dp` flat shards of buckets."""

    pp: int
    tp: int
    dp: int
    bucket: int

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.dp


class Piece(NamedTuple):
    """What one rank holds of one parameter: its sharded tensor, and what it should hold."""

    shard: ShardedTensor
    expected: Tensor
    step: ShardedTensor


def random_params(rng: random.Random) -> list[Param]:
    """A few parameters of 0 to 4 axes, some stacked, some cut by tensor parallelism."""
    params = []
    for number in range(rng.randint(1, 5)):
        dims = rng.choice([0, 1, 1, 2, 2, 2, 3, 4])
        shape = tuple(rng.choice([1, 2, 4, 6, 12]) for _ in range(dims))
        axes = [a for a, n in enumerate(shape) if n % 12 == 0]
        cut = rng.choice(axes) if axes and rng.random() < 0.7 else None
        params.append(Param(f"p{number}", shape, cut, rng.choice([0, 0, 4]), rng.choice(DTYPES)))
    return params


def random_grid(rng: random.Random) -> Grid:
    """At most 36 ranks; 12 is divisible by every tp."""
    return Grid(rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([7, 64, 999]))


def whole_values(params: list[Param], rng: random.Random) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return {p.key: torch.randint(-100, 100, p.global_shape, generator=generator).to(p.dtype) for p in params}


def rank_pieces(params: list[Param], values: dict[str, Tensor], grid: Grid, rank: int, *, filled: bool) -> list[Piece]:
    """The pieces of a rank: ZeRO-1 buckets over `dp`, whose padding belongs to no rank."""
    pp, tp, dp = rank // (grid.tp * grid.dp), rank // grid.dp % grid.tp, rank % grid.dp
    buckets: list[list[tuple[ShardedTensor, Tensor]]] = []
    for number, param in reversed(list(enumerate(params))):
        for block in reversed(list(_blocks(param, number, values[param.key], grid, pp, tp))):
            if not buckets or sum(v.numel() for _, v in buckets[-1]) >= grid.bucket:
                buckets.append([])
            buckets[-1].append(block)
    pieces = []
    for bucket in buckets:
        shard_numel = -(-sum(v.numel() for _, v in bucket) // grid.dp)
        position = -dp * shard_numel  # of the block in this rank's shard
        for block, local in bucket:
            start, stop = max(0, -position), min(local.numel(), shard_numel - position)
            if start < stop:
                pieces.append(_piece(block, local[start:stop].clone(), start, stop, filled=filled))
            position += local.numel()
    return pieces


def _blocks(param: Param, number: int, whole: Tensor, grid: Grid, pp: int, tp: int) -> Any:
    """Blocks of a parameter on one (pp, tp): one stage has an unstacked one; a stack is dealt out over stages."""
    layers: Any = range(pp * param.stack // grid.pp, (pp + 1) * param.stack // grid.pp)
    for layer in layers if param.stack else [None] if number % grid.pp == pp else []:
        local, offset, replica = whole if layer is None else whole[layer], [0] * len(param.shape), tp
        if param.cut_axis is not None:
            rows = param.shape[param.cut_axis] // grid.tp
            local = local.narrow(param.cut_axis, tp * rows, rows)
            offset[param.cut_axis], replica = tp * rows, 0
        prepended = () if layer is None else (layer,)
        block = ShardedTensor(
            param.key, None, param.dtype, tuple(local.shape), param.global_shape, (*prepended, *offset), None,
            replica_id=(0, replica, 0), prepend_axis_num=len(prepended),
        )  # fmt: skip
        yield block, local.reshape(-1)


def _piece(block: ShardedTensor, expected: Tensor, start: int, stop: int, *, filled: bool) -> Piece:
    data = expected.clone() if filled else torch.full_like(expected, 77)
    block = replace(block, flattened_range=slice(start, stop))
    state: Any = make_sharded_optimizer_tensor(block, data, "optimizer.state.exp_avg")
    step: Any = make_sharded_state(block, torch.tensor(5.0 if filled else 0.0), "step", PerParam())
    return Piece(state, expected, step)


def states_of(pieces: list[Piece]) -> dict[str, Any]:
    """A rank's pieces as a state to save or load."""
    return {"state": {str(i): {"exp_avg": p.shard, "step": p.step} for i, p in enumerate(pieces)}}
