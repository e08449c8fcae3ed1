"""Detectors that compare ranks with one another."""

import math
from itertools import combinations

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.history import History, Sentences, change, shifts

APART = 3.0  # factor by which a rank's norm leaves that of its replicas
EQUAL = 1e-5  # relative difference of norms of the same data


def ranks_apart(history: History) -> Sentences:
    """Find a rank whose gradient left those of its replicas, to stay; of two, the one whose own norm changed most."""
    norms = _norms(history)
    found = []
    for rank, values in norms.items():
        peers = [norms[peer] for peer in norms if peer != rank and _are_replicas(history, peer, rank)]
        if not peers:
            continue
        ratios = values - np.median(peers, 0)
        for at, size in shifts(ratios, math.log(APART)):
            total = abs(size) + abs(float(change(values, at)))
            found.append((-total, rank, at, math.exp(ratios[at])))
    for _, rank, at, ratio in sorted(found)[:1]:
        text = f"{history.at(at)} the gradient of rank {rank}, before the mean, was {ratio:.3g} times that of its "
        yield at, f"{text}replicas, and stayed so: check its data and its hardware."


def equal_ranks(history: History) -> Sentences:
    """Find replicas whose gradients are equal in every record from one on: they compute the same data."""
    norms = _norms(history)
    for one, other in combinations(norms, 2):
        differing = np.flatnonzero(abs(norms[one] - norms[other]) > EQUAL)
        begun = int(differing.max(initial=-1)) + 1
        if _are_replicas(history, one, other) and len(history.run) - begun >= 3:
            text = f"{history.since(begun)} ranks {one} and {other} had the same gradients before the mean over ranks: "
            yield begun, f"{text}they get the same data."


def _norms(history: History) -> dict[int, ndarray]:
    """Return the logarithms of the norms of each rank that was measured."""
    found = {}
    for rank in history.run[-1].rank_norms:
        norms = np.array([stats.rank_norms.get(rank) for stats in history.run], float)
        values = np.log(np.maximum(norms, 1e-30))
        if np.isfinite(values[1:]).all():
            found[rank] = values
    return found


def _are_replicas(history: History, one: int, other: int) -> bool:
    replicas_of = history.run[-1].replicas_of
    return replicas_of[one] == replicas_of[other]
