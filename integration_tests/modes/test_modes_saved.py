"""Saved in any numbers and moments, loaded in any other: main values are bit-equal, moments as near as dtypes allow.

One process; `saving/test_resume.py` changes the number of ranks.
"""

import itertools
from itertools import cycle
from pathlib import Path

import pytest
import torch
from modes import AXES, Values, build, name_of, state_of, train
from parity import sharded_state
from tiers import NIGHT

from opt_checkpoint import load, save

BEFORE, AFTER = 3, 6  # steps until the save, and in all
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
# The same of a main value; 0 in other numbers.
MAIN_ERROR = {"bf16, fp16 mains": 2.0**-11, "bf16, 24-bit mains": 2.0**-16}


@pytest.mark.parametrize(("mode", "into"), PAIRS, ids=name_of)
def test_a_run_saved_in_one_mode_goes_on_in_another(mode: Values, into: Values, tmp_path: Path) -> None:
    net, optimizer = build(mode)
    train(net, optimizer, range(BEFORE))
    save(sharded_state(net, optimizer), tmp_path / "saved")
    saved = state_of(net, optimizer)
    train(net, optimizer, range(BEFORE, AFTER))
    other, resumed = build(into)
    # If the saving run did not scale its loss, dynamic scaling starts from its initial scale.
    strict = "return_missing" if into["numbers"] == "fp16" else "raise_missing"
    loaded = load(sharded_state(other, resumed), tmp_path / "saved", dtype="cast", strict=strict).state
    resumed.load_state_dict(loaded["optimizer"])
    errors = dict.fromkeys(("exp_avg", "exp_avg_sq"), MOMENT_ERROR[into["moments"]])
    errors |= {"fp32_param": MAIN_ERROR.get(into["numbers"], 0.0), "step": 0.0}
    for name, state in state_of(other, resumed).items():
        for key, error in errors.items():
            want = saved[name][key]
            torch.testing.assert_close(state[key], want, rtol=0, atol=error * want.abs().max().item())
    train(other, resumed, range(BEFORE, AFTER))
    last, found = state_of(net, optimizer), state_of(other, resumed)
    for name, state in last.items():
        moved = (state["fp32_param"] - saved[name]["fp32_param"]).abs().max()
        assert (found[name]["fp32_param"] - state["fp32_param"]).abs().max() <= 0.1 * moved, name  # of fp8 moments
