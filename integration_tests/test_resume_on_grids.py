"""A run saved on any TP x DP grid goes on, on any other of up to four ranks: every element bit-equal, the same losses.

Real processes over gloo; a real model, cut by tensor parallelism; ZeRO-1; a schedule in its warm-up.
"""

import pytest
import torch
import worlds
from resuming_on_grids import BEFORE, Job, Numbers, Run, Size, begin, run_all
from tp_model import Grid

from opt_distributed.comm.collectives import Alone

AFTER = 20  # steps after the save
ZERO = {"use_distributed_optimizer": True}
NUMBERS = {
    "fp32": Numbers(ZERO, torch.float32),
    "bf16": Numbers(ZERO | {"bf16": True}, torch.bfloat16),  # with fp32 mains
}
SAVED = [Size(tp, dp) for tp in (1, 2) for dp in (1, 2)]
LOADED = [Size(tp, dp) for tp in range(1, 5) for dp in range(1, 5) if tp * dp <= 4]
PAIRS = [(numbers, saved, loaded) for numbers in NUMBERS for saved in SAVED for loaded in LOADED]
GOING_ON = [pair for pair in PAIRS if pair[0] == "fp32" or pair[2] in SAVED]  # the rest only load, to save time

# Sums in another order. fp32: a few units of 2**-22, the last place of a loss near 3; bf16: a rounding of 2**-8 of a
# gradient, seen by Adam as a fraction of lr.
NEAR = {"fp32": 5e-6, "bf16": 0.02}


def name_of(numbers: str, *sizes: Size) -> str:
    return "-".join((numbers, *map(str, sizes)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """By name: as `fp32-tp1dp2` what was never interrupted, as `fp32-tp1dp2-tp2dp1` what was loaded."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def job(numbers: str, saved: Size, at: Size, after: int) -> Job:
        return Job(at, NUMBERS[numbers], str(folder / name_of(numbers, saved)), after)

    saves = {name_of(numbers, size): job(numbers, size, size, AFTER) for numbers in NUMBERS for size in SAVED}
    loads = {name_of(*pair): job(*pair, AFTER if pair in GOING_ON else 0) for pair in PAIRS}
    found: dict[str, Run] = {}
    for of_rank in worlds.run_jobs(4, {"runs": worlds.Job(run_all, (saves, loads))})["runs"]:
        found.update(of_rank)
    return found


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
    assert len(got) == AFTER
    if saved == loaded:
        assert got == want
    else:
        assert got == pytest.approx(want, abs=NEAR[numbers])


@pytest.mark.parametrize("lost", ["moments", "schedule"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_what_is_not_restored_shows_in_the_losses(numbers: str, lost: str, runs: dict[str, Run]) -> None:
    """What the test above can see."""
    grid = Grid(Alone(), Alone(), Alone())
    whole, resumed = begin(grid, NUMBERS[numbers]), begin(grid, NUMBERS[numbers])
    whole.train(range(BEFORE))
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.optimizer.reload_model_params()
    if lost == "moments":
        resumed.scheduler.load_state_dict(whole.scheduler.state_dict())
    else:
        resumed.optimizer.load_state_dict(whole.optimizer.state_dict())
    steps = range(BEFORE, BEFORE + AFTER)
    gap = max(abs(a - b) for a, b in zip(whole.train(steps), resumed.train(steps), strict=True))
    assert gap > 5 * NEAR[numbers]
