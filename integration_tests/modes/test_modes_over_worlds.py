"""Every mode at 1 to 4 ranks, wrapped or not: the weights of one process, and the planned bytes. Ranks are threads.

Cases that hold every pair of values; at night every four values.
"""

import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from modes import Values, name_of
from modes_over_worlds import Distance, Trained, alone, every_case, is_exact, train
from tiers import NIGHT, covering

ALL = list(every_case())
STRENGTH = 4 if NIGHT else 2
CASES = covering(ALL, dict.items, strength=STRENGTH)


@cache
def by_one_process(mode: tuple[tuple[str, str], ...]) -> Trained:
    return train(dict(mode))[0]


def assert_near(case: Values, found: Trained, expected: Trained) -> None:
    allowed = Distance.of(case)
    for name, want in expected.weights.items():
        torch.testing.assert_close(found.weights[name], want, rtol=allowed.rtol, atol=allowed.atol)
    far = [(found.weights[name] - want).abs().flatten() for name, want in expected.weights.items()]
    assert torch.cat(far).mean() <= allowed.mean
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_rank_has_the_weights_of_one_process(case: Values) -> None:
    expected = by_one_process(tuple(alone(case).items()))
    for found in train(case):
        assert_near(case, found, expected)
        assert found.held_bytes == pytest.approx(found.planned_bytes, rel=0.01)
        if is_exact(case):
            assert all(torch.equal(codes, expected.codes[name]) for name, codes in found.codes.items())


def test_every_mode_moves_every_weight() -> None:
    """Otherwise a comparison of weights would show nothing."""
    for case in CASES[::10]:
        first, last = (train({**alone(case), "clipping": case["clipping"]}, steps=steps)[0] for steps in (0, 3))
        assert all(not torch.equal(first.weights[name], last.weights[name]) for name in first.weights)


def test_the_cases_hold_all_legal_values_that_occur_together() -> None:
    def combinations(cases: Iterable[Values]) -> set[Any]:
        return {chosen for case in cases for chosen in itertools.combinations(case.items(), STRENGTH)}

    assert combinations(CASES) == combinations(ALL)
