"""Covering selection: a small subset of cases that holds every pair, triple, ... of values occurring in any case."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def covering(cases: Sequence[T], values: Callable[[T], Iterable[Hashable]], *, strength: int) -> list[T]:
    """Choose cases until every `strength` values that occur together in any case do so in a chosen one.

    Each is the best of a few cases that hold a combination not yet covered, the rarest first. `values` returns those of
    a case, each with the name of its axis.
    """
    draw = random.Random(5)
    held = [list(itertools.combinations(values(case), strength)) for case in cases]
    cases_of: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for at, combinations in enumerate(held):
        for combination in combinations:
            cases_of[combination].append(at)
    left, chosen = set(cases_of), []
    for combination in sorted(cases_of, key=lambda combination: len(cases_of[combination])):
        if combination in left:
            of_it = cases_of[combination]
            tried = draw.sample(of_it, min(len(of_it), 40))
            best = max(tried, key=lambda at: sum(one in left for one in held[at]))
            chosen.append(cases[best])
            left.difference_update(held[best])
    return chosen
