"""A saved run resumes on other layouts, dtypes and numbers of ranks: on the same ranks with the same losses to the
last bit, on others as near as summation order allows. Real processes over gloo.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from processes import FSDP2_RUNS, Job, run_jobs
from resuming import AFTER, BEFORE, FSDP2, Case, begin, resume, run_and_save, train

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
