"""F19: random save -> load grids. Every element is bit-equal to the unsharded reference for any two layouts."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoint_ranks import load_as_ranks, save_as_ranks
from tiers import NIGHT
from torch import Tensor

from opt_checkpoint import (
    PerParam,
    ShardedTensor,
    make_sharded_optimizer_tensor,
    make_sharded_state,
    verify_checkpoint,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float16)


class Param(NamedTuple):
    """Tensor parallelism cuts `cut_axis`, or replicates for None. `stack` layers have an axis before `shape`, 0: none.

    Its global values are whole numbers in `whole`.
    """

    key: str
    cut_axis: int | None
    stack: int
    whole: Tensor


def random_params(rng: random.Random) -> list[Param]:
    """A few parameters of 0 to 4 axes; 12 is divisible by every number of tensor-parallel ranks."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    params = []
    for number in range(rng.randint(1, 5)):
        shape = [rng.choice([1, 2, 4, 6, 12]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 4]))]
        axes = [axis for axis, rows in enumerate(shape) if rows == 12]
        cut_axis = rng.choice(axes) if axes and rng.random() < 0.7 else None
        stack = rng.choice([0, 0, 4])
        whole = torch.randint(-100, 100, [stack, *shape] if stack else shape, generator=generator)
        params.append(Param(f"p{number}", cut_axis, stack, whole.to(rng.choice(DTYPES))))
    return params


def random_states(params: list[Param], rng: random.Random, *, filled: bool) -> list[list[dict[str, Any]]]:
    """What each rank of a random grid holds: layers by pipeline stage, cuts by tensor parallelism, flat ranges by data
    parallelism. Each piece comes with its expected values."""
    pp = rng.choice([1, 2, 4])
    tp = rng.choice([1, 2, 3])
    dp = rng.choice([1, 2, 3])
    by_rank: list[list[dict[str, Any]]] = [[] for _ in range(pp * tp * dp)]
    for number, param in enumerate(params):
        for layer in range(param.stack) if param.stack else [None]:
            stage = number % pp if layer is None else layer * pp // param.stack
            numel = block_of(param, layer, 0, tp)[1].numel()
            cuts = [0, *sorted(rng.randint(0, numel) for _ in range(dp - 1)), numel]
            for cut in range(tp):
                block, values = block_of(param, layer, cut, tp)
                for shard, (start, stop) in enumerate(pairwise(cuts)):
                    if start < stop:
                        part = replace(block, flattened_range=slice(start, stop))
                        piece = piece_of(part, values[start:stop].clone(), filled=filled)
                        by_rank[(stage * tp + cut) * dp + shard].append(piece)
    return by_rank


def block_of(param: Param, layer: int | None, cut: int, tp: int) -> tuple[ShardedTensor, Tensor]:
    """What one tensor-parallel rank has of a layer, and its values."""
    if layer is None:
        local = param.whole
        prepended = ()
    else:
        local = param.whole[layer]
        prepended = (layer,)
    offset = [0] * local.ndim
    replica = cut
    if param.cut_axis is not None:
        rows = local.shape[param.cut_axis] // tp
        local = local.narrow(param.cut_axis, cut * rows, rows)
        replica = 0
        offset[param.cut_axis] = cut * rows
    block = ShardedTensor(
        param.key,
        None,
        local.dtype,
        tuple(local.shape),
        tuple(param.whole.shape),
        (*prepended, *offset),
        None,
        replica_id=(0, replica, 0),
        prepend_axis_num=len(prepended),
    )
    return block, local.reshape(-1)


def piece_of(block: ShardedTensor, values: Tensor, *, filled: bool) -> dict[str, Any]:
    data = values.clone() if filled else torch.full_like(values, 77)
    steps = torch.tensor(5.0 + sum(block.global_offset[: block.prepend_axis_num]))  # of each layer others
    step = make_sharded_state(block, steps * filled, "step", PerParam())
    moment = make_sharded_optimizer_tensor(block, data, "optimizer.state.exp_avg")
    return {"exp_avg": moment, "step": step, "expected": values, "steps": steps}


def states_of(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"state": {str(i): {name: piece[name] for name in ("exp_avg", "step")} for i, piece in enumerate(pieces)}}


def test_every_element_survives_any_change_of_grid(tmp_path: Path) -> None:
    for seed in range(1000 if NIGHT else 40):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        params = random_params(rng)
        save_as_ranks([states_of(pieces) for pieces in random_states(params, rng, filled=True)], folder)
        assert verify_checkpoint(folder) == []
        wanted = random_states(params, rng, filled=False)
        load_as_ranks([states_of(pieces) for pieces in wanted], folder)
        for rank, pieces in enumerate(wanted):
            for piece in pieces:
                assert torch.equal(piece["exp_avg"].data, piece["expected"]), f"seed {seed}, rank {rank}, {piece}"
                assert piece["step"].data == piece["steps"]
