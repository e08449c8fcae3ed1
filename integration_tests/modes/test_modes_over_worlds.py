"""Every mode at 1 to 4 ranks, wrapped or not: the weights of one process. Ranks are threads.

Pairs of values here; `OPT_MODES=full` for every combination.
"""

import itertools
import os
import random
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
import torch
from modes import Values, name_of
from modes_over_worlds import Distance, Trained, alone, every_case, is_exact, train
from pairs import pairwise

ALL = list(every_case())
SOME = random.Random(5).sample(ALL, 3000)  # they hold every pair; choosing among all takes seconds
CASES = ALL if os.environ.get("OPT_MODES") == "full" else pairwise(SOME, dict.items)


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
        if is_exact(case):
            assert all(torch.equal(codes, expected.codes[name]) for name, codes in found.codes.items())


def test_every_mode_moves_every_weight() -> None:
    """Otherwise a comparison of weights would show nothing."""
    for case in CASES[::10]:
        first, last = (train({**alone(case), "clipping": case["clipping"]}, steps=steps)[0] for steps in (0, 3))
        assert all(not torch.equal(first.weights[name], last.weights[name]) for name in first.weights)


def test_the_default_cases_hold_every_legal_pair_of_values() -> None:
    def pairs(cases: Iterable[Values]) -> set[Any]:
        return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}

    assert pairs(pairwise(SOME, dict.items)) == pairs(ALL)
