"""Detectors of what was done to a run from outside: weights written, numbers of groups changed, state lost.

Each compares recorded numbers with what the step before says that they must be.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.history import Finding, History, change, logs, places, shifts

ROUNDING = 2e-5  # of a number in a recording, relative
WRITTEN = 1e-3  # share of its norm by which a weight moved without an update
CHANGED = 1.5  # factor of a number of a group
FAR = 3.0  # factor of a learning rate


def written_weights(history: History) -> Iterator[Finding]:
    """Find weights that moved further between two records than their updates did, the triangle inequality; after a
    recorded step, also those whose sum is not the sum before plus that of the update."""
    run = history.run
    excess = unexplained(history)
    is_moved = excess > WRITTEN
    for at in range(1, len(run)):
        # A program may write weights in every step; all weights at once may follow steps that were not recorded.
        is_new = is_moved[at - 1] & ~is_moved[: at - 1].any(0)
        if not is_new.any() or (is_new.mean() > 0.5 and run[at].step > run[at - 1].step + 1):
            continue
        order = np.argsort(np.where(is_new, -excess[at - 1], math.inf))
        names = [history.names[number] for number in order[: is_new.sum()]]
        then, now = (stats.params[names[0]].weight_norm for stats in run[at - 1 : at + 1])
        text = (
            f"{history.at(at)} the weights of {places(names)} were not those that the last update had left (norm "
            f"{then:.4g}, now {now:.4g}): something other than the optimizer wrote them."
        )
        yield Finding(run[at], text)


def unexplained(history: History) -> ndarray:
    """Return by how much each weight moved from one record to the next without an update, relative to its norm."""
    norms = history.of(lambda stats: stats.weight_norm)
    sums = history.of(lambda stats: stats.weight_sum)
    updates = history.of(lambda stats: stats.update_norm)
    moved_sums = history.of(lambda stats: stats.update_sum)
    scale = np.maximum(norms[1:], norms[:-1]) + 1e-30
    rounding = ROUNDING * (abs(sums[1:]) + abs(sums[:-1]) + scale)
    of_sums = abs(np.diff(sums, axis=0) - moved_sums[:-1]) - rounding
    num_steps = np.diff([(stats.step, stats.updates) for stats in history.run], axis=0).max(1)[:, None]
    farthest = np.where(num_steps > 1, 2 * num_steps * np.maximum(updates[1:], updates[:-1]), 1.001 * updates[:-1])
    of_norms = abs(np.diff(norms, axis=0)) - farthest - ROUNDING * scale
    excess = np.where(num_steps > 1, of_norms, np.fmax(of_norms, of_sums)) / scale
    known: ndarray = np.nan_to_num(excess)
    return known


# --- numbers of groups ------------------------------------------------------------------------------------------------


def changed_settings(history: History) -> Iterator[Finding]:
    """Find numbers of groups that changed by a factor in one record, and not as a schedule does."""
    run = history.run
    found: dict[tuple[int, str], list[str]] = {}
    for group, numbers in run[-1].settings.items():
        for key in numbers:
            values = np.array([stats.settings.get(group, {}).get(key) for stats in run], float)
            steps = abs(np.diff(values))
            # An average is over 1 / (1 - beta) steps.
            sizes = logs(1 - values if key.startswith(("beta", "momentum")) else values)
            for at in (np.flatnonzero(steps) + 1).tolist():
                around = np.delete(steps[max(at - 4, 0) : at + 2], min(at - 1, 3))
                limit = FAR if key == "lr" and run[at] is not history.resumed else CHANGED
                is_far = not abs(sizes[at] - sizes[at - 1]) < math.log(limit)  # from or to 0, too
                if is_far and steps[at - 1] > 3 * around.max(initial=0.0):
                    text = f"{key} went from {values[at - 1]:g} to {values[at]:g}"
                    found.setdefault((at, text), []).append(group)
    for (at, text), groups in sorted(found.items()):
        if text.startswith("lr ") and len(groups) == len(run[at].lr) and not _is_new_rate(history, at, groups[0]):
            continue  # a schedule that restarts
        what = text.removeprefix("lr ")
        where = f" in group {' and '.join(map(repr, groups))}" if any(groups) else ""
        yield Finding(run[at], f"{history.at(at)} {'the learning rate ' * (what != text)}{what}{where}.")


def _is_new_rate(history: History, at: int, group: str) -> bool:
    """Return whether a rate of all groups is above the largest of its schedule, or rose or began anew at a resume."""
    *earlier, new = [stats.lr[group] for stats in history.run[: at + 1]]
    if history.run[at] is history.resumed:
        return new > earlier[-1] or new < earlier[-1] / FAR
    return new > FAR * max(earlier) and new > 1.01 * history.run[at].settings[group].get("max_lr", 0.0)


def rate_left_behind(history: History) -> Iterator[Finding]:
    """Find the only group whose rate is constant, while those of all others changed by a factor."""
    run = history.run
    groups = list(run[-1].lr)
    rates = np.array([[stats.lr.get(group, math.nan) for group in groups] for stats in run])
    is_still = np.ptp(rates, 0) == 0
    if is_still.sum() == 1 and len(groups) > 1 and (rates.max(0) > 2 * rates.min(0)).sum() == len(groups) - 1:
        still = int(np.argmax(is_still))
        others = rates[:, still - 1]
        at = int(np.argmax(others != others[0]))
        text = (
            f"from step {run[at].step} on the learning rate of group {groups[still]!r} stayed at "
            f"{rates[0, still]:g}, while those of the others went from {others[0]:g} to {others[-1]:g}."
        )
        yield Finding(run[at], text)


# --- state ------------------------------------------------------------------------------------------------------------


def lost_state(history: History) -> Iterator[Finding]:
    """Find where the count of updates fell, or all updates changed at once while rates and gradients did not."""
    run = history.run
    for at, (before, after) in enumerate(pairwise(run), 1):
        if after.updates < before.updates:
            text = (
                f"{history.at(at)} after step {before.step}, the optimizer had made {after.updates} "
                f"updates, and {before.updates} before: its state was lost or not loaded."
            )
            yield Finding(after, text)
    rates = np.array([max(stats.lr.values(), default=1.0) for stats in run])
    updates = np.nanmedian(logs(history.of(lambda stats: stats.update_norm)), 1) - logs(rates)
    norms = logs(np.array([stats.grad_norm for stats in run]))
    for at, size in shifts(updates, math.log(CHANGED) / 2):
        # A gradient or a rate that had changed would explain it.
        grads = np.stack([norms, history.common_grads], 1)
        spike = max(abs(change(grads, near)).max() for near in range(at - 5, at))
        moved = max(abs(change(grads, at)).max(), np.ptp(logs(rates)[at - 8 : at + 5]))
        if spike < math.log(FAR) and moved < abs(size) / 2:
            text = (
                f"{history.at(at)} the updates of all parameters became {math.exp(size):.3g} times as large, at the "
                "same learning rates and gradients: the optimizer's state was changed."
            )
            yield Finding(run[at], text)
