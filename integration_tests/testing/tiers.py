"""The two tiers: the default run samples large grids, `pytest --nightly` runs everything that there is, whole."""

import itertools
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")
NIGHT = "--nightly" in sys.argv or "OPT_NIGHTLY" in os.environ
if NIGHT:
    os.environ["OPT_NIGHTLY"] = "1"  # for the workers of xdist, which have other arguments
SEED = int(os.environ.get("OPT_SEED", "5"))  # of samples; printed where a test fails


def sampled(cases: Sequence[T], values: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Return cases that hold every two values that occur together in any case; at night, all cases."""
    return list(cases) if NIGHT else covering(cases, values, strength=2)


def in_turn(first: Iterable[T], second: Sequence[U]) -> list[tuple[T, U]]:
    """Return each of the first with one of the second, which take turns; at night, all pairs."""
    return list(itertools.product(first, second) if NIGHT else zip(first, itertools.cycle(second)))


def covering(cases: Sequence[T], values: Callable[[T], Iterable[Hashable]], *, strength: int) -> list[T]:
    """Return cases in which every `strength` values occur together that do so in any case.

    Each is the best of a few cases that hold a combination not yet covered, the rarest first. `values` returns those of
    a case, each with the name of its axis.
    """
    draw = random.Random(SEED)
    combinations_of = [list(itertools.combinations(values(case), strength)) for case in cases]
    cases_of: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for at, combinations in enumerate(combinations_of):
        for combination in combinations:
            cases_of[combination].append(at)
    left = set(cases_of)
    chosen = []
    for combination in sorted(cases_of, key=lambda combination: len(cases_of[combination])):
        if combination in left:
            of_it = cases_of[combination]
            tried = draw.sample(of_it, min(len(of_it), 40))
            best = max(tried, key=lambda at: len(left.intersection(combinations_of[at])))
            chosen.append(cases[best])
            left.difference_update(combinations_of[best])
    return chosen
