"""Saved in any mode, loaded in any other: main values to the bit, moments as near as their dtypes allow, the loss goes on.

One process; `test_resume*.py` change the number of ranks.
"""

from pathlib import Path
from typing import Any, NamedTuple

import modes
import pytest
import torch
from char_gpt import CharGPT
from modes import DISTANCE, Values, advance, build, every_mode, judged, name_of, pairwise
from torch import Tensor

from opt_checkpoint import load, save, sharded_model
from opt_distributed.comm.collectives import Alone

BEFORE, AFTER = 6, 12  # steps until the save, and in all
MODES = pairwise(
    [mode for mode in every_mode() if mode["rule"] == "adam" and not any(r.applies(mode) for r in modes.REFUSALS)]
)


# Of a tensor's largest value, how far a moment may be from the saved one: half a step of the dtype's mantissa there.
MOMENT_ERROR = {"fp32": 0.0, "bf16": 2.0**-9, "scaled fp16": 2.0**-12, "scaled fp8": 2.0**-4}

State = dict[str, dict[str, Tensor]]  # by parameter and key, in fp32


class Saved(NamedTuple):
    path: Path
    state: State
    gained: float  # from the first step to the last
    after: float  # the loss of the run that was not interrupted


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    modes.initial()
    yield
    torch.set_num_threads(before)


def advance_to(end: int, begin: int, model: CharGPT, optimizer: Any) -> None:
    for step in range(begin, end):
        advance(model, optimizer, step, Alone())


def sharded(model: CharGPT, optimizer: Any) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def state_of(model: CharGPT, optimizer: Any) -> State:
    params = dict(model.named_parameters())
    held = optimizer.sharded_state_dict(sharded_model(model))["state"]
    return {
        name: {"fp32_param": params[name].detach().float()}
        | {key: box.data.float().clone() for key, box in state.items()}
        for name, state in held.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    found = {}
    for mode in MODES:
        model, optimizer = build(mode, Alone())
        before = judged(model)
        advance_to(BEFORE, 0, model, optimizer)
        path = tmp_path_factory.mktemp("modes") / "step"
        save(sharded(model, optimizer), path)
        state = state_of(model, optimizer)
        advance_to(AFTER, BEFORE, model, optimizer)
        found[name_of(mode)] = Saved(path, state, before - judged(model), judged(model))
    return found


@pytest.mark.parametrize("into", MODES, ids=name_of)
@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_a_run_saved_in_one_mode_goes_on_in_another(mode: Values, into: Values, saved: dict[str, Saved]) -> None:
    found = saved[name_of(mode)]
    model, optimizer = build(into, Alone())
    optimizer.load_state_dict(load(sharded(model, optimizer), found.path, dtype="cast").state["optimizer"])
    for name, state in state_of(model, optimizer).items():
        want = found.state[name]
        assert torch.equal(state["step"], want["step"])
        assert torch.equal(state["fp32_param"], want["fp32_param"]), name
        for moment in ("exp_avg", "exp_avg_sq"):
            far = MOMENT_ERROR[into["moments"]] * want[moment].abs().max().item()
            torch.testing.assert_close(state[moment], want[moment], rtol=0, atol=far)
    advance_to(AFTER, BEFORE, model, optimizer)
    assert abs(judged(model) - found.after) < DISTANCE * found.gained
