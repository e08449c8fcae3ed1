"""Random parallel grids: the state of a small model on the ranks of (pipeline, tensor, data, expert) worlds.

Everything is derived from whole tensors, so what a rank should hold after a load is known without the code under test.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint import PerParam, ShardedTensor, make_sharded_optimizer_tensor, make_sharded_state

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A global parameter: `stack` counts the layers or experts along a prepended axis, 0 for none."""

    key: str
    shape: tuple[int, ...]
    cut_axis: int | None
    stack: int
    dtype: torch.dtype

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape with the prepended axis."""
        return ((self.stack,) if self.stack else ()) + self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A world: `pp` stages (which also deal out stacks), `tp` cuts, `dp` flat shards of buckets."""

    pp: int
    tp: int
    dp: int
    bucket: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp


def random_params(rng: random.Random) -> list[Param]:
    """A few parameters of 0 to 4 axes, some stacked, some cut by tensor parallelism."""
    params = []
    for number in range(rng.randint(1, 5)):
        dims = rng.choice([0, 1, 1, 2, 2, 2, 3, 4])
        shape = tuple(rng.choice([1, 2, 4, 6, 12]) for _ in range(dims))
        axes = [a for a, n in enumerate(shape) if n % 12 == 0]
        cut = rng.choice(axes) if axes and rng.random() < 0.7 else None
        stack = rng.choice([0, 0, 4])
        params.append(Param(key=f"p{number}", shape=shape, cut_axis=cut, stack=stack, dtype=rng.choice(DTYPES)))
    return params


def random_grid(rng: random.Random) -> Grid:
    """At most 12 ranks; 12 is divisible by every tp."""
    return Grid(
        pp=rng.choice([1, 2, 4]), tp=rng.choice([1, 2, 3]), dp=rng.choice([1, 2, 3]), bucket=rng.choice([7, 64, 999])
    )


def whole_values(params: list[Param], rng: random.Random) -> dict[str, Tensor]:
    """Distinct values for every element of every parameter."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    values = {}
    for p in params:
        raw = torch.randint(-100, 100, p.global_shape, generator=generator)
        values[p.key] = raw.to(p.dtype)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds of one parameter: its sharded tensor, and what it should hold."""

    shard: ShardedTensor
    expected: Tensor
    step: ShardedTensor


def rank_pieces(params: list[Param], values: dict[str, Tensor], grid: Grid, rank: int, *, filled: bool) -> list[Piece]:
    """The pieces of a rank: ZeRO-1 buckets over `dp`, whose padding belongs to no rank."""
    pp, tp, dp = rank // (grid.tp * grid.dp), rank // grid.dp % grid.tp, rank % grid.dp
    blocks = [b for number, p in enumerate(params) for b in _blocks(p, number, values, grid, pp, tp)]
    pieces = []
    for bucket in _buckets(blocks, grid.bucket):
        shard_numel = -(-sum(v.numel() for _, v in bucket) // grid.dp)
        low, high, position = dp * shard_numel, (dp + 1) * shard_numel, 0
        for block, local in bucket:
            start, stop = max(low, position) - position, min(high, position + local.numel()) - position
            pieces.append(_piece(block, local, start, max(start, stop), filled=filled, has=start < stop))
            position += local.numel()
    return [p for p in pieces if p is not None]


def _blocks(param: Param, number: int, values: dict[str, Tensor], grid: Grid, pp: int, tp: int) -> list[Any]:
    """Blocks of a parameter on one (pp, tp): one stage has an unstacked one; a stack is dealt out over stages."""
    layers = range(pp * param.stack // grid.pp, (pp + 1) * param.stack // grid.pp) if param.stack else (None,)
    if not param.stack and number % grid.pp != pp:
        return []
    return [_block(param, values[param.key], grid, tp, layer) for layer in layers]


def _block(param: Param, whole: Tensor, grid: Grid, tp: int, layer: int | None) -> tuple[ShardedTensor, Tensor]:
    local = whole if layer is None else whole[layer]
    offset = [0] * len(param.shape)
    replica = tp
    if param.cut_axis is not None:
        rows = param.shape[param.cut_axis] // grid.tp
        local = local.narrow(param.cut_axis, tp * rows, rows)
        offset[param.cut_axis], replica = tp * rows, 0
    prepended = () if layer is None else (layer,)
    block = ShardedTensor(
        param.key, None, param.dtype, tuple(local.shape), param.global_shape, (*prepended, *offset), None,
        replica_id=(0, replica, 0), prepend_axis_num=len(prepended),
    )  # fmt: skip
    return block, local.reshape(-1)


def _buckets(blocks: list[Any], limit: int) -> list[list[Any]]:
    buckets: list[list[Any]] = []
    for block in reversed(blocks):
        if not buckets or sum(v.numel() for _, v in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(block)
    return buckets


def _piece(block: ShardedTensor, local: Tensor, start: int, stop: int, *, filled: bool, has: bool) -> Piece | None:
    if not has:
        return None
    expected = local[start:stop].clone()
    data = expected.clone() if filled else torch.full_like(expected, 77)
    held = replace_range(block, start, stop)
    state = make_sharded_optimizer_tensor(held, data, "optimizer.state.exp_avg")
    step = make_sharded_state(held, torch.tensor(5.0 if filled else 0.0), "step", PerParam())
    assert isinstance(state, ShardedTensor)
    assert isinstance(step, ShardedTensor)
    return Piece(shard=state, expected=expected, step=step)


def replace_range(block: ShardedTensor, start: int, stop: int) -> ShardedTensor:
    """The block without data, narrowed to a flat range."""
    return replace(block, flattened_range=slice(start, stop))


def states_of(pieces: list[Piece]) -> dict[str, Any]:
    """A rank's pieces as a state to save or load."""
    return {
        "state": {str(i): {"exp_avg": p.shard, "step": p.step} for i, p in enumerate(pieces)},
    }


def numel(params: list[Param]) -> int:
    """Elements of all parameters."""
    return sum(math.prod(p.global_shape) for p in params)
