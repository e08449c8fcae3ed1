"""Detectors of what a run shows from inside: gradients, the loss, large updates.

Each compares a series with its own past, or with those of other parameters.
"""

import math

import numpy as np

from opt_stack.diagnosis.history import JUMP, NUM_BEFORE, History, Sentences, change, last_begun, logs, shifts

ALONE = 3.0  # factor over other parameters
GROWN = 10.0  # factor of a loss, or of a gradient norm over the largest before
LARGE_RATIO = 0.1  # update / weight
SILENT = 0.999  # share of zeros


def silent_gradients(history: History) -> Sentences:
    """Find parameters whose gradient is missing or zero from one record to the end, and was not before."""
    is_alive = (history.of_params("grad_norm") > 0) & (history.of_params("zeros") < SILENT)
    begun = np.array([last_begun(~alive) for alive in is_alive.T])
    num_silent_before = begun - is_alive.sum(0)
    is_cut_off = (begun > 0) & (begun <= len(is_alive) - 3 - 3 * num_silent_before)
    for at in np.unique(begun[is_cut_off]).tolist():
        # The last of them is the nearest to where the model is cut.
        is_last = np.arange(1, len(begun) + 1) * (is_cut_off & (begun == at))
        yield (
            at,
            f"the gradient of {history.places(is_last)} was zero or missing: frozen, or cut off from the loss.",
        )


def added_gradients(history: History) -> Sentences:
    """Find gradients that are never cleared: k that add up have a norm of sqrt(k) to k times that of one."""
    values = history.common_grads
    logs_of_counts = np.log(np.arange(3, 11))
    for at in range(8, len(values) - 9):
        growth = values[at + 2 : at + 10] - np.median(values[at - 8 : at])
        powers = growth / logs_of_counts
        if powers.min() > 0.4 and np.ptp(powers) < 0.3:
            yield (
                at,
                "all gradients began to grow with the number of steps: they add up, so zero_grad is not called, or "
                "does not clear them.",
            )


def scaled_gradients(history: History) -> Sentences:
    """Find where all gradients changed by one factor, and the loss by the same or not at all."""
    losses = np.nan_to_num(logs(history.losses))
    rises = [(at, 1) for at in range(3, len(losses)) if change(losses, at) > math.log(GROWN)]  # one record is enough
    lasting = [(at, 5) for at, _ in shifts(history.common_grads, 0.3)]
    for at, num in rises + lasting:
        of_loss = change(losses, at, num)
        of_grads = change(history.grads, at, num)
        size = float(np.nanmedian(of_grads))
        rest_of_loss = min(abs(of_loss), abs(of_loss - size))
        is_near = abs(of_grads - size) < 0.3 * abs(size) + 0.1
        if is_near.mean() > 0.7 and rest_of_loss < 0.2 * abs(size) + 0.05:
            what = "the loss and all gradients" if abs(of_loss) > abs(size) / 2 else "all gradients"
            yield (
                at,
                f"{what} became {math.exp(size):.3g} times as large by one factor: a sum in place of a mean, another "
                "scale of the loss or of its data, or gradients that add up.",
            )


def other_data(history: History) -> Sentences:
    """Find where the loss changed at once, in a forward pass before which no update was unusual."""
    losses = history.losses
    updates = np.linalg.norm(np.nan_to_num(history.of_params("update_norm")), axis=1)
    floor = 0.1 * abs(float(np.median(losses)))
    for at, size in shifts(losses, floor):
        before = np.median(losses[at - 8 : at])
        after = before + size
        is_usual = updates[at - 4 : at].max() <= 2 * np.median(updates[max(at - NUM_BEFORE, 0) : at - 4])
        is_progress = before / 2 < after < before
        if is_usual and not is_progress:
            yield (
                at,
                f"the loss went from {before:.4g} to {after:.4g} and stayed there, without an unusual update before: "
                "the data, its labels or the forward pass changed.",
            )


def one_gradient(history: History) -> Sentences:
    """Find a parameter whose gradient changed at once while those of most others did not."""
    relative = history.grads - history.common_grads[:, None]
    for at, sizes in shifts(relative, math.log(ALONE) / 2):
        largest = max(sizes, key=abs)
        is_alone = np.count_nonzero(sizes) <= 1 + len(sizes) / 4
        if is_alone and abs(largest) > math.log(ALONE):
            yield (
                at,
                f"the gradient of {history.places(sizes)} became {math.exp(largest):.3g} times as large as those of "
                "the others, and stayed so.",
            )


def repeated_data(history: History) -> Sentences:
    """Find where the loss and all gradients stopped fluctuating, and the loss fell from one record to the next."""
    losses = history.losses
    # How much a value differs from the line between its neighbours; at i that of record i + 1.
    of_grads = np.nanmedian(abs(np.diff(history.grads, 2, axis=0)), 1)
    for at in range(8, len(losses) - 8):
        falling = losses[at : at + 8]
        falls = (np.diff(falling) < 0).all() and falling[-1] < 0.9 * falling[0]
        usual = np.median(of_grads[at - 8 : at - 1])
        if falls and 2 * np.median(of_grads[at : at + 6]) < usual:
            yield (
                at,
                f"the loss began to fall without fluctuating, from {falling[0]:.4g} to "
                f"{falling[-1]:.4g}, and the gradients did not fluctuate either: the same data in every step.",
            )


def steep_updates(history: History) -> Sentences:
    """Find a large parameter that the first updates of a run change by a large part of it, unlike the others."""
    name, ratio, usual = _steepest(history, 0, 5)
    is_first = len(history.run) > 2 and history.run[0].updates < 3
    if is_first and ratio > LARGE_RATIO and (ratio > 1 or ratio > JUMP * usual):
        yield (
            0,
            f"an update changed {name!r} by {ratio:.0%} of its norm, and most others by {usual:.1%}: the learning rate "
            "is too high.",
        )


def _steepest(history: History, start: int, end: int) -> tuple[str, float, float]:
    """Return the largest update / weight of large parameters in some records, with its name, and the median of all of
    them. Small parameters, which may begin at zero, have large ratios."""
    weights = history.of_params("weight_norm")[start:end]
    updates = np.nan_to_num(history.of_params("update_norm")[start:end])
    numels = history.of_params("numel")[-1]
    is_large = (10 * numels >= numels.max()) & (weights[0] > 0)
    ratios = np.where(is_large, np.median(updates / weights, 0), -1.0)
    steepest = int(ratios.argmax())
    return history.names[steepest], ratios[steepest], np.median(ratios[is_large])


def jump(history: History) -> Sentences:
    """Find gradient norms far above those before them, and whether they and the loss came back."""
    norms = history.of_steps("grad_norm")
    norms[np.isinf(norms)] = np.nan
    losses = history.losses
    for at in range(3, len(norms)):
        window = slice(max(at - NUM_BEFORE, 0), at)
        usual = np.nanmedian(norms[window])
        if not 0 < JUMP * usual < norms[at]:
            continue
        after = norms[at + 1 : at + 4]
        recovers = (after < JUMP / 2 * usual).any()
        is_in_loss = losses[at] > np.nanmax(losses[window])
        if recovers and norms[at] < (ALONE if is_in_loss else GROWN) * np.nanmax(norms[window]):
            continue  # small batches are noisy
        text = (
            f"the gradient norm was {norms[at]:.3g}, {norms[at] / usual:.3g} times the usual, most of it in "
            f"{history.names[np.nan_to_num(history.grads[at], nan=-np.inf).argmax()]!r}"
        )
        steepest, ratio, _ = _steepest(history, max(at - 2, 0), at + 3)
        old_loss = np.nanmedian(losses[window])
        new_loss = np.nanmedian(losses[at + 4 : at + 14])
        if not len(after):
            text += ", in the last recorded step."
        elif recovers and new_loss > 1.2 * old_loss:
            text += f"; it came back, but the loss went from {old_loss:.3g} to {new_loss:.3g}."
        elif recovers:
            text += ", and it came back in the next steps: a bad batch of data."
        elif ratio > LARGE_RATIO:
            text += (
                f", and it did not come back; around it, an update changed {steepest!r} by {ratio:.0%} of its norm: "
                f"the learning rate is too high."
            )
        else:
            text += ", and it did not come back."
        yield at, text
