"""A saved run resumes on other layouts, dtypes and numbers of ranks: on the same ranks with the same losses to the
last bit, on others as near as summation order allows. Real processes over gloo.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import FSDP2_RUNS, Job, run_jobs
from tiny_model import Tiny, joined_batch, make_model, my_batch
from torch.distributed.fsdp import fully_shard

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

BEFORE, AFTER = 4, 8  # steps until the save, and in all


FSDP2 = "fully_shard"  # among a run's options: torch shards the model


class Case(NamedTuple):
    """Configurations of the saving and the loading run, by name."""

    saved: dict[str, Any]
    loaded: dict[str, Any]
    dtype: torch.dtype = torch.float32
    near: float = 1e-4  # of losses on another number of ranks: fp32 summation order, grown by a few steps of Adam


def begin(options: dict[str, Any], dtype: torch.dtype) -> tuple[Tiny, Optimizer]:
    model = make_model(dtype)
    fields = {name: value for name, value in options.items() if name != FSDP2}
    if FSDP2 in options and dist.is_initialized():
        fully_shard(model.layer)
        fully_shard(model)
    for module in (model.embedding, model.head):  # sharding makes new parameters, without the old ones' attributes
        module.weight.is_embedding_or_output_parameter = True
    return model, get_optimizer(OptimizerConfig(lr=3e-3, clip_grad=0.3, **fields), [model])


def state_of(model: Tiny, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def train(model: Tiny, optimizer: Optimizer, steps: range) -> list[float]:
    """Losses of the joined batch, comparable between numbers of ranks."""
    losses = []
    for step in steps:
        model(my_batch(step) if dist.is_initialized() else joined_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model(joined_batch(step)).item())
    return losses


def run_and_save(case: Case, path: str) -> list[float]:
    model, optimizer = begin(case.saved, case.dtype)
    train(model, optimizer, range(BEFORE))
    save(state_of(model, optimizer), path)
    return train(model, optimizer, range(BEFORE, AFTER))


def resume(options: dict[str, Any], dtype: torch.dtype, path: str) -> list[float]:
    model, optimizer = begin(options, dtype)
    loaded = load(state_of(model, optimizer), path, dtype="cast").state
    optimizer.load_state_dict(loaded["optimizer"])
    return train(model, optimizer, range(BEFORE, AFTER))


ZERO = {"use_distributed_optimizer": True}
WHOLE = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True, "muon_fp32_matmul_prec": "highest"}
BF16 = {"bf16": True}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
MUON = {**WHOLE, "use_layer_wise_distributed_optimizer": False}
SHORT = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}
TORCH = {FSDP2: True}
FP8 = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
CASES = {
    "flat": Case(ZERO, ZERO),
    "replicated to flat": Case({}, ZERO),
    "flat to replicated, bf16": Case(ZERO | BF16, BF16, torch.bfloat16, near=0.02),
    "remainders to copies, narrow moments to wide": Case(ZERO | BF16 | NARROW, ZERO | BF16, torch.bfloat16, near=0.02),
    "8-bit moments to wide": Case(ZERO | BF16 | FP8, ZERO | BF16, torch.bfloat16, near=0.02),
    "24-bit mains, flat to fully_shard": Case(ZERO | BF16 | SHORT, TORCH | BF16 | SHORT, torch.bfloat16, near=0.02),
    "24-bit mains, fully_shard to copies": Case(TORCH | BF16 | SHORT, BF16, torch.bfloat16, near=0.02),
    "layer-wise to replicated muon": Case(WHOLE, MUON),
    "fully_shard": Case(TORCH, TORCH),
    "fully_shard to flat, bf16": Case(TORCH | BF16 | NARROW, ZERO | BF16, torch.bfloat16, near=0.02),
    "muon, fully_shard to layer-wise": Case(TORCH | MUON, WHOLE),
    "muon, layer-wise to fully_shard": Case(WHOLE, TORCH | MUON),
}


if not FSDP2_RUNS:
    CASES = {name: case for name, case in CASES.items() if FSDP2 not in case.saved | case.loaded}


class Losses(NamedTuple):
    """Losses of the steps after the save, by case."""

    uninterrupted: dict[str, list[float]]
    on_two: dict[str, list[float]]
    on_four: dict[str, list[float]]
    on_one: dict[str, list[float]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {name: str(folder / name.replace(" ", "-")) for name in CASES}
    saves = {f"save {name}": Job(run_and_save, (case, paths[name])) for name, case in CASES.items()}
    again = {f"again {name}": Job(resume, (case.saved, case.dtype, paths[name])) for name, case in CASES.items()}
    loads = {name: Job(resume, (case.loaded, case.dtype, paths[name])) for name, case in CASES.items()}
    two = {job: ranks[0] for job, ranks in run_jobs(2, saves | again).items()}
    four = {name: ranks[0] for name, ranks in run_jobs(4, loads).items()}
    one = {name: resume(case.loaded, case.dtype, paths[name]) for name, case in CASES.items()}
    uninterrupted = {name: two[f"save {name}"] for name in CASES}
    return Losses(uninterrupted, {name: two[f"again {name}"] for name in CASES}, four, one)


@pytest.mark.parametrize("name", CASES)
def test_on_the_same_ranks_a_resumed_run_has_the_uninterrupted_runs_losses(name: str, losses: Losses) -> None:
    assert losses.on_two[name] == losses.uninterrupted[name]


@pytest.mark.parametrize("name", CASES)
def test_on_other_ranks_layouts_and_numbers_it_has_nearly_the_same(name: str, losses: Losses) -> None:
    near = CASES[name].near
    assert losses.on_four[name] == pytest.approx(losses.uninterrupted[name], abs=near)
    assert losses.on_one[name] == pytest.approx(losses.uninterrupted[name], abs=near)


def test_without_the_optimizers_state_the_losses_are_others(losses: Losses, tmp_path: Path) -> None:
    """The tests above can detect a run that kept its weights and lost its moments."""
    model, optimizer = begin(ZERO, torch.float32)
    train(model, optimizer, range(BEFORE))
    kept = {name: weight.clone() for name, weight in model.state_dict().items()}
    model, optimizer = begin(ZERO, torch.float32)
    model.load_state_dict(kept)
    assert train(model, optimizer, range(BEFORE, AFTER)) != pytest.approx(losses.uninterrupted["flat"], abs=1e-4)
