"""Directories that Megatron-Core itself wrote: loaded, converted, verified, equal to what its optimizer held.

`OPT_MEGATRON_OLD` names a folder with megatron-core 0.12, the last kind that writes `fully_sharded_model_space`; nox
session `megatron` sets it.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from opt_checkpoint import read_common, read_index, save, sharded_like, verify_checkpoint
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.megatron import read_step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from megatron_truth import assert_holds, truth_of
from states import whole_tensors
from test_megatron import (  # noqa: F401  # they run here with the fixture `written` of this file
    test_a_directory_of_megatron_holds_what_its_optimizer_held,
    test_it_is_converted_with_its_step,
    test_it_loads_as_flat_shards_of_any_number_of_ranks,
    test_values_load_where_their_classes_are_plain_or_allowed,
)

OLD = os.environ.get("OPT_MEGATRON_OLD")
STEPS = 3
EXP_AVG = "optimizer.state.exp_avg"


class World(NamedTuple):
    """Ranks, how many of them share a layer's weights, and the Megatron-Core that they run."""

    ranks: int
    tensor_parallel: int
    kind: str = "zero"  # one of KINDS of write_megatron.py
    python_path: str | None = None

    @property
    def formats(self) -> list[str]:
        if self.python_path:
            return ["fully_sharded_model_space", "dp_zero_gather_scatter"]
        return ["fully_reshardable", "dp_reshardable"]

    def __str__(self) -> str:
        return f"{self.ranks} ranks, tp {self.tensor_parallel}, {'0.12' if self.python_path else self.kind}"


NEW = [World(1, 1), World(2, 1), World(2, 2)]
WORLDS = [*NEW, World(2, 1, python_path=OLD)] if OLD else NEW


def run(world: World, target: Path, *words: str) -> None:
    writer = Path(__file__).parent / "write_megatron.py"
    command = [sys.executable, writer, target, world.ranks, world.tensor_parallel, world.kind, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if world.python_path:
        environment["PYTHONPATH"] = os.pathsep.join([world.python_path, os.environ.get("PYTHONPATH", "")])
    subprocess.run([str(word) for word in command], check=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Writes the directories of a world once."""

    @cache
    def folder(world: World) -> Path:
        target = tmp_path_factory.mktemp("megatron")
        run(world, target, *world.formats)
        return target

    return folder


@pytest.fixture(params=WORLDS, ids=str)
def written(request: pytest.FixtureRequest, folder_of: object, tmp_path: Path) -> Path:
    """A folder with the directory of states by parameter and the truth about it."""
    folder = folder_of(request.param)  # type: ignore[operator]
    for path in (*folder.glob("truth-*.pt"), folder / request.param.formats[0]):
        (tmp_path / ("theirs" if path.is_dir() else path.name)).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("world", [*NEW, World(2, 1, "buckets"), World(2, 1, "experts")], ids=str)
def test_buckets_are_converted_by_the_layout_of_the_run(folder_of: object, tmp_path: Path, world: World) -> None:
    folder = folder_of(world)  # type: ignore[operator]
    target = tmp_path / "ours"
    index = read_index(folder / "dp_reshardable")
    assert verify_checkpoint(index.path) == []
    assert read_step(index, read_common(index)) == STEPS
    command = ["convert", str(index.path), str(target), "--from", "megatron"]
    slots = [slot for file in sorted(folder.glob("slots-*.json")) for slot in json.loads(file.read_text())]
    distinct = [slot for number, slot in enumerate(slots) if slot not in slots[:number]]
    (tmp_path / "slots.json").write_text(json.dumps(distinct))
    assert main([*command, "--slots", str(tmp_path / "slots.json")]) == 0
    assert_holds(target, truth_of(folder))
    steps = whole_tensors(target, "optimizer.state.step.")
    assert steps["optimizer.state.step.decoder.layers.self_attention.linear_proj.weight"].tolist() == [STEPS, STEPS]


@pytest.mark.parametrize("kind", ["plain", "fp32", "fp16", "fp16-zero", "experts", "chain"])
def test_every_kind_is_converted_whole(folder_of: object, tmp_path: Path, kind: str) -> None:
    folder = folder_of(World(2 if kind in ("experts", "chain") else 1, 1, kind))  # type: ignore[operator]
    source = folder / "fully_reshardable"
    target = tmp_path / "ours"
    truth = truth_of(folder)
    assert verify_checkpoint(source) == []
    assert main(["convert", str(source), str(target), "--from", "megatron"]) == 0
    if kind == "fp32":  # its main weights are the weights
        truth = {key: value for key, value in truth.items() if "fp32_param" not in key}
    assert_holds(target, truth)
    steps = whole_tensors(target, "optimizer.state.step.")
    assert {key.replace(".step.", ".exp_avg.") for key in steps} == {key for key in truth if ".exp_avg." in key}
    assert all((step == STEPS).all() for step in steps.values())
    scale = read_common(read_index(target)).get("optimizer", {}).get("grad_scaler", {})
    assert scale.get("scale") == (512.0 if "fp16" in kind else None)


def test_states_of_several_buckets_are_refused(folder_of: object, tmp_path: Path) -> None:
    folder = folder_of(World(2, 1, "buckets"))  # type: ignore[operator]
    path = folder / "fully_reshardable"
    truth = truth_of(folder)
    (finding,) = verify_checkpoint(path)
    wrong = {key.replace("state.param", "state.fp32_param") for key in finding.keys}
    assert wrong == {key for key in truth if "fp32_param" in key and "output_layer" not in key}
    command = ["convert", str(path), str(tmp_path / "ours"), "--from", "megatron"]
    assert main(command) == 2
    assert main([*command, "--moments", "new"]) == 0
    assert verify_checkpoint(folder / "dp_reshardable") == []


@pytest.mark.parametrize("kind", ["zero", "plain", "fp32-zero", "experts", "chain"])
def test_its_optimizer_loads_what_is_converted_for_it(folder_of: object, tmp_path: Path, kind: str) -> None:
    world = World(2 if kind in ("experts", "chain") else 1, 1, kind)
    folder = folder_of(world)  # type: ignore[operator]
    assert main(["convert", str(folder / "fully_reshardable"), str(tmp_path / "x"), "--from", "megatron"]) == 0
    tensors = whole_tensors(tmp_path / "x")
    tensors = {key: tensor + 1 if ".exp_avg" in key else tensor for key, tensor in tensors.items()}
    tensors = {key: torch.full_like(tensor, 7) if ".step." in key else tensor for key, tensor in tensors.items()}
    if kind == "fp32-zero":
        tensors = {key: tensor for key, tensor in tensors.items() if ".fp32_param." not in key}
    save(as_opt_stack_saves(tensors), tmp_path / "ours")
    command = ["convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "megatron"]
    assert main([*command, *(["--replicated"] if kind in ("plain", "chain") else [])]) == 0
    assert verify_checkpoint(tmp_path / "theirs") == []
    run(world, tmp_path, "load", str(tmp_path / "theirs"))
    assert_holds(tmp_path / "ours", {k: v for k, v in truth_of(tmp_path).items() if k in tensors})


def as_opt_stack_saves(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    names = [key.removeprefix(f"{EXP_AVG}.") for key in tensors if key.startswith(f"{EXP_AVG}.")]
    experts = [name for name in names if ".experts." in name]
    vectors = [name for name in names if "norm" in name]
    matrices = [name for name in names if name not in (*experts, *vectors)]
    numbers = {"lr_mult": 1.0, "max_lr": 0.01, "min_lr": None, "lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}
    groups = [{**numbers, "optimizer": "adam", "wd_mult": wd, "weight_decay": 0.01 * wd} for wd in (1.0, 0.0, 1.0)]
    chosen = [(group, own) for group, own in zip(groups, (matrices, vectors, experts), strict=True) if own]
    of_groups = {"groups": [group for group, _ in chosen], "names": [own for _, own in chosen]}
    scale = {"scale": 64.0, "growth_tracker": 1, "hysteresis_tracker": 2}
    of_optimizer = {"version": 1, "groups": of_groups, "grad_scaler": scale}
    described = [sharded_like(key, tensor) for key, tensor in tensors.items()]
    return {"tensors": described, "optimizer": of_optimizer, "iteration": STEPS, "scheduler": {"num_steps": 7}}


@pytest.mark.skipif(not OLD, reason="OPT_MEGATRON_OLD names no megatron-core 0.12")
def test_a_format_that_is_not_read_is_named(
    folder_of: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder_of(WORLDS[-1]) / "dp_zero_gather_scatter"  # type: ignore[operator]
    assert verify_checkpoint(source) == []
    assert main(["convert", str(source), str(tmp_path / "ours"), "--from", "megatron"]) == 2
    assert "stores its optimizer as dp_zero_gather_scatter, which is not read" in capsys.readouterr().err
