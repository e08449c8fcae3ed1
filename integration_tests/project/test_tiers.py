"""Samples of grids hold every pair of values."""

import itertools

import pytest
from tiers import covering


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_sample_holds_every_combination_of_values(strength: int) -> None:
    cases = [case for case in itertools.product(range(3), "abcd", (True, False), range(5)) if case[0] != case[3]]

    def combinations(some: list[tuple[object, ...]]) -> set[object]:
        return {chosen for case in some for chosen in itertools.combinations(enumerate(case), strength)}

    chosen = covering(cases, enumerate, strength=strength)
    assert combinations(chosen) == combinations(cases)
    assert len(chosen) <= len(cases) / 2
