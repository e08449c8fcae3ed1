"""Exports to safetensors and imports from them that fail: on all ranks, and before anything is overwritten."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import RankPool
from failing_calls import Calls, failing_at
from llama_shards import NAMES, TIED, llama, megatron, reference, shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from opt_checkpoint import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointMismatchError,
    NameRule,
    ShardedObject,
    ShardedTensor,
    load_safetensors,
    save_safetensors,
    sharded_like,
)


def refuse_apart(rank: int, size: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (size,))
    weight = torch.arange(12.0).view(4, 3)
    other = weight + (torch.arange(4) == 3)[:, None]  # differs on the last rank only
    state = {n: distribute_tensor(w, mesh, [Shard(0)]) for n, w in (("embed", weight), ("head", other))}
    with pytest.raises(CheckpointMismatchError, match="head is tied to wte but its values differ") as error:
        save_safetensors(state, folder, names=TIED)
    return str(error.value)


def test_tied_tensors_with_other_values_are_refused_on_every_rank(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, refuse_apart, str(tmp_path / "hf"))
    assert first == second
    assert "rank 1" in first
    assert list(tmp_path.iterdir()) == []


def refusals(cases: list[tuple[Any, Any, str]], call: Any) -> list[str]:
    """The messages, of which each has its words."""
    messages = []
    for state, options, words in cases:
        with pytest.raises(CheckpointingException, match=words) as error:
            call(state, **options)
        messages.append(str(error.value))
    return messages


def refuse_exports(rank: int, size: int, folder: str) -> list[str]:
    """One rank differs, or all ask for what cannot be; the messages, which must be the same everywhere."""
    row = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, size))
    hole = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, size + 1))
    extra = {"extra": sharded_like("extra", torch.zeros(1))} if rank else {}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({"w": row, **extra}, {"names": [NameRule(ours="w", theirs="w")]}, "no rule names extra"),
        ({"w": row}, {"names": [NameRule(ours="w", theirs=("a", "b"), shares=(2, 1))]}, "cannot be cut"),
        ({"w": row, "lr": 0.1} if rank else {"w": row}, {}, "leave out lr"),
        ({"w": row, "rng": ShardedObject("rng", {}, (1,), (0,))}, {}, "rng"),
        ({"w": hole}, {}, "w: .*of the 18|w: .*hold"),
        ({"w": row}, {"names": [NameRule(ours="w", theirs=f"w{rank}")]}, "ranks differ in names"),
        ({"w": row}, {"shard_bytes": 0}, "shard_bytes=0"),
        ({"w": row}, {"dtype": torch.int32}, "dtype=torch.int32 must be a floating"),
        ({"w": row}, {"dtype": torch.complex32}, "dtype=torch.complex32"),
        ({}, {}, "no tensor to export"),
    ]
    return refusals(cases, lambda state, **options: save_safetensors(state, folder, **options))


def test_impossible_exports_raise_on_all_ranks_before_anything_is_written(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, refuse_exports, str(tmp_path / "hf"))
    assert first == second
    assert list(tmp_path.iterdir()) == []


def refuse_imports(rank: int, size: int, folder: str) -> list[str]:
    def row(key: str, *, rows: int = 2, dtype: torch.dtype = torch.float32) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, torch.full((rows, 3), 7, dtype=dtype), (0, rank, size))

    both = {"names": [NameRule(ours="w", theirs="w"), NameRule(ours="v", theirs="v")]}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"w": row("w"), "v": row("v"), **({"u": row("u")} if rank else {})}, both, "u"),
        ({"w": row("w")}, both, "requested by no rank: v"),
        ({"w": row("w")}, {"names": both["names"][:1]}, "no rule names v"),
        ({"w": row("w", rows=3 if rank else 2), "v": row("v")}, both, "global shape"),
        ({"w": row("w", dtype=torch.float16), "v": row("v")}, both, "would round"),
        ({"w": row("w"), "v": row("v")}, {**both, "strict": "log_all" if rank else "raise_all"}, "differ in strict"),
    ]
    messages = refusals(cases, lambda state, **options: load_safetensors(state, folder, **options))
    assert all((shard.data == 7).all() for state, *_ in cases for shard in state.values())
    return messages


def test_imports_that_do_not_fit_raise_on_all_ranks_before_memory_changes(tmp_path: Path, ranks: RankPool) -> None:
    reference.save_file({n: torch.zeros(4, 3) for n in "wv"}, tmp_path / "model.safetensors")
    first, second = ranks.run(2, refuse_imports, str(tmp_path))
    assert first == second


def test_an_export_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointExistsError, match="hf exists"):
        save_safetensors({"w": torch.zeros(2)}, tmp_path / "hf")


def test_an_export_that_fails_at_any_call_leaves_nothing(tmp_path: Path) -> None:
    state = shards(megatron(llama()), 1, 1, 0, filled=True)
    with Calls() as counting:
        save_safetensors(state, tmp_path / "whole", names=NAMES, shard_bytes=9000)
    last = len(counting.made)  # syncs the name of the folder, which is there and whole by then
    assert last > 50
    for call in [*range(1, last, 5), last - 1]:
        with pytest.raises(CheckpointingException), failing_at(call, 28):
            save_safetensors(state, tmp_path / "hf", names=NAMES, shard_bytes=9000)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_what_a_killed_export_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    left = tmp_path / f".opt-checkpoint-tmp-{'a' * 32}"
    left.mkdir()
    for name in (*(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), "model.safetensors.index.json"):
        (left / name).write_bytes(b"")
    for path in (*left.iterdir(), left):
        os.utime(path, (0, 0))  # the lease has run out
    save_safetensors({"w": torch.zeros(2)}, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_index_is_written_last(tmp_path: Path) -> None:
    with Calls() as calls:
        save_safetensors({n: torch.zeros(4) for n in "abc"}, tmp_path / "hf", shard_bytes=16)
    made = [Path(key).name for name, key in calls.made if name in ("create", "reopen")]
    assert made[-1] == "model.safetensors.index.json"
    assert len(made) == 8  # the lease, each of three files made and written, the index
