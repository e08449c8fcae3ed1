"""Detectors of what was done to a run from outside: weights written, numbers of groups changed, state lost.

Each compares recorded numbers with what the step before says that they must be.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.history import History, Sentences, change, logs, places, shifts

ROUNDING = 2e-5  # of a number in a recording, relative
WRITTEN = 1e-3  # share of its norm by which a weight moved without an update
CHANGED = 1.5  # factor of a number of a group
FAR = 3.0  # factor of a learning rate


def written_weights(history: History) -> Sentences:
    """Find weights that moved further between two records than their updates did, the triangle inequality; after a
    recorded step, also those whose sum is not the sum before plus that of the update."""
    run = history.run
    moves = unexplained(history)
    is_moved = moves > WRITTEN
    for at in range(1, len(run)):
        # A program may write weights in every step; all weights at once may follow steps that were not recorded.
        is_new = is_moved[at - 1] & ~is_moved[: at - 1].any(0)
        has_gap = run[at].step > run[at - 1].step + 1
        if not is_new.any() or (has_gap and is_new.mean() > 0.5):
            continue
        largest_first = np.argsort(-moves[at - 1])
        names = [history.names[number] for number in largest_first if is_new[number]]
        then = run[at - 1].params[names[0]].weight_norm
        now = run[at].params[names[0]].weight_norm
        text = f"{history.at(at)} the weights of {places(names)} were not those that the last update had left "
        yield at, f"{text}(norm {then:.4g}, now {now:.4g}): something other than the optimizer wrote them."


def unexplained(history: History) -> ndarray:
    """Return by how much each weight moved from one record to the next without an update, relative to its norm."""
    norms = history.of_params("weight_norm")
    sums = history.of_params("weight_sum")
    updates = history.of_params("update_norm")
    counts = [(stats.step, stats.updates) for stats in history.run]
    num_steps = np.diff(counts, axis=0).max(1)[:, None]
    has_gap = num_steps > 1
    scale = np.maximum(norms[1:], norms[:-1]) + 1e-30
    # By norms.
    largest_update = np.maximum(updates[1:], updates[:-1])
    reach = np.where(has_gap, 2 * num_steps * largest_update, 1.001 * updates[:-1])
    of_norms = abs(np.diff(norms, axis=0)) - reach - ROUNDING * scale
    # By sums of elements.
    moved = np.diff(sums, axis=0) - history.of_params("update_sum")[:-1]
    sizes = abs(sums)
    rounding = ROUNDING * (sizes[1:] + sizes[:-1] + scale)
    of_sums = abs(moved) - rounding
    farthest = np.where(has_gap, of_norms, np.fmax(of_norms, of_sums))
    known: ndarray = np.nan_to_num(farthest / scale)
    return known


# --- numbers of groups ------------------------------------------------------------------------------------------------


def changed_settings(history: History) -> Sentences:
    """Find numbers of groups that changed by a factor in one record, and not as a schedule does."""
    run = history.run
    found: dict[tuple[int, str, str], list[str]] = {}
    for group, numbers in run[-1].settings.items():
        for key in numbers:
            per_step = [stats.settings.get(group, {}).get(key) for stats in run]
            values = np.array(per_step, float)
            for at in _leaps(history, key, values):
                change = f"from {values[at - 1]:g} to {values[at]:g}"
                found.setdefault((at, key, change), []).append(group)
    for (at, key, change), groups in sorted(found.items()):
        is_schedule = key == "lr" and len(groups) == len(run[at].lr)
        if is_schedule and not _is_new_rate(history, at, groups[0]):
            continue  # it restarts
        what = "the learning rate" if key == "lr" else key
        quoted = " and ".join(map(repr, groups))
        where = f" in group {quoted}" if any(groups) else ""
        yield at, f"{history.at(at)} {what} went {change}{where}."


def _leaps(history: History, key: str, values: ndarray) -> Iterator[int]:
    """Yield the records at which a number changed by a factor, and more than in the records around."""
    is_average = key.startswith(("beta", "momentum"))  # over 1 / (1 - beta) steps
    sizes = logs(1 - values if is_average else values)
    steps = abs(np.diff(values))
    for step in np.flatnonzero(steps).tolist():
        at = step + 1
        start = max(step - 3, 0)
        before = steps[start:step]
        after = steps[at : at + 2]
        around = max(before.max(initial=0.0), after.max(initial=0.0))
        is_scheduled = key == "lr" and history.run[at] is not history.resumed
        limit = FAR if is_scheduled else CHANGED
        is_near = abs(sizes[at] - sizes[step]) < math.log(limit)  # not from or to 0, which is NaN
        if not is_near and steps[step] > 3 * around:
            yield at


def _is_new_rate(history: History, at: int, group: str) -> bool:
    """Return whether a rate of all groups is above the largest of its schedule, or rose or began anew at a resume."""
    stats = history.run[at]
    *earlier, new = [stats.lr[group] for stats in history.run[: at + 1]]
    last = earlier[-1]
    if stats is history.resumed:
        return new > last or new < last / FAR
    largest = stats.settings[group].get("max_lr", 0.0)
    return new > FAR * max(earlier) and new > 1.01 * largest


def rate_left_behind(history: History) -> Sentences:
    """Find the only group whose rate is constant, while those of all others changed by a factor."""
    run = history.run
    still = []
    others = []
    for group in run[-1].lr:
        rates = np.array([stats.lr.get(group, math.nan) for stats in run])
        if np.ptp(rates) == 0:
            still.append(group)
        elif rates.max() > 2 * rates.min():
            others.append(rates)
    if len(still) == 1 and 0 < len(others) == len(run[-1].lr) - 1:
        group = still[0]
        first, *_, last = others[0]
        at = int(np.argmax(others[0] != first))
        text = f"{history.since(at)} the learning rate of group {group!r} stayed at {run[at].lr[group]:g}, while "
        yield at, f"{text}those of the others went from {first:g} to {last:g}."


# --- state ------------------------------------------------------------------------------------------------------------


def lost_state(history: History) -> Sentences:
    """Find where the count of updates fell, or all updates changed at once while rates and gradients did not."""
    run = history.run
    for at in range(1, len(run)):
        then = run[at - 1]
        num_updates = run[at].updates
        if num_updates < then.updates:
            text = f"{history.at(at)} after step {then.step}, the optimizer had made {num_updates} updates, and "
            yield at, f"{text}{then.updates} before: its state was lost, reset or not loaded."
    largest_rates = [max(stats.lr.values(), default=1.0) for stats in run]
    rates = logs(np.array(largest_rates))
    updates = logs(history.of_params("update_norm"))
    updates_over_rates = np.nanmedian(updates, 1) - rates
    norms = logs(history.of_steps("grad_norm"))
    grads = np.stack([norms, history.common_grads], 1)
    for at, size in shifts(updates_over_rates, math.log(CHANGED) / 2):
        # A gradient or a rate that had changed would explain it.
        *before, now = [abs(change(grads, near)).max() for near in range(at - 5, at + 1)]
        rate_range = np.ptp(rates[at - 8 : at + 5])
        is_unexplained = max(now, rate_range) < abs(size) / 2
        if is_unexplained and max(before) < math.log(FAR):
            factor = math.exp(size)
            text = f"{history.at(at)} the updates of all parameters became {factor:.3g} times as large, at "
            yield at, f"{text}the same learning rates and gradients: the optimizer's state was changed."
