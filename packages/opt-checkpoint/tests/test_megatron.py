"""Directories that Megatron-Core wrote, kept in `golden/`: read, resharded, converted without Megatron installed.

They are from `tests_megatron/write_megatron.py` on two ranks; `tests_megatron` runs the tests of `written` on new ones.
"""

from __future__ import annotations

import argparse
import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import load_as_ranks
from megatron_truth import assert_holds, truth_of

from opt_checkpoint import (
    NUMPY_GLOBALS,
    REFERENCE_ALIASES,
    CheckpointCorruptError,
    CheckpointValueError,
    NotLoaded,
    ShardedObject,
    ShardedTensor,
    load,
    read_common,
    read_index,
    save,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.megatron import megatron_to_checkpoint, read_step
from opt_checkpoint.disk.archives import load_object
from opt_checkpoint.disk.index import Kind

GOLDEN = Path(__file__).parent / "golden"
FORMS = {"megatron-0.16.1": "fully_reshardable", "megatron-0.12.3": "fully_sharded_model_space"}
FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture(params=FORMS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the directory and the truth about it."""
    path = GOLDEN / f"{request.param}.zip"
    if not path.exists():
        pytest.skip("a source distribution has no checkpoints of Megatron-Core")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    (tmp_path / FORMS[request.param]).rename(tmp_path / "theirs")
    return tmp_path


def test_a_directory_of_megatron_holds_what_its_optimizer_held(written: Path) -> None:
    assert read_index(written / "theirs").kind is Kind.MEGATRON
    assert verify_checkpoint(written / "theirs") == []
    truth = truth_of(written)
    assert len(truth) == 3 * 13
    assert_holds(written / "theirs", truth, aliases=REFERENCE_ALIASES)


@pytest.mark.parametrize("size", [3, 4])
def test_it_loads_as_flat_shards_of_any_number_of_ranks(written: Path, size: int) -> None:
    key = f"optimizer.state.exp_avg.{FC1}"
    whole = truth_of(written)[key]
    cuts = [whole.numel() * n // size for n in range(size + 1)]
    block = ShardedTensor.from_rank_offsets(key, whole)
    states = [{"w": block.flat(torch.zeros(b - a), a, b)} for a, b in itertools.pairwise(cuts)]
    loaded = load_as_ranks(states, written / "theirs")
    assert torch.equal(torch.cat([state["w"] for state in loaded]), whole.reshape(-1))


def test_values_load_where_their_classes_are_plain_or_allowed(written: Path) -> None:
    path, weight = written / "theirs", torch.zeros(2, 64, 16, dtype=torch.bfloat16)
    assert load({"model": sharded_like(FC1, weight), "iteration": None}, path).state["iteration"] == 3
    assert weight.count_nonzero() == weight.numel()
    common = read_common(read_index(path))
    assert common["args"] == NotLoaded("argparse.Namespace")
    assert read_step(read_index(path), common) == 3
    with pytest.raises(CheckpointCorruptError, match=r"args cannot be loaded safely.*safe_globals=\[.*Namespace"):
        load({"args": None}, path)
    allowed: list[Any] = [argparse.Namespace, *((dict, f"{m}.Attention") for m in ("__mp_main__", "__main__"))]
    with pytest.raises(CheckpointCorruptError):  # an enum's member is not a dict
        load({"args": None}, path, safe_globals=allowed)
    allowed = [argparse.Namespace, *((str, f"{m}.Attention") for m in ("__mp_main__", "__main__"))]
    arguments = load({"args": None}, path, safe_globals=allowed).state["args"]
    assert (arguments.lr, arguments.attention, arguments.dtype) == (0.01, "1", torch.bfloat16)
    shards = 2 if "rng_state/shard_1_2" in read_index(path).objects else 1
    rng = ShardedObject("rng_state", None, (shards,), (0,))
    with pytest.raises(CheckpointCorruptError, match="NUMPY_GLOBALS of opt_checkpoint has those of numpy"):
        load({"rng": rng}, path)
    (generators,) = load({"rng": rng}, path, safe_globals=NUMPY_GLOBALS).state["rng"]
    assert generators["numpy"][1].shape == (624,)


def test_it_is_converted_with_its_step(written: Path) -> None:
    assert main(["convert", str(written / "theirs"), str(written / "ours"), "--from", "megatron"]) == 0
    assert_holds(written / "ours", truth_of(written))
    assert verify_checkpoint(written / "ours") == []
    step = torch.zeros(2, dtype=torch.int64)
    load({"s": sharded_like(f"optimizer.state.step.{FC1}", step), "iteration": None}, written / "ours")
    assert step.tolist() == [3, 3]
    steps = {
        k: t.shape for k, t in read_index(written / "ours").tensors.items() if k.startswith("optimizer.state.step")
    }
    assert (len(steps), steps["optimizer.state.step.embedding.word_embeddings.weight"]) == (13, ())
    with pytest.raises(CheckpointValueError, match="it is not dp_reshardable"):
        megatron_to_checkpoint(written / "theirs", written / "again", slots=[])
    with pytest.raises(SystemExit):
        main(["convert", str(written / "theirs"), str(written / "again")])


def test_a_checkpoint_of_ours_is_not_converted_from_megatron(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"w": sharded_like("w", torch.ones(2))}, tmp_path / "x")
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "y"), "--from", "megatron"]) == 2
    assert "was not written by Megatron-Core" in capsys.readouterr().err


class Hidden:
    """A class that no reader knows."""

    def __reduce__(self) -> Any:
        return Hidden, ()


def test_the_placeholder_of_an_unknown_class_is_inert() -> None:
    stream = io.BytesIO()
    torch.save({"known": 1, "unknown": [Hidden(), (Hidden(), 2)]}, stream)
    hidden = NotLoaded(f"{Hidden.__module__}.Hidden")
    assert load_object(stream.getvalue()) == {"known": 1, "unknown": [hidden, (hidden, 2)]}
