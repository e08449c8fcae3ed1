"""F19: random save -> load grids. Every element is bit-equal to the unsharded reference for any two layouts."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from checkpoint_ranks import load_as_ranks, save_as_ranks
from grids import random_grid, random_params, rank_pieces, states_of, whole_values

from opt_checkpoint import verify_checkpoint


def save_and_load_on_random_grids(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    params = random_params(rng)
    values = whole_values(params, rng)
    before, after = random_grid(rng), random_grid(rng)
    saved = [rank_pieces(params, values, before, rank, filled=True) for rank in range(before.size)]
    save_as_ranks([states_of(p) for p in saved], folder)
    assert verify_checkpoint(folder) == []
    wanted = [rank_pieces(params, values, after, rank, filled=False) for rank in range(after.size)]
    load_as_ranks([states_of(p) for p in wanted], folder)
    for rank, pieces in enumerate(wanted):
        for piece in pieces:
            assert torch.equal(piece.shard.data, piece.expected), f"seed {seed}, rank {rank} of {after}, {piece.shard}"
            assert piece.step.data.item() == 5.0


def test_every_element_survives_any_change_of_grid(tmp_path: Path, full: bool) -> None:
    for seed in range(1000 if full else 60):
        save_and_load_on_random_grids(seed, tmp_path / str(seed))
