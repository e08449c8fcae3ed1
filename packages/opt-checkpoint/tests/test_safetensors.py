"""Models in safetensors files: exported and read by every layout, compared with the `safetensors` package."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import RankPool
from disks import CountingFiles, failing_at
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from opt_checkpoint import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointKeyError,
    CheckpointMismatchError,
    NameRule,
    Segment,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    load_safetensors,
    megatron_llama_names,
    save,
    save_safetensors,
    sharded_like,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.safetensors_directories import checkpoint_to_safetensors

reference = pytest.importorskip("safetensors.torch")

LAYERS, HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCAB, PADDED = 4, 8, 4, 2, 16, 24, 30, 32
NAMES = megatron_llama_names(heads=HEADS, query_groups=GROUPS, vocab=VOCAB)


def llama() -> dict[str, Tensor]:
    """The tensors of a small Llama under the names of Hugging Face, each with values of its own."""
    generator = torch.Generator().manual_seed(0)
    layer = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (GROUPS * HEAD, HIDDEN),
        "self_attn.v_proj": (GROUPS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {f"model.layers.{i}.{n}.weight": s for i in range(LAYERS) for n, s in layer.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes["model.norm.weight"] = (HIDDEN,)
    return {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in shapes.items()}


def megatron(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values as Megatron-Core stacks, fuses and pads them."""

    def stacked(name: str) -> Tensor:
        return torch.stack([theirs[f"model.layers.{i}.{name}.weight"] for i in range(LAYERS)])

    def padded(name: str) -> Tensor:
        return torch.cat([theirs[name], torch.zeros(PADDED - VOCAB, HIDDEN, dtype=torch.bfloat16)])

    parts = [stacked(f"self_attn.{p}_proj").view(LAYERS, GROUPS, -1, HIDDEN) for p in "qkv"]
    block = "decoder.layers"
    return {
        "embedding.word_embeddings.weight": padded("model.embed_tokens.weight"),
        "output_layer.weight": padded("lm_head.weight"),
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        f"{block}.self_attention.linear_qkv.layer_norm_weight": stacked("input_layernorm"),
        f"{block}.self_attention.linear_qkv.weight": torch.cat(parts, dim=2).reshape(LAYERS, -1, HIDDEN),
        f"{block}.self_attention.linear_proj.weight": stacked("self_attn.o_proj"),
        f"{block}.mlp.linear_fc1.layer_norm_weight": stacked("post_attention_layernorm"),
        f"{block}.mlp.linear_fc1.weight": torch.cat([stacked("mlp.gate_proj"), stacked("mlp.up_proj")], dim=1),
        f"{block}.mlp.linear_fc2.weight": stacked("mlp.down_proj"),
    }


CUT = {"word_embeddings": 0, "output_layer": 0, "linear_qkv.weight": 0, "linear_proj": 1, "fc2": 1}


def shards(whole: Mapping[str, Tensor], pp: int, tp: int, rank: int, *, filled: bool) -> dict[str, Any]:
    """What rank `rank` of pp * tp holds: some layers, some rows or columns, and both halves of its part of fc1."""
    stage, number = divmod(rank, tp)
    state: dict[str, Any] = {}
    for key, values in whole.items():
        depth = 1 if ".layers." in key else 0
        layers = range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp) if depth else [None]
        if not depth and stage != (0 if "embedding" in key else pp - 1):
            continue
        for layer in layers:
            own = values if layer is None else values[layer]
            prefix = () if layer is None else (layer,)
            state[f"{key}/{layer}"] = _shard(key, own, tuple(values.shape), prefix, tp, number, filled)
    return state


def _shard(
    key: str, own: Tensor, whole: tuple[int, ...], prefix: tuple[int, ...], tp: int, number: int, filled: bool
) -> ShardedTensor | ShardedTensorFactory:
    if "fc1.weight" in key:
        rows = INNER // tp
        data = torch.cat([half[number * rows : (number + 1) * rows] for half in own.chunk(2)])
        segments = tuple(
            Segment(
                row_start=half * rows,
                row_stop=(half + 1) * rows,
                global_shape=whole,
                global_offset=(*prefix, half * INNER + number * rows, 0),
            )
            for half in (0, 1)
        )
        data = data if filled else torch.full_like(data, 7)
        return ShardedTensorFactory(key, data, segments=segments, local_shape=tuple(data.shape))
    axis = next((a for part, a in CUT.items() if part in key), None)
    offset = [0] * own.dim()
    if axis is not None:
        size = own.shape[axis] // tp
        own, offset[axis] = own.narrow(axis, number * size, size), number * size
    data = own.clone() if filled else torch.full_like(own, 7)
    return ShardedTensor(
        key, data, data.dtype, tuple(data.shape), whole, (*prefix, *offset), None,
        replica_id=0 if axis is not None else number, prepend_axis_num=len(prefix), allow_shape_mismatch=True,
    )  # fmt: skip


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def read_all(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, by the `safetensors` package."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in reference.load_file(file).items()}
    if len(files) > 1:
        content = json.loads((folder / "model.safetensors.index.json").read_text())
        assert content["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        for name, file in content["weight_map"].items():
            assert name in reference.load_file(folder / file)
        assert content["weight_map"].keys() == tensors.keys()
    return tensors


def export_as(rank: int, size: int, folder: str, tp: int, shard_bytes: int) -> None:
    state = shards(megatron(llama()), size // tp, tp, rank, filled=True)
    save_safetensors(state, folder, names=NAMES, shard_bytes=shard_bytes)


def import_as(rank: int, size: int, folder: str, tp: int) -> None:
    whole = megatron(llama())
    state = shards(whole, size // tp, tp, rank, filled=False)
    report = load_safetensors(state, folder, names=NAMES)
    expected = shards(whole, size // tp, tp, rank, filled=True)
    assert_equal(report.state, {path: shard.data for path, shard in expected.items()})
    assert (report.missing, report.unexpected, report.cast) == ((), (), ())


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
def test_a_sharded_model_is_exported_whole_from_every_layout(
    tmp_path: Path, ranks: RankPool, size: int, tp: int, shard_bytes: int
) -> None:
    ranks.run(size, export_as, str(tmp_path / "hf"), tp, shard_bytes)
    assert_equal(read_all(tmp_path / "hf"), llama())
    assert (len(list((tmp_path / "hf").iterdir())) > 2) == (shard_bytes == 4000)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_every_layout_reads_the_files_of_others(tmp_path: Path, ranks: RankPool, size: int, tp: int) -> None:
    reference.save_file(llama(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    ranks.run(size, import_as, str(tmp_path), tp)


def test_a_rank_reads_only_the_bytes_of_its_shards(tmp_path: Path) -> None:
    queries, keys = torch.randn(256, 512), torch.randn(64, 512)
    reference.save_file({"q": queries, "k": keys}, tmp_path / "model.safetensors")
    rule = NameRule(ours="qk", theirs=("q", "k"), shares=(4, 1), groups=4)
    half = ShardedTensor("qk", torch.zeros(160, 512), torch.float32, (160, 512), (320, 512), (160, 0), None)
    report = load_safetensors({"qk": half}, tmp_path, names=[rule])
    assert report.bytes_read == report.bytes_wanted == 160 * 512 * 4
    expected = torch.cat([queries.view(4, 64, 512), keys.view(4, 16, 512)], dim=1).reshape(320, 512)[160:]
    assert torch.equal(half.data, expected)


def export_dtensors(rank: int, size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    placed = {
        "a": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0), Shard(1)]),  # uneven
        "b": distribute_tensor(torch.arange(6.0), mesh, [Replicate(), Shard(0)]),
        "c": distribute_tensor(torch.arange(3.0), mesh, [Shard(0), Replicate()]),
    }
    names = [NameRule(ours="a", theirs="turned", transposed=True), NameRule(ours="{n:path}", theirs="{n:path}")][:1]
    names += [NameRule(ours=n, theirs=f"x.{n}") for n in "bc"]
    save_safetensors(placed, folder, names=names, dtype=torch.float64)
    again = {name: torch.zeros_like(value) for name, value in placed.items()}
    with pytest.raises(CheckpointMismatchError, match="would round"):
        load_safetensors(again, folder, names=names)
    report = load_safetensors(again, folder, names=names, dtype="cast")
    assert set(report.cast) == {"a", "b", "c"}
    for name, value in placed.items():
        assert torch.equal(again[name].to_local(), value.to_local())


def test_dtensors_are_exported_and_read_without_gathering(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(4, export_dtensors, str(tmp_path / "hf"))
    expected = {
        "turned": torch.arange(35.0).view(7, 5).T.contiguous(), "x.b": torch.arange(6.0), "x.c": torch.arange(3.0)
    }  # fmt: skip
    assert_equal(read_all(tmp_path / "hf"), {name: values.double() for name, values in expected.items()})


def test_values_keep_their_dtype_unless_another_is_requested(tmp_path: Path) -> None:
    tensors = {
        "f64": torch.randn(3, dtype=torch.float64), "bf16": torch.randn(5).bfloat16(), "i": torch.arange(4),
        "b": torch.tensor([True, False]), "f8": torch.randn(8).to(torch.float8_e4m3fn), "none": torch.zeros(0, 2),
        "scalar": torch.tensor(1.5), "u8": torch.arange(3).to(torch.uint8), "c": torch.randn(2, dtype=torch.complex64),
    }  # fmt: skip
    save_safetensors(tensors, tmp_path / "same")
    found = read_all(tmp_path / "same")
    assert_equal({k: v.view(torch.uint8) if k == "f8" else v for k, v in found.items()},
                 {k: v.view(torch.uint8) if k == "f8" else v for k, v in tensors.items()})  # fmt: skip
    save_safetensors({k: v for k, v in tensors.items() if k != "f8"}, tmp_path / "half", dtype=torch.float16)
    half = read_all(tmp_path / "half")
    assert {str(t.dtype) for t in half.values()} == {
        "torch.float16", "torch.int64", "torch.bool", "torch.uint8", "torch.complex64"
    }  # fmt: skip
    assert torch.equal(half["f64"], tensors["f64"].half())
    again = {k: torch.zeros_like(v) for k, v in tensors.items()}
    load_safetensors(again, tmp_path / "same")
    assert torch.equal(again["c"], tensors["c"])


TIED = [NameRule(ours="embed", theirs="wte"), NameRule(ours="head", theirs="wte", tied=True)]


def test_tied_tensors_are_stored_once_and_read_twice(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    save_safetensors({"embed": weight, "head": weight}, tmp_path / "hf", names=TIED)
    assert_equal(read_all(tmp_path / "hf"), {"wte": weight})
    embed, head = torch.zeros(4, 3), torch.zeros(4, 3)
    load_safetensors({"embed": embed, "head": head}, tmp_path / "hf", names=TIED)
    assert torch.equal(embed, weight)
    assert torch.equal(head, weight)
    load_safetensors({"embed": torch.zeros(4, 3)}, tmp_path / "hf", names=TIED)  # the head need not be asked for


def refuse_apart(rank: int, size: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (size,))
    weight = torch.arange(12.0).view(4, 3)
    other = weight + (torch.arange(4) == 3)[:, None]  # differs on the last rank only
    state = {n: distribute_tensor(w, mesh, [Shard(0)]) for n, w in (("embed", weight), ("head", other))}
    with pytest.raises(CheckpointMismatchError, match="head is tied to wte and has other values") as error:
        save_safetensors(state, folder, names=TIED)
    return str(error.value)


def test_tied_tensors_with_other_values_are_refused_on_every_rank(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, refuse_apart, str(tmp_path / "hf"))
    assert first == second
    assert "rank 1" in first
    assert list(tmp_path.iterdir()) == []


def refuse_exports(rank: int, size: int, folder: str) -> list[str]:
    """One rank differs, or all ask for what cannot be; the messages, which must be the same everywhere."""
    row = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, size))
    hole = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, rank, size + 1))}
    cases: list[tuple[Any, dict[str, Any]]] = [
        ({"w": row, "extra": torch.zeros(1)} if rank else {"w": row}, {"names": [NameRule(ours="w", theirs="w")]}),
        ({"w": row}, {"names": [NameRule(ours="w", theirs=("a", "b"), shares=(2, 1))]}),
        ({"w": row, "lr": 0.1} if rank else {"w": row}, {}),
        ({"w": row, "rng": ShardedObject("rng", {}, (1,), (0,))}, {}),
        (hole, {}),
        ({"w": row}, {"names": [NameRule(ours="w", theirs=f"w{rank}")]}),
        ({"w": row}, {"shard_bytes": 0}),
        ({"w": row}, {"dtype": torch.int32}),
        ({"w": row}, {"dtype": torch.complex32}),
        ({}, {}),
    ]
    messages = []
    for state, options in cases:
        with pytest.raises(CheckpointingException) as error:
            save_safetensors(state, folder, **options)
        messages.append(str(error.value).replace(f"exporting to {folder}", ""))
    return messages


def test_impossible_exports_raise_on_all_ranks_before_anything_is_written(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, refuse_exports, str(tmp_path / "hf"))
    assert first == second
    expected = [
        "no rule names extra", r"cannot be cut", "lr out of the state", "rng", "w", "ranks differ in names",
        "shard_bytes=0", "dtype=torch.int32 must be a floating", "dtype=torch.complex32", "no tensor to export",
    ]  # fmt: skip
    for message, part in zip(first, expected, strict=True):
        assert part in message
    assert list(tmp_path.iterdir()) == []


def refuse_imports(rank: int, size: int, folder: str) -> list[str]:
    def row(key: str, *, rows: int = 2, dtype: torch.dtype = torch.float32) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, torch.full((rows, 3), 7, dtype=dtype), (0, rank, size))

    names = [NameRule(ours="w", theirs="w"), NameRule(ours="v", theirs="v")]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"w": row("w"), "v": row("v"), **({"u": row("u")} if rank else {})}, {"names": names}),
        ({"w": row("w")}, {"names": names}),
        ({"w": row("w")}, {"names": names[:1]}),
        ({"w": row("w", rows=3 if rank else 2), "v": row("v")}, {"names": names}),
        ({"w": row("w", dtype=torch.float16), "v": row("v")}, {"names": names}),
        ({"w": row("w"), "v": row("v")}, {"names": names, "strict": "log_all" if rank else "raise_all"}),
    ]
    messages = []
    for state, options in cases:
        with pytest.raises(CheckpointingException) as error:
            load_safetensors(state, folder, **options)
        messages.append(str(error.value))
        assert all((shard.data == 7).all() for shard in state.values())
    return messages


def test_imports_that_do_not_fit_raise_on_all_ranks_before_memory_changes(tmp_path: Path, ranks: RankPool) -> None:
    reference.save_file({n: torch.zeros(4, 3) for n in "wv"}, tmp_path / "model.safetensors")
    first, second = ranks.run(2, refuse_imports, str(tmp_path))
    assert first == second
    expected = [
        "u",
        "requested by no rank: v",
        "no rule names v",
        "global shape",
        "would round",
        "ranks differ in strict",
    ]
    for message, part in zip(first, expected, strict=True):
        assert part in message


def test_an_export_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointExistsError, match="hf exists"):
        save_safetensors({"w": torch.zeros(2)}, tmp_path / "hf")


def test_an_export_that_fails_at_any_call_leaves_nothing(tmp_path: Path) -> None:
    state = shards(megatron(llama()), 1, 1, 0, filled=True)
    counting = CountingFiles()
    save_safetensors(state, tmp_path / "whole", names=NAMES, shard_bytes=9000, files=counting)
    last = len(counting.calls)  # syncs the name of the folder, which is there and whole by then
    assert last > 50
    for call in [*range(1, last, 5), last - 1]:
        with pytest.raises(CheckpointingException):
            save_safetensors(state, tmp_path / "hf", names=NAMES, shard_bytes=9000, files=failing_at(call, 28))
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_what_a_killed_export_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    left = tmp_path / f".opt-checkpoint-tmp-{'a' * 32}"
    left.mkdir()
    for name in (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ):
        (left / name).write_bytes(b"")
    for path in (*left.iterdir(), left):
        os.utime(path, (0, 0))  # the lease has run out
    save_safetensors({"w": torch.zeros(2)}, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_index_is_written_last(tmp_path: Path) -> None:
    made: list[str] = []

    class Recording(CountingFiles):
        def create(self, path: Path) -> int:
            made.append(path.name)
            return super().create(path)

        def reopen(self, path: Path) -> int:
            made.append(path.name)
            return super().reopen(path)

    save_safetensors({n: torch.zeros(4) for n in "abc"}, tmp_path / "hf", shard_bytes=16, files=Recording())
    assert made[-1] == "model.safetensors.index.json"
    assert len(made) == 8  # the lease, each of three files made and written, the index


# ----- at the shell


def test_the_command_line_converts_both_ways(tmp_path: Path) -> None:
    theirs, ours = llama(), megatron(llama())
    reference.save_file(theirs, tmp_path / "model.safetensors")
    rules = [
        {"ours": rule.ours, "theirs": rule.theirs, "shares": rule.shares, "groups": rule.groups, "rows": rule.rows}
        for rule in NAMES
    ]
    (tmp_path / "names.json").write_text(json.dumps(rules))
    names = ("--map", str(tmp_path / "names.json"), "--prefix", "model.")
    assert main(["convert", str(tmp_path), str(tmp_path / "ours"), "--from", "safetensors", *names]) == 0
    wanted = {key: torch.zeros_like(t) for key, t in ours.items()}
    state = {key: sharded_like(f"model.{key}", t) for key, t in wanted.items()}
    for shard in state.values():
        shard.allow_shape_mismatch = True
    load(state, tmp_path / "ours")
    assert_equal(wanted, ours)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "safetensors", *names]) == 0
    assert_equal(read_all(tmp_path / "hf"), theirs)
    options = ("--to", "safetensors", *names, "--dtype", "float32")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "wide"), *options]) == 0
    assert_equal(read_all(tmp_path / "wide"), {name: t.float() for name, t in theirs.items()})


def test_a_checkpoint_with_tied_values_is_exported_and_with_other_values_refused(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    save({"embed": weight, "head": weight.clone()}, tmp_path / "x")
    checkpoint_to_safetensors(tmp_path / "x", tmp_path / "hf", names=TIED)
    assert_equal(read_all(tmp_path / "hf"), {"wte": weight})
    save({"embed": weight, "head": weight + 1}, tmp_path / "y")
    with pytest.raises(CheckpointMismatchError, match="head is tied to wte and has other values"):
        checkpoint_to_safetensors(tmp_path / "y", tmp_path / "hf2", names=TIED)
    with pytest.raises(CheckpointKeyError, match="no rule names head"):
        checkpoint_to_safetensors(tmp_path / "y", tmp_path / "hf2", names=TIED[:1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "x", "y"]
