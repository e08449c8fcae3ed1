"""Every combination of modes trains the small GPT as fp32 does, or is refused with a message. Ranks are threads."""

import re
from functools import cache

import pytest
from modes import AXES, REFUSALS, Trained, Values, allocated, distance, every_mode, name_of, train
from tiers import sampled

from opt_config import ConfigError


@cache
def cases(*, refused: bool) -> list[Values]:
    every = [mode for mode in every_mode() if any(refusal.applies(mode) for refusal in REFUSALS) == refused]
    return sampled(every, dict.items)


@cache
def in_fp32(rule: str) -> Trained:
    """The first value of every axis is the plainest."""
    return train({**{axis: next(iter(values)) for axis, values in AXES.items()}, "rule": rule}, ranks=1)


@pytest.mark.nightly  # test_modes_over_worlds.py trains every mode by default
@pytest.mark.parametrize("mode", cases(refused=False), ids=name_of)
def test_a_mode_learns_as_much_as_fp32(mode: Values) -> None:
    plain, found = in_fp32(mode["rule"]), train(mode)
    gained = plain.before - plain.after
    assert gained > 0.3
    assert abs(found.after - plain.after) < distance(mode) * gained
    assert allocated(found.optimizer) == pytest.approx(found.optimizer.plan.state_bytes(), rel=0.01)


@pytest.mark.parametrize("mode", cases(refused=True), ids=name_of)
def test_a_refused_mode_is_refused_in_one_of_its_sentences(mode: Values) -> None:
    with pytest.raises(ConfigError) as caught:
        train(mode, steps=0)
    sentences = [refusal.sentence for refusal in REFUSALS if refusal.applies(mode)]
    assert re.search("|".join(sentences), str(caught.value))


def test_every_refusal_is_among_the_cases() -> None:
    assert all(any(refusal.applies(mode) for mode in cases(refused=True)) for refusal in REFUSALS)
