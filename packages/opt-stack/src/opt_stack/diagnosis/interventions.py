"""Detectors of what was done to a run from outside: weights written, numbers of groups changed, state lost.

Each compares recorded numbers with what the step before says that they must be.
"""

import math

import numpy as np
from numpy import ndarray

from opt_stack.diagnosis.history import History, Sentences, change, logs, shifts

ROUNDING = 2e-5  # of a number in a recording, relative
WRITTEN = 1e-3  # share of its norm by which a weight moved without an update
SAME = 1e-5  # relative difference of the norms and sums of equal weights
CHANGED = 1.5  # factor of a number of a group
FAR = 3.0  # factor of a learning rate


def written_weights(history: History) -> Sentences:
    """Find weights that moved further between two records than their updates did, the triangle inequality; after a
    recorded step, also those whose sum is not the sum before plus that of the update."""
    run = history.run
    norms = history.of_params("weight_norm")
    values = np.concatenate([norms, history.of_params("weight_sum")], 1)
    moves = unexplained(history)
    is_moved = moves > WRITTEN
    for at in range(1, len(run)):
        # A program may write weights in every step; all weights at once may follow steps that were not recorded.
        is_new = is_moved[at - 1] & ~is_moved[: at - 1].any(0)
        has_gap = run[at].step > run[at - 1].step + 1
        if not is_new.any() or (has_gap and is_new.mean() > 0.5):
            continue
        sizes = np.where(is_new, moves[at - 1], 0.0)
        first = sizes.argmax()
        is_same = np.isclose(values[: at - 1], values[at], rtol=SAME, atol=0.0).all(1)
        cause = "something other than the optimizer wrote them"
        if is_same.any():
            cause = f"they are those after {run[int(is_same.argmax())].updates} updates, of an earlier checkpoint"
        yield (
            at,
            f"the weights of {history.places(sizes)} were not those that the last update had left "
            f"(norm {norms[at - 1, first]:.4g}, now {norms[at, first]:.4g}): {cause}.",
        )


def unexplained(history: History) -> ndarray:
    """Return by how much each weight moved from one record to the next without an update, relative to its norm."""
    norms = history.of_params("weight_norm")
    sums = history.of_params("weight_sum")
    updates = history.of_params("update_norm")
    counts = [(stats.step, stats.updates) for stats in history.run]
    num_steps = np.diff(counts, axis=0).max(1, initial=1)[:, None]
    is_next = num_steps == 1
    scale = np.maximum(norms[1:], norms[:-1]) + 1e-30
    of_norms = abs(np.diff(norms, axis=0)) - 2 * num_steps * np.maximum(updates[1:], updates[:-1])
    # By sums of elements, whose rounding is larger than that of a small norm.
    sizes = abs(sums)
    moved = abs(np.diff(sums, axis=0) - history.of_params("update_sum")[:-1])
    of_sums = np.where(is_next, moved - ROUNDING * (sizes[1:] + sizes[:-1]), np.nan)
    known: ndarray = np.nan_to_num(np.fmax(of_norms, of_sums) / scale - ROUNDING)
    return known


# --- numbers of groups ------------------------------------------------------------------------------------------------


def changed_settings(history: History) -> Sentences:
    """Find numbers of groups that left their range by a factor in one record, by more than in the records around, and
    not as a schedule does."""
    for (key, group), values in history.settings.items():
        is_average = key.startswith(("beta", "momentum"))  # over 1 / (1 - beta) steps
        levels = np.log(1 - values if is_average else values)
        sizes = abs(np.diff(values, prepend=values[0]))
        for at in range(1, len(values)):
            stats = history.run[at]
            is_resumed = stats is history.resumed
            may_be_schedule = key == "lr" and not is_resumed
            limit = math.log(FAR if may_be_schedule else CHANGED)
            before = levels[at - 1 : at] if is_resumed else levels[:at]
            is_outside = levels[at] > before.max() + limit or levels[at] < before.min() - limit
            around = max([*sizes[max(at - 3, 0) : at], *sizes[at + 1 : at + 3]])
            if not (is_outside and sizes[at] > 3 * around):
                continue
            old = values[at - 1]
            new = values[at]
            factors = [rates[at] / rates[at - 1] for rates in history.rates.values()]
            is_schedule = may_be_schedule and np.nanmin(abs(np.log(factors))) > math.log(CHANGED)
            highest = max(old, 1.01 * stats.settings[group].get("max_lr", 0.0))
            if not (is_schedule and 0 < new < highest):  # it falls at once, or restarts
                yield at, f"the {setting(key, group)} went from {old:g} to {new:g}."


def setting(key: str, group: str) -> str:
    """Return the name of a number of a group."""
    what = "learning rate" if key == "lr" else key
    return f"{what} of group {group!r}" if group else what


def rate_left_behind(history: History) -> Sentences:
    """Find the only group whose rate is constant, while those of all others changed by a factor."""
    rates = history.rates
    still = [group for group, values in rates.items() if np.ptp(values) == 0]
    others = [values for values in rates.values() if values.max() > 2 * values.min()]
    if len(still) == 1 and 0 < len(others) == len(rates) - 1:
        group = still[0]
        first, *_, last = others[0]
        yield (
            int(np.argmax(others[0] != first)),
            f"the learning rate of group {group!r} stayed at {rates[group][0]:g}, while those of the others went from "
            f"{first:g} to {last:g}.",
        )


# --- state ------------------------------------------------------------------------------------------------------------


def lost_state(history: History) -> Sentences:
    """Find where the count of updates fell, or all updates changed at once while rates and gradients did not."""
    counts = history.of_steps("updates")
    for at in (np.flatnonzero(np.diff(counts) < 0) + 1).tolist():
        yield (
            at,
            f"after step {history.run[at - 1].step}, the optimizer had made {counts[at]:g} updates, and "
            f"{counts[at - 1]:g} before: its state was lost, reset or not loaded.",
        )
    rates = logs(np.max([np.ones(len(counts)) * 1e-30, *history.rates.values()], 0))
    updates_over_rates = np.nanmedian(logs(history.of_params("update_norm")), 1) - rates
    norms = logs(history.of_steps("grad_norm"))
    for at, size in shifts(updates_over_rates, math.log(CHANGED) / 2):
        # A gradient or a rate that had changed would explain it.
        moves = [abs(change(norms, near)) for near in range(at - 5, at + 1)]
        rate_range = np.ptp(rates[at - 8 : at + 5])
        if max(moves[-1], rate_range) < abs(size) / 2 and max(moves) < math.log(FAR):
            yield (
                at,
                f"the updates of all parameters became {math.exp(size):.3g} times as large, at the same learning "
                "rates and gradients: the optimizer's state was changed.",
            )
