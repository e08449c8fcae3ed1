"""Every mode at 1 to 4 ranks, wrapped or not, is planned or refused as `REFUSALS` says. Nothing is trained.

Every 41st of the 63,360 combinations here, all at night.
"""

import re

import pytest
from modes import AXES, name_of
from modes_over_worlds import FREE, every_combination, refusals, verdict
from parity import Wrapping
from tiers import NIGHT

NOT_CLIPPED = [case for case in every_combination() if case["clipping"] == FREE]  # clipping refuses nothing
CASES = NOT_CLIPPED if NIGHT else NOT_CLIPPED[::41]


@pytest.mark.parametrize("wrapping", [way.value for way in Wrapping])
@pytest.mark.parametrize("rule", AXES["rule"])
def test_a_mode_is_planned_or_refused_with_an_expected_sentence(rule: str, wrapping: str) -> None:
    cases = [case for case in CASES if (case["rule"], case["wrapping"]) == (rule, wrapping)]
    assert {bool(refusals(case)) for case in cases} == {True, False}
    for case in cases:
        message, expected = verdict(case), refusals(case)
        is_expected = any(re.search(one, message) for one in expected) if expected else message == ""
        assert is_expected, f"{name_of(case)}: {message or 'not refused'}"
