"""Every combination of modes moves main values as fp32 does, or is refused with a message. One process."""

import pytest
from modes import REFUSALS, Values, allocated, build, every_mode, name_of, plain, refused, state_of, train
from tiers import sampled

from opt_config import ConfigError

STEPS = 3
REFUSED = sampled([mode for mode in every_mode() if refused(mode)], dict.items)
TRAINED = sampled([mode for mode in every_mode() if not refused(mode)], dict.items)
# How far an update is from that of fp32 moments, as a fraction of it; and a main value, which is rounded in each step.
MOMENTS = {"fp32": 0.0, "bf16": 2.0**-8, "scaled fp16": 2.0**-10, "scaled fp8": 2.0**-4}
MAINS = {"bf16, fp16 mains": 2.0**-11, "bf16, 24-bit mains": 2.0**-16}


@pytest.mark.parametrize("mode", TRAINED, ids=name_of)
def test_main_values_move_as_in_fp32(mode: Values) -> None:
    net, optimizer = build(mode)
    start = {name: state["fp32_param"] for name, state in state_of(net, optimizer).items()}
    wide_net, wide = build(plain(mode), start)
    for of in ((net, optimizer), (wide_net, wide)):
        train(*of, range(STEPS))
    found, expected = state_of(net, optimizer), state_of(wide_net, wide)
    for name, before in start.items():
        want, got = expected[name]["fp32_param"], found[name]["fp32_param"]
        moved = (want - before).abs().max()
        assert moved > 0, name
        far = MOMENTS[mode["moments"]] * moved + STEPS * MAINS.get(mode["numbers"], 0.0) * want.abs().max()
        assert (got - want).abs().max() <= far + 1e-4 * moved, name
    assert allocated(optimizer) == pytest.approx(optimizer.plan.state_bytes(), rel=0.01)


@pytest.mark.parametrize("mode", REFUSED, ids=name_of)
def test_a_refused_mode_is_refused_in_one_of_its_sentences(mode: Values) -> None:
    with pytest.raises(ConfigError, match="|".join(refused(mode))):
        build(mode)


def test_every_refusal_is_among_the_cases() -> None:
    assert all(any(refusal.applies(mode) for mode in REFUSED) for refusal in REFUSALS)
