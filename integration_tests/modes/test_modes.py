"""Every combination of modes moves main values as fp32 does, or is refused with a message; saved in any numbers and
moments, it goes on in any other. One process; `saving/test_resume.py` changes the number of ranks."""

import itertools
from itertools import cycle
from pathlib import Path

import pytest
import torch
from modes import AXES, REFUSALS, Values, allocated, build, every_mode, name_of, plain, refused, state_of, train
from parity import sharded_state
from tiers import NIGHT, sampled

from opt_checkpoint import load, save
from opt_config import ConfigError

BEFORE, AFTER = 3, 6  # steps until the save, and in all
REFUSED = sampled([mode for mode in every_mode() if refused(mode)], dict.items)
TRAINED = sampled([mode for mode in every_mode() if not refused(mode)], dict.items)
# How far an update is from that of fp32 moments, as a fraction of it; and a main value, which is rounded in each step.
MOMENTS = {"fp32": 0.0, "bf16": 2.0**-8, "scaled fp16": 2.0**-10, "scaled fp8": 2.0**-4}
MAINS = {"bf16, fp16 mains": 2.0**-11, "bf16, 24-bit mains": 2.0**-16}
# How far a loaded moment may be from the saved one, as a fraction of its tensor's largest value: half a step of the
# dtype, and twice that where the root of a second moment is kept.
LOADED = MOMENTS | {"scaled fp8": 2.0**-3}
# Every value of both axes occurs, so that each is loaded into each; by default, each mode is loaded into one other.
MODES = [
    {"rule": "adam", "numbers": numbers, "moments": moments, "sharding": "replicated", "placement": "device"}
    for numbers, moments in zip(AXES["numbers"], cycle(AXES["moments"]), strict=False)
]
PAIRS = list(itertools.product(MODES, MODES)) if NIGHT else list(zip(MODES, MODES[1:] + MODES[:1], strict=True))


@pytest.mark.parametrize("mode", TRAINED, ids=name_of)
def test_main_values_move_as_in_fp32(mode: Values) -> None:
    net, optimizer = build(mode)
    start = {name: state["fp32_param"] for name, state in state_of(net, optimizer).items()}
    wide_net, wide = build(plain(mode), start)
    for of in ((net, optimizer), (wide_net, wide)):
        train(*of, range(BEFORE))
    found, expected = state_of(net, optimizer), state_of(wide_net, wide)
    for name, before in start.items():
        want, got = expected[name]["fp32_param"], found[name]["fp32_param"]
        moved = (want - before).abs().max()
        assert moved > 0, name
        far = MOMENTS[mode["moments"]] * moved + BEFORE * MAINS.get(mode["numbers"], 0.0) * want.abs().max()
        assert (got - want).abs().max() <= far + 1e-4 * moved, name
    assert allocated(optimizer) == pytest.approx(optimizer.plan.state_bytes(), rel=0.01)


@pytest.mark.parametrize("mode", REFUSED, ids=name_of)
def test_a_refused_mode_is_refused_in_one_of_its_sentences(mode: Values) -> None:
    with pytest.raises(ConfigError, match="|".join(refused(mode))):
        build(mode)


def test_every_refusal_is_among_the_cases() -> None:
    assert all(any(refusal.applies(mode) for mode in REFUSED) for refusal in REFUSALS)


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
    errors = dict.fromkeys(("exp_avg", "exp_avg_sq"), LOADED[into["moments"]])
    errors |= {"fp32_param": MAINS.get(into["numbers"], 0.0), "step": 0.0}
    for name, state in state_of(other, resumed).items():
        for key, error in errors.items():
            want = saved[name][key]
            torch.testing.assert_close(state[key], want, rtol=0, atol=error * want.abs().max().item())
    train(other, resumed, range(BEFORE, AFTER))
    last, found = state_of(net, optimizer), state_of(other, resumed)
    for name, state in last.items():
        moved = (state["fp32_param"] - saved[name]["fp32_param"]).abs().max()
        assert (found[name]["fp32_param"] - state["fp32_param"]).abs().max() <= 0.1 * moved, name  # of fp8 moments
