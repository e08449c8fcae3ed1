"""Detectors that compare ranks with one another."""

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.history import Finding, History, change, shifts

APART = 3.0  # factor by which a rank's norm leaves that of its replicas
EQUAL = 1e-5  # relative difference of norms of the same data


def ranks_apart(history: History) -> Iterator[Finding]:
    """Find a rank whose gradient left those of its replicas, to stay; of two, the one whose own norm changed most."""
    run = history.run
    norms = _norms(history)
    found = []
    for rank, values in norms.items():
        peers = [norms[peer] for peer in norms if peer != rank and _are_replicas(history, peer, rank)]
        ratios = values - np.median(peers or [values], 0)
        for at, size in shifts(ratios, math.log(APART)):
            found.append((-abs(size) - abs(change(values, at)), rank, at, math.exp(ratios[at])))
    for _, rank, at, ratio in sorted(found)[:1]:
        text = (
            f"at step {run[at].step} the gradient of rank {rank}, before the mean, was {ratio:.3g} times that of its "
        )
        yield Finding(run[at], f"{text}replicas, and stayed so: check its data and its hardware.")


def equal_ranks(history: History) -> Iterator[Finding]:
    """Find replicas whose gradients are equal in every record from one on: they compute the same data."""
    run = history.run
    norms = _norms(history)
    for one, other in combinations(norms, 2):
        begun = int(np.flatnonzero(abs(norms[one] - norms[other]) > EQUAL).max(initial=-1)) + 1
        if _are_replicas(history, one, other) and len(run) - begun >= 3:
            text = (
                f"from step {run[begun].step} on ranks {one} and {other} had the same gradients before the mean "
                "over ranks: they get the same data."
            )
            yield Finding(run[begun], text)


def _norms(history: History) -> dict[int, ndarray]:
    """Return the logarithms of the norms of each rank that was measured."""
    found = {}
    for rank in history.run[-1].rank_norms:
        norms = np.array([stats.rank_norms.get(rank) for stats in history.run], float)
        found[rank] = np.log(np.maximum(norms, 1e-30))
    return {rank: values for rank, values in found.items() if np.isfinite(values[1:]).all()}


def _are_replicas(history: History, one: int, other: int) -> bool:
    replicas_of = history.run[-1].replicas_of
    return replicas_of[one] == replicas_of[other]
