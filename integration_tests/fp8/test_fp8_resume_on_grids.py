"""Runs with parameters in fp8 that are saved on one TP x DP grid and resumed on others. Over gloo processes.

Scales belong to the parts of tensor parallelism. On as many tensor-parallel ranks they are loaded, and a run goes on to
the bit on the same grid; on others they are taken from the loaded main values, and delayed scaling starts with
an empty history.
"""

import pytest
import resuming_on_grids as grids
import torch
from processes import Job, run_jobs
from resuming_on_grids import Numbers, Run, Size

STEPS = 4  # after the save
SAVED = Size(2, 2)
LOADED = [Size(2, 2), Size(2, 1), Size(1, 2), Size(1, 1), Size(4, 1)]
RECIPES = ["delayed", "tensorwise", "blockwise"]  # 24 columns: none of mxfp8's runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def job(recipe: str, size: Size) -> grids.Job:
        options = {"use_distributed_optimizer": True, "bf16": True, "fp8_recipe": recipe}
        return grids.Job(size, Numbers(options, torch.bfloat16), str(folder / recipe), STEPS)

    saves = {recipe: job(recipe, SAVED) for recipe in RECIPES}
    loads = {f"{recipe} {size}": job(recipe, size) for recipe in RECIPES for size in LOADED}
    found: dict[str, Run] = {}
    for of_rank in run_jobs(4, {"grids": Job(grids.run_all, (saves, loads))})["grids"]:
        found.update(of_rank)
    return found


@pytest.mark.parametrize("size", LOADED, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_main_values_and_moments_are_loaded_to_the_bit(recipe: str, size: Size, runs: dict[str, Run]) -> None:
    want, got = runs[recipe].state, runs[f"{recipe} {size}"].state
    for name, of_param in want.items():
        assert of_param.keys() == got[name].keys() == {"weight", "step", "exp_avg", "exp_avg_sq", "fp32_param"}
        for key, value in of_param.items():
            if key != "weight" or size.tp == SAVED.tp:
                assert torch.equal(got[name][key], value), f"{key} of {name}"
            else:  # other scales: an eighth is the distance of two codes, a thousandth that of the smallest
                far = 1e-3 * value.abs().max().item()
                torch.testing.assert_close(got[name][key], value, rtol=1 / 8, atol=far)


@pytest.mark.parametrize("size", LOADED, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_losses_go_on(recipe: str, size: Size, runs: dict[str, Run]) -> None:
    want, got = runs[recipe].losses, runs[f"{recipe} {size}"].losses
    assert len(got) == STEPS
    assert got == (want if size == SAVED else pytest.approx(want, abs=0.05))
