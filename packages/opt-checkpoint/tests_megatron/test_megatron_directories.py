"""Directories that Megatron-Core itself wrote: loaded, converted, verified, equal to what its optimizer held.

`OPT_MEGATRON_OLD` names a folder with megatron-core 0.12, the last kind that writes `fully_sharded_model_space`; nox
session `megatron` sets it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from opt_checkpoint import (
    NUMPY_GLOBALS,
    REFERENCE_ALIASES,
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointKeyError,
    ShardedObject,
    load,
    read_common,
    read_index,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.megatron import read_step
from opt_checkpoint.disk.index import Kind

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from megatron_truth import assert_holds, truth_of

WRITER = Path(__file__).parent / "write_megatron.py"
OLD = os.environ.get("OPT_MEGATRON_OLD")
STEPS = 3


class World(NamedTuple):
    """Ranks, how many of them share a layer's weights, and the Megatron-Core that they run."""

    ranks: int
    tensor_parallel: int
    python_path: str | None = None


NEW = [World(1, 1), World(2, 1), World(2, 2)]
WORLDS = [*NEW, World(2, 1, OLD)] if OLD else NEW
NAMED = {world: "fully_sharded_model_space" if world.python_path else "fully_reshardable" for world in WORLDS}
FORMATS = {
    world: ["fully_sharded_model_space", "dp_zero_gather_scatter"]
    if world.python_path
    else ["fully_reshardable", "dp_reshardable"]
    for world in WORLDS
}


def name_of(world: World) -> str:
    return f"{world.ranks} ranks, tp {world.tensor_parallel}{', 0.12' if world.python_path else ''}"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes the directories of a world once."""
    written: dict[World, Path] = {}

    def folder(world: World) -> Path:
        if world not in written:
            target = tmp_path_factory.mktemp("megatron")
            command = [sys.executable, WRITER, target, world.ranks, world.tensor_parallel, *FORMATS[world]]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if world.python_path:
                environment["PYTHONPATH"] = os.pathsep.join([world.python_path, os.environ.get("PYTHONPATH", "")])
            subprocess.run([str(word) for word in command], check=True, timeout=300, env=environment)
            written[world] = target
        return written[world]

    return folder


@pytest.mark.parametrize("world", WORLDS, ids=name_of)
def test_states_by_parameter_load_as_they_were_in_memory(folder_of: Any, world: World) -> None:
    path, truth = folder_of(world) / NAMED[world], truth_of(folder_of(world))
    assert len(truth) == 3 * 13
    assert read_index(path).kind is Kind.MEGATRON
    assert_holds(path, truth, aliases=REFERENCE_ALIASES)


@pytest.mark.parametrize("world", WORLDS, ids=name_of)
def test_every_directory_verifies(folder_of: Any, world: World) -> None:
    for form in FORMATS[world]:
        assert verify_checkpoint(folder_of(world) / form) == []


@pytest.mark.parametrize("world", WORLDS, ids=name_of)
def test_the_model_loads_and_the_step_is_found(folder_of: Any, world: World) -> None:
    for form in FORMATS[world][: 1 if world.python_path else 2]:
        index = read_index(folder_of(world) / form)
        key = "decoder.layers.mlp.linear_fc1.weight"
        weight = torch.zeros(2, 64, 16, dtype=torch.bfloat16)
        report = load({"model": sharded_like(key, weight), "iteration": None}, index.path)
        assert report.state["iteration"] == STEPS
        assert weight.float().abs().min() >= 0
        assert weight.count_nonzero() == weight.numel()
        assert read_step(index, read_common(index)) == STEPS


@pytest.mark.parametrize("world", WORLDS, ids=name_of)
def test_a_converted_directory_holds_states_steps_and_model(folder_of: Any, tmp_path: Path, world: World) -> None:
    source, target = folder_of(world) / NAMED[world], tmp_path / "ours"
    assert main(["convert", str(source), str(target), "--from", "megatron"]) == 0
    assert verify_checkpoint(target) == []
    assert_holds(target, truth_of(folder_of(world)))
    steps = {k: t.shape for k, t in read_index(target).tensors.items() if k.startswith("optimizer.state.step.")}
    assert len(steps) == 13
    assert steps["optimizer.state.step.decoder.layers.mlp.linear_fc1.weight"] == (2,)
    assert steps["optimizer.state.step.embedding.word_embeddings.weight"] == ()
    assert load({"iteration": None}, target).state == {"iteration": STEPS}


@pytest.mark.parametrize("world", NEW, ids=name_of)
def test_buckets_are_converted_by_the_layout_of_the_run(folder_of: Any, tmp_path: Path, world: World) -> None:
    folder, target = folder_of(world), tmp_path / "ours"
    command = ["convert", str(folder / "dp_reshardable"), str(target), "--from", "megatron"]
    assert main(command) == 2
    rows = [
        row for rank in range(world.tensor_parallel) for row in json.loads((folder / f"slots-{rank}.json").read_text())
    ]
    (tmp_path / "slots.json").write_text(json.dumps(rows))
    assert main([*command, "--slots", str(tmp_path / "slots.json")]) == 0
    assert_holds(target, truth_of(folder))
    step = torch.zeros(2, dtype=torch.int64)
    load({"s": sharded_like("optimizer.state.step.decoder.layers.mlp.linear_fc2.weight", step)}, target)
    assert step.tolist() == [STEPS, STEPS]


def test_buckets_without_a_layout_cannot_be_loaded_and_the_message_says_what_to_do(folder_of: Any) -> None:
    wanted = {"w": sharded_like("optimizer.state.exp_avg.embedding.word_embeddings.weight", torch.zeros(64, 16))}
    with pytest.raises(CheckpointKeyError, match=r"optckpt convert \.\.\. --from megatron"):
        load(wanted, folder_of(NEW[0]) / "dp_reshardable")


@pytest.mark.skipif(not OLD, reason="OPT_MEGATRON_OLD names no megatron-core 0.12")
def test_a_format_that_is_not_read_is_named(folder_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(WORLDS[-1]) / "dp_zero_gather_scatter"
    assert main(["convert", str(source), str(tmp_path / "ours"), "--from", "megatron"]) == 2
    assert "stores its optimizer as dp_zero_gather_scatter, which is not read" in capsys.readouterr().err


def test_arguments_and_generators_are_read_only_when_they_are_used(folder_of: Any) -> None:
    path = folder_of(NEW[1]) / "fully_reshardable"
    with pytest.raises(CheckpointCorruptError, match=r"safe_globals=\[.*argparse.Namespace"):
        load({"args": None}, path)
    allowed = [argparse.Namespace, (Attention, "__mp_main__.Attention")]
    arguments = load({"args": None}, path, safe_globals=allowed).state["args"]
    assert arguments.lr == 0.01
    assert arguments.attention == Attention(1)
    rng = ShardedObject("rng_state", None, (1,), (0,))
    with pytest.raises(CheckpointingException, match="NUMPY_GLOBALS"):
        load({"rng": rng}, path)
    (generators,) = load({"rng": rng}, path, safe_globals=NUMPY_GLOBALS).state["rng"]
    assert generators["numpy"][0] == "MT19937"
    assert generators["numpy"][1].shape == (624,)
    assert generators["torch"].dtype == torch.uint8


class Attention:
    """A stand-in for the enum of the writing script."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attention) and other.value == self.value
