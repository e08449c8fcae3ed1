"""Models in safetensors files: exported and read by every layout, compared with the `safetensors` package."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoint_ranks import run_ranks
from llama_shards import NAMES, TIED, VOCAB, llama, megatron, reference, shards
from processes import world_of_one
from states import whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from opt_checkpoint import (
    CheckpointKeyError,
    CheckpointMismatchError,
    NameRule,
    ShardedTensor,
    load_safetensors,
    save,
    save_safetensors,
    sharded_model,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.safetensors import checkpoint_to_safetensors


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


def export_and_import(rank: int, size: int, folder: str, tp: int, shard_bytes: int) -> None:
    whole = megatron(llama())
    expected, state = (shards(whole, size // tp, tp, rank, filled=filled) for filled in (True, False))
    save_safetensors(expected, f"{folder}/hf", names=NAMES, shard_bytes=shard_bytes)
    report = load_safetensors(state, f"{folder}/theirs", names=NAMES)
    assert_equal(report.state, {path: shard.data for path, shard in expected.items()})
    assert (report.missing, report.unexpected, report.cast) == ((), (), ())


@pytest.mark.parametrize(
    ("size", "tp", "shard_bytes"), [(1, 1, 4000), (2, 2, 10**9), (4, 2, 4000), (4, 4, 10**9), (4, 1, 10**9)]
)
def test_every_layout_exports_the_model_and_reads_others_files(
    tmp_path: Path, size: int, tp: int, shard_bytes: int
) -> None:
    (tmp_path / "theirs").mkdir()
    reference.save_file(llama(), tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    run_ranks(size, export_and_import, str(tmp_path), tp, shard_bytes)
    assert_equal(read_all(tmp_path / "hf"), llama())
    assert (len(list((tmp_path / "hf").iterdir())) > 2) == (shard_bytes == 4000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "theirs"]


def test_a_rank_reads_only_the_bytes_of_its_shards(tmp_path: Path) -> None:
    queries = torch.randn(256, 512)
    keys = torch.randn(64, 512)
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
    names = [NameRule(ours="a", theirs="turned", transposed=True), *(NameRule(ours=n, theirs=f"x.{n}") for n in "bc")]
    save_safetensors(placed, folder, names=names, dtype=torch.float64)
    again = {name: torch.zeros_like(value) for name, value in placed.items()}
    with pytest.raises(CheckpointMismatchError, match="would round"):
        load_safetensors(again, folder, names=names)
    report = load_safetensors(again, folder, names=names, dtype="cast")
    assert set(report.cast) == {"a", "b", "c"}
    for name, value in placed.items():
        assert torch.equal(again[name].to_local(), value.to_local())


def test_dtensors_are_exported_and_read_without_gathering(tmp_path: Path) -> None:
    run_ranks(4, export_dtensors, str(tmp_path / "hf"))
    turned = torch.arange(35.0, dtype=torch.float64).view(7, 5).T.contiguous()
    b = torch.arange(6.0, dtype=torch.float64)
    c = torch.arange(3.0, dtype=torch.float64)
    assert_equal(read_all(tmp_path / "hf"), {"turned": turned, "x.b": b, "x.c": c})


def test_values_keep_their_dtype_unless_another_is_requested(tmp_path: Path) -> None:
    tensors = {
        "f64": torch.randn(3, dtype=torch.float64),
        "bf16": torch.randn(5).bfloat16(),
        "i": torch.arange(4),
        "b": torch.tensor([True, False]),
        "none": torch.zeros(0, 2),
        "scalar": torch.tensor(1.5),
        "u8": torch.arange(3).to(torch.uint8),
        "c": torch.randn(2, dtype=torch.complex64),
    }
    eight = torch.randn(8).to(torch.float8_e4m3fn)
    save_safetensors({**tensors, "f8": eight}, tmp_path / "same")
    found = read_all(tmp_path / "same")
    assert torch.equal(found.pop("f8").view(torch.uint8), eight.view(torch.uint8))
    assert_equal(found, tensors)
    save_safetensors(tensors, tmp_path / "half", dtype=torch.float16)
    half = read_all(tmp_path / "half")
    kept = {torch.int64, torch.bool, torch.uint8, torch.complex64}
    assert {name: t.dtype for name, t in half.items()} == {
        name: t.dtype if t.dtype in kept else torch.float16 for name, t in tensors.items()
    }
    assert torch.equal(half["f64"], tensors["f64"].half())
    again = {k: torch.zeros_like(v) for k, v in tensors.items()}
    load_safetensors(again, tmp_path / "same", strict="ignore_all")
    assert torch.equal(again["c"], tensors["c"])


# ----- at the shell


def test_the_command_line_converts_both_ways(tmp_path: Path) -> None:
    theirs = llama()
    ours = megatron(llama())
    reference.save_file(theirs, tmp_path / "model.safetensors")
    rules = [
        {"ours": rule.ours, "theirs": rule.theirs, "shares": rule.shares, "groups": rule.groups, "rows": rule.rows}
        for rule in NAMES
    ]
    (tmp_path / "names.json").write_text(json.dumps(rules))
    names = ("--map", str(tmp_path / "names.json"), "--prefix", "model.")
    assert main(["convert", str(tmp_path), str(tmp_path / "ours"), "--from", "safetensors", *names]) == 0
    unpadded = {f"model.{key}": t[:VOCAB] if "decoder" not in key else t for key, t in ours.items()}
    assert_equal(whole_tensors(tmp_path / "ours"), unpadded)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "safetensors", *names]) == 0
    assert_equal(read_all(tmp_path / "hf"), theirs)
    options = ("--to", "safetensors", *names, "--dtype", "float32")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "wide"), *options]) == 0
    assert_equal(read_all(tmp_path / "wide"), {name: t.float() for name, t in theirs.items()})


def test_tied_values_are_stored_once_and_unequal_ones_refused(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    folder = tmp_path / "hf"
    save({"embed": weight, "head": weight.clone()}, tmp_path / "x")
    checkpoint_to_safetensors(tmp_path / "x", folder, names=TIED)
    assert_equal(read_all(folder), {"wte": weight})
    both = {"embed": torch.zeros(4, 3), "head": torch.zeros(4, 3)}
    load_safetensors(both, folder, names=TIED)
    assert_equal(both, {"embed": weight, "head": weight})
    load_safetensors({"embed": torch.zeros(4, 3)}, folder, names=TIED)  # the head need not be asked for
    save({"embed": weight, "head": weight + 1}, tmp_path / "y")
    with pytest.raises(CheckpointMismatchError, match="head is tied to wte but its values differ"):
        checkpoint_to_safetensors(tmp_path / "y", tmp_path / "hf2", names=TIED)
    with pytest.raises(CheckpointKeyError, match="no rule names head"):
        checkpoint_to_safetensors(tmp_path / "y", tmp_path / "hf2", names=TIED[:1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "x", "y"]


def test_padded_vocabularies_of_dtensors_are_filled(tmp_path: Path) -> None:
    whole = torch.randn(10, 3)
    names = [NameRule(ours="embed.weight", theirs="wte", rows=10)]
    save_safetensors({"wte": whole}, tmp_path / "hf")
    with world_of_one():
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(0), Shard(1)):
            weight = distribute_tensor(torch.full((16, 3), 7.0), mesh, [placement])
            model = nn.ModuleDict({"embed": nn.Embedding(16, 3)})
            model["embed"].weight = nn.Parameter(weight)
            load_safetensors(sharded_model(model), tmp_path / "hf", names=names)
            loaded = model["embed"].weight.full_tensor()
            assert torch.equal(loaded[:10], whole)
            assert not loaded[10:].any()
    short = {"embed.weight": torch.zeros(8, 3)}
    with pytest.raises(CheckpointMismatchError, match=r"stored with global shape \[10, 3\], asked for with \[8, 3\]"):
        load_safetensors(short, tmp_path / "hf", names=names)
