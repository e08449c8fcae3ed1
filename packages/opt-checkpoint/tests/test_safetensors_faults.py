"""Exports to safetensors and imports from them that fail: on all ranks, and before anything is overwritten."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import run_ranks
from failing_calls import Calls, failing_at
from llama_shards import NAMES, TIED, llama, megatron, reference, shards

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    NameRule,
    ShardedObject,
    ShardedTensor,
    load_safetensors,
    save_safetensors,
    sharded_like,
)
from opt_checkpoint.convert.safetensors_files import find_arrays


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
    embed, head = (ShardedTensor.from_rank_offsets(k, torch.zeros(2, 3), (0, rank, size)) for k in ("embed", "head"))
    head.data += rank  # differs on the last rank only
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
        ({"embed": embed, "head": head}, {"names": TIED}, "rank 1.*head is tied to wte but its values differ"),
    ]
    return refusals(cases, lambda state, **options: save_safetensors(state, folder, **options))


def test_impossible_exports_raise_on_all_ranks_before_a_write(tmp_path: Path) -> None:
    first, second = run_ranks(2, refuse_exports, str(tmp_path / "hf"))
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


def test_unfit_imports_raise_on_all_ranks_before_memory_changes(tmp_path: Path) -> None:
    reference.save_file({n: torch.zeros(4, 3) for n in "wv"}, tmp_path / "model.safetensors")
    first, second = run_ranks(2, refuse_imports, str(tmp_path))
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


def test_files_may_be_links_into_a_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    reference.save_file({"w": torch.arange(3.0)}, tmp_path / "blobs" / "f00")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/f00")
    target = torch.zeros(3)
    load_safetensors({"w": target}, tmp_path / "snapshot")
    assert torch.equal(target, torch.arange(3.0))


def test_folders_without_one_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        load_safetensors({}, tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="has no safetensors file"):
        load_safetensors({}, tmp_path)
    for name in ("a", "b"):
        reference.save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointNotFoundError, match="has 2 safetensors files and no"):
        load_safetensors({}, tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointCorruptError, match="not a regular file"):
        load_safetensors({}, tmp_path)


INDICES: list[tuple[Any, str]] = [
    ({"a": "a.safetensors", "b": "../b.safetensors"}, "not a plain name"),
    ({"a": "a.safetensors", "b": "c.safetensors"}, "c.safetensors is missing"),
    ({"a": "a.safetensors"}, "b is in a.safetensors"),
    ({"a": "a.safetensors", "b": "a.safetensors", "c": "a.safetensors"}, "c is in no file"),
    (["a"], "is not a valid index"),
    ("[" * 100_000, "is not a valid index"),
    ({"a": "a.safetensors", "b": "d.safetensors"}, "is in a.safetensors and in d.safetensors"),
]


def test_an_index_with_wrong_values_is_refused(tmp_path: Path) -> None:
    for file in "ad":
        reference.save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / f"{file}.safetensors")
    for weight_map, message in INDICES:
        content = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointCorruptError, match=message):
            load_safetensors({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path)


def framed(header: bytes, body: bytes = b"\0" * 16) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def of(**changes: Any) -> bytes:
    """A file of one tensor `w`, of four numbers."""
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}
    return framed(json.dumps({"w": entry}).encode())


W = b'{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
HOSTILE = {
    "empty": b"",
    "short": b"\x01\x00",
    "huge length": (1 << 63).to_bytes(8, "little") + b"{}",
    "length beyond the file": (100).to_bytes(8, "little") + b"{}",
    "not json": framed(b"{nonsense}"),
    "not utf-8": framed(b'{"\xff": 1}'),
    "deep": framed(b"[" * 50_000),
    "a list": framed(b"[]", b""),
    "a key twice": framed(b'{"w":%s,"w":%s}' % (W, W)),
    "overlap": framed(b'{"v":%s,"w":%s}' % (W, W)),
    "gap": of(shape=[2], data_offsets=[8, 16]),
    "bytes after": of(shape=[2], data_offsets=[0, 8]),
    "beyond the end": of(shape=[8], data_offsets=[0, 32]),
    "product": of(shape=[3]),
    "huge product": of(shape=[1 << 40, 1 << 40, 1 << 40]),
    "negative": of(shape=[-2, -2]),
    "an end that lies": of(data_offsets=[0, 999]),
    "backwards": of(data_offsets=[16, 0]),
    "many axes": of(shape=[1] * 100 + [4]),
    "true": of(shape=[True, 4]),
    "a fraction": of(shape=[4.0]),
    "unknown dtype": of(dtype="F3"),
    "dtype is a list": of(dtype=["F32"]),
    "no offsets": framed(b'{"w":{"dtype":"F32","shape":[4]}}'),
    "not an object": framed(b'{"w":7}'),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointCorruptError, match="not a safetensors file"):
        load_safetensors({"w": torch.zeros(4)}, tmp_path)


def test_a_changed_header_reads_as_in_safetensors_or_is_refused(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    file = tmp_path / "model.safetensors"
    reference.save_file({"a": torch.arange(3.0), "b": torch.arange(4, dtype=torch.int16), "c": torch.zeros(2, 2)}, file)
    whole = file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    accepted = 0
    for _ in range(400):
        position = int(torch.randint(length, (1,), generator=generator))
        changed = bytearray(whole)
        changed[position] = int(torch.randint(32, 127, (1,), generator=generator))
        file.write_bytes(changed)
        try:
            found = find_arrays(tmp_path)
        except CheckpointCorruptError:
            continue
        accepted += 1
        theirs = reference.load_file(file)
        assert {n: (p.dtype, p.shape) for n, p in found.items()} == {
            n: (t.dtype, tuple(t.shape)) for n, t in theirs.items()
        }
    assert accepted > 5  # another letter in a name
