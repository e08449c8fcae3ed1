"""A saved run resumes on other layouts, dtypes, ranks and TP x DP grids: the same elements bit for bit, and the same
losses; on the same ranks to the last bit, on others as near as summation order allows. Real processes over gloo.

Pairs of values of the grids here; at night every grid is loaded on every other one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import resuming_on_grids as grids
import torch
from processes import FSDP2_RUNS, Job, run_jobs
from resuming import AFTER, BEFORE, FSDP2, Case, begin, resume, run_and_save, train
from resuming_on_grids import Numbers, Run, Size
from tiers import sampled
from tp_model import Grid

from opt_distributed.comm import Alone

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

STEPS = 8  # after the save
NUMBERS = {
    "fp32": Numbers(ZERO, torch.float32),
    "bf16": Numbers(ZERO | {"bf16": True}, torch.bfloat16),  # with fp32 mains
}
SAVED = [Size(tp, dp) for tp in (1, 2) for dp in (1, 2)]
LOADED = [Size(tp, dp) for tp in range(1, 5) for dp in range(1, 5) if tp * dp <= 4]
ALL_PAIRS = [(numbers, saved, loaded) for numbers in NUMBERS for saved in SAVED for loaded in LOADED]
SAME_GRID = [pair for pair in ALL_PAIRS if pair[1] == pair[2]]
AXES_OF = lambda pair: enumerate((pair[0], *pair[1], *pair[2]))
PAIRS = list(dict.fromkeys((*SAME_GRID, *sampled(ALL_PAIRS, AXES_OF))))
# bf16 runs only load on other grids, to save time.
GOING_ON = [pair for pair in PAIRS if pair[0] == "fp32" or pair[1] == pair[2]]
ON_GRIDS_NEAR = 5e-6  # sums in another order: a few units of 2**-22, the last place of a loss near 3


def name_of(numbers: str, *sizes: Size) -> str:
    return "-".join((numbers, *map(str, sizes)))


def grid_jobs(folder: Path) -> tuple[Mapping[str, grids.Job], Mapping[str, grids.Job]]:
    """By name: as `fp32-tp1dp2` what is saved there and never interrupted, as `fp32-tp1dp2-tp2dp1` what is loaded."""

    def job(numbers: str, saved: Size, at: Size, after: int) -> grids.Job:
        return grids.Job(at, NUMBERS[numbers], str(folder / name_of(numbers, saved)), after)

    saves = {name_of(numbers, size): job(numbers, size, size, STEPS) for numbers in NUMBERS for size in SAVED}
    loads = {name_of(*pair): job(*pair, STEPS if pair in GOING_ON else 0) for pair in PAIRS}
    return saves, loads


class Losses(NamedTuple):
    """Losses of the steps after the save, by case."""

    uninterrupted: dict[str, list[float]]
    on_two: dict[str, list[float]]
    on_four: dict[str, list[float]]
    on_one: dict[str, list[float]]


class Ran(NamedTuple):
    """The results of all worlds of this file; starting a world costs more than most programs that run in it."""

    losses: Losses
    on_grids: dict[str, Run]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {name: str(folder / name.replace(" ", "-")) for name in CASES}
    saves = {f"save {name}": Job(run_and_save, (case, paths[name])) for name, case in CASES.items()}
    again = {f"again {name}": Job(resume, (case.saved, case.dtype, paths[name])) for name, case in CASES.items()}
    loads = {name: Job(resume, (case.loaded, case.dtype, paths[name])) for name, case in CASES.items()}
    two = {job: ranks[0] for job, ranks in run_jobs(2, saves | again).items()}
    by_rank = run_jobs(4, loads | {"grids": Job(grids.run_all, grid_jobs(folder))})
    on_grids: dict[str, Run] = {}
    for of_rank in by_rank.pop("grids"):
        on_grids.update(of_rank)
    four = {name: ranks[0] for name, ranks in by_rank.items()}
    one = {name: resume(case.loaded, case.dtype, paths[name]) for name, case in CASES.items()}
    uninterrupted = {name: two[f"save {name}"] for name in CASES}
    return Ran(Losses(uninterrupted, {name: two[f"again {name}"] for name in CASES}, four, one), on_grids)


@pytest.fixture(scope="module")
def losses(ran: Ran) -> Losses:
    return ran.losses


@pytest.fixture(scope="module")
def runs(ran: Ran) -> dict[str, Run]:
    return ran.on_grids


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


# --- TP x DP grids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("numbers", "saved", "loaded"), PAIRS, ids=[name_of(*pair) for pair in PAIRS])
def test_every_element_is_loaded_bit_equal(numbers: str, saved: Size, loaded: Size, runs: dict[str, Run]) -> None:
    want, got = runs[name_of(numbers, saved)].state, runs[name_of(numbers, saved, loaded)].state
    kept = {"weight", "step", "exp_avg", "exp_avg_sq"} | ({"fp32_param"} if numbers == "bf16" else set())
    for name, of_param in want.items():
        assert of_param.keys() == got[name].keys() == kept
        for key, value in of_param.items():
            assert got[name][key].dtype == value.dtype
            assert torch.equal(got[name][key], value), f"{key} of {name}"


@pytest.mark.parametrize(("numbers", "saved", "loaded"), GOING_ON, ids=[name_of(*pair) for pair in GOING_ON])
def test_the_losses_go_on(numbers: str, saved: Size, loaded: Size, runs: dict[str, Run]) -> None:
    want, got = runs[name_of(numbers, saved)].losses, runs[name_of(numbers, saved, loaded)].losses
    assert len(got) == STEPS
    if saved == loaded:
        assert got == want
    else:
        assert got == pytest.approx(want, abs=ON_GRIDS_NEAR)


@pytest.mark.parametrize("lost", ["moments", "schedule"])
def test_what_is_not_restored_shows_in_the_losses(lost: str) -> None:
    """The test above can detect this."""
    grid = Grid(Alone(), Alone(), Alone())
    whole, resumed = grids.begin(grid, NUMBERS["fp32"]), grids.begin(grid, NUMBERS["fp32"])
    whole.train(range(grids.BEFORE))
    resumed.model.load_state_dict(whole.model.state_dict())
    if lost == "moments":
        resumed.scheduler.load_state_dict(whole.scheduler.state_dict())
    else:
        resumed.optimizer.load_state_dict(whole.optimizer.state_dict())
    steps = range(grids.BEFORE, grids.BEFORE + STEPS)
    gap = max(abs(a - b) for a, b in zip(whole.train(steps), resumed.train(steps), strict=True))
    assert gap > 1000 * ON_GRIDS_NEAR
