"""Saved in any mode, loaded in any other: main values are bit-equal, moments as near as dtypes allow.

One process; `test_resume*.py` change the number of ranks.
"""

import itertools
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from char_gpt import CharGPT
from modes import AXES, Values, advance, build, distance, judged, name_of
from tiers import NIGHT
from torch import Tensor

from opt_checkpoint import load, save, sharded_model
from opt_distributed.comm import Alone

BEFORE, AFTER = 6, 12  # steps until the save, and in all
# Every value of both axes occurs, so that each is loaded into each.
MODES = [
    {"rule": "adam", "numbers": numbers, "moments": moments, "sharding": "replicated", "placement": "device"}
    for numbers, moments in zip(AXES["numbers"], cycle(AXES["moments"]), strict=False)
]
# By default each mode is saved, and loaded in another.
PAIRS = list(itertools.product(MODES, MODES)) if NIGHT else list(zip(MODES, MODES[1:] + MODES[:1], strict=True))

# How far a moment may be from the saved one, as a fraction of its tensor's largest value: half a step of the dtype,
# and twice that where the root of a second moment is kept.
MOMENT_ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "scaled fp16": 2.0**-10, "scaled fp8": 2.0**-3}
MAIN_ERROR = {
    "bf16, fp16 mains": 2.0**-11,
    "bf16, 24-bit mains": 2.0**-16,
}  # the same of a main value; 0 in other numbers

State = dict[str, dict[str, Tensor]]  # by parameter and key, in fp32


class Saved(NamedTuple):
    path: Path
    state: State
    gained: float  # from the first step to the last
    after: float  # the loss of the run that was not interrupted


def advance_to(end: int, begin: int, model: CharGPT, optimizer: Any) -> float:
    """The loss after these steps."""
    for step in range(begin, end):
        advance(model, optimizer, step, Alone())
    return judged(model)


def sharded(model: CharGPT, optimizer: Any) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def state_of(model: CharGPT, optimizer: Any) -> State:
    params, held = dict(model.named_parameters()), sharded(model, optimizer)["optimizer"]["state"]
    return {
        name: {"fp32_param": params[name].detach().float().clone()}
        | {key: box.data.float().clone() for key, box in state.items()}
        for name, state in held.items()
    }


@cache
def saved_run(mode: tuple[tuple[str, str], ...], folder: Path) -> Saved:
    model, optimizer = build(dict(mode), Alone())
    before = judged(model)
    advance_to(BEFORE, 0, model, optimizer)
    path = folder / name_of(dict(mode))
    save(sharded(model, optimizer), path)
    state, after = state_of(model, optimizer), advance_to(AFTER, BEFORE, model, optimizer)
    return Saved(path, state, before - after, after)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modes")


@pytest.mark.parametrize(("mode", "into"), PAIRS, ids=lambda mode: name_of(mode))
def test_a_run_saved_in_one_mode_goes_on_in_another(mode: Values, into: Values, folder: Path) -> None:
    found = saved_run(tuple(mode.items()), folder)
    model, optimizer = build(into, Alone())
    # If the saving run did not scale its loss, dynamic scaling starts from its initial scale.
    strict = "return_missing" if into["numbers"] == "fp16" else "raise_missing"
    loaded = load(sharded(model, optimizer), found.path, dtype="cast", strict=strict).state
    optimizer.load_state_dict(loaded["optimizer"])
    for name, state in state_of(model, optimizer).items():
        want = found.state[name]
        assert torch.equal(state["step"], want["step"])
        errors = dict.fromkeys(("exp_avg", "exp_avg_sq"), MOMENT_ERROR[into["moments"]])
        for key, error in {"fp32_param": MAIN_ERROR.get(into["numbers"], 0.0), **errors}.items():
            far = error * want[key].abs().max().item()
            torch.testing.assert_close(state[key], want[key], rtol=0, atol=far)
    assert abs(advance_to(AFTER, BEFORE, model, optimizer) - found.after) < distance(into) * found.gained
