"""Detectors that compare ranks with one another."""

import math
from itertools import combinations

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.history import History, Sentences, change, last_begun, shifts

APART = 3.0  # factor by which a rank's norm leaves that of its replicas
EQUAL = 1e-5  # relative difference of norms of the same data


def ranks_apart(history: History) -> Sentences:
    """Find a rank whose gradient left those of its replicas, to stay; of two, the one whose own norm changed most."""
    found = []
    for norms in _replicas(history):
        for rank, values in norms.items() if len(norms) > 1 else ():
            peers = [norms[peer] for peer in norms if peer != rank]  # (peers, records)
            ratios = values - np.median(peers, 0)  # (records,)
            for at, shift in shifts(ratios, math.log(APART)):
                total = abs(shift) + abs(change(values, at))
                found.append((total, rank, at, math.exp(ratios[at])))
    if found:
        _, rank, at, ratio = max(found)
        yield (
            at,
            f"the gradient of rank {rank}, before the mean, was {ratio:.3g} times that of its "
            "replicas, and stayed so: check its data and its hardware.",
        )


def equal_ranks(history: History) -> Sentences:
    """Find replicas whose gradients are equal in every record from one on: they compute the same data."""
    for norms in _replicas(history):
        for one, other in combinations(norms, 2):
            at = last_begun(abs(norms[one] - norms[other]) < EQUAL)
            if len(history.run) - at >= 3:
                yield (
                    at,
                    f"ranks {one} and {other} had the same gradients before the mean over ranks: "
                    "they get the same data.",
                )


def _replicas(history: History) -> list[dict[int, ndarray]]:
    """Return the logarithms of each measured rank's norms, (records,), by rank, for each set of replicas."""
    found: dict[int, dict[int, ndarray]] = {}
    for rank, first in history.run[-1].replicas_of.items():
        norms = np.array([stats.rank_norms.get(rank) for stats in history.run], float)  # (records,), NaN if unknown
        values = np.log(np.maximum(norms, 1e-30))
        if np.isfinite(values[1:]).all():
            found.setdefault(first, {})[rank] = values
    return list(found.values())
