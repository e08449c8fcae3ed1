"""Pairwise selection: a small subset of cases that covers every pair of values occurring in any case."""

import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pairwise(cases: Sequence[T], values: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Chosen greedily, the one with most new pairs first. `values` gives those of a case, each with its name."""
    order = random.Random(5).sample(list(cases), len(cases))
    pairs = [set(itertools.combinations(values(case), 2)) for case in order]
    left = set().union(*pairs)
    chosen: list[T] = []
    while left:
        best = max(range(len(order)), key=lambda at: len(left & pairs[at]))
        chosen.append(order[best])
        left -= pairs[best]
    return chosen
