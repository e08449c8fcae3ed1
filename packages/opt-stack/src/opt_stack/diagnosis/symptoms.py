"""Detectors of what a run shows from inside: gradients, the loss, large updates.

Each compares a series with its own past, or with those of other parameters.
"""

import math
from statistics import median

import numpy as np

from opt_stack.diagnosis.history import JUMP, NUM_BEFORE, History, Run, Sentences, change, logs, place, places, shifts

ALONE = 3.0  # factor over other parameters
GROWN = 10.0  # factor of a loss, or of a gradient norm over the largest before
LARGE_RATIO = 0.1  # update / weight
SILENT = 0.999  # share of zeros


def silent_gradients(history: History) -> Sentences:
    """Find parameters whose gradient is missing or zero from one record to the end, and was not before."""
    zeros = history.of_params("zeros")
    is_alive = (history.of_params("grad_norm") > 0) & (zeros < SILENT)
    begun: dict[int, list[str]] = {}
    for name, alive in zip(history.names, is_alive.T, strict=True):
        at = int(np.flatnonzero(alive).max(initial=-1)) + 1
        num_silent_before = at - alive.sum()
        if 0 < at <= len(alive) - 3 - 3 * num_silent_before:
            begun.setdefault(at, []).append(name)
    for at, names in begun.items():
        text = f"{history.since(at)} the gradient of {places(names)} was zero or missing: frozen, or cut off from "
        yield at, f"{text}the loss."


def scaled_gradients(history: History) -> Sentences:
    """Find where all gradients changed by one factor, and the loss by the same or not at all."""
    losses = np.nan_to_num(logs(history.losses))
    found = list(shifts(history.common_grads, 0.3))
    for at in range(3, len(losses)):
        rise = float(change(losses, at))
        if rise > math.log(GROWN):  # then one record is enough
            found.append((at, rise))
    for at, size in found:
        of_loss = change(losses, at)
        rest_of_loss = min(abs(of_loss), abs(of_loss - size))
        rest_of_grads = abs(change(history.grads, at) - size)
        is_near = rest_of_grads < 0.3 * abs(size) + 0.1
        if is_near.mean() > 0.7 and rest_of_loss < 0.1 * abs(size) + 0.05:
            factor = math.exp(size)
            what = "the loss and all gradients" if abs(of_loss) > abs(size) / 2 else "all gradients"
            text = f"{history.at(at)} {what} became {factor:.3g} times as large by one factor: a sum in place "
            yield at, f"{text}of a mean, another scale of the loss or of its data, or gradients that add up."


def other_data(history: History) -> Sentences:
    """Find where the loss changed at once, in a forward pass before which no update was unusual."""
    losses = history.losses
    updates = np.linalg.norm(np.nan_to_num(history.of_params("update_norm")), axis=1)
    floor = 0.1 * abs(float(np.median(losses)))
    for at, size in shifts(losses, floor):
        before = float(np.median(losses[at - 8 : at]))
        after = before + size
        usual_update = np.median(updates[max(at - NUM_BEFORE, 0) : at - 4])
        is_usual = updates[at - 4 : at].max() <= 2 * usual_update
        is_progress = before / 2 < after < before
        if is_usual and not is_progress:
            text = f"{history.at(at)} the loss went from {before:.4g} to {after:.4g} and stayed there, without an "
            yield at, f"{text}unusual update before: the data, its labels or the forward pass changed."


def one_gradient(history: History) -> Sentences:
    """Find a parameter whose gradient changed at once while those of most others did not."""
    relative = history.grads - history.common_grads[:, None]
    found: dict[int, dict[str, float]] = {}
    for name, values in zip(history.names, relative.T, strict=True):
        for at, size in shifts(values, math.log(ALONE) / 2):
            found.setdefault(at, {})[name] = size
    for at, sizes in found.items():
        names = sorted(sizes, key=lambda name: -abs(sizes[name]))
        largest = sizes[names[0]]
        is_alone = len(names) <= 1 + len(history.names) / 4
        if is_alone and abs(largest) > math.log(ALONE):
            factor = math.exp(largest)
            text = f"{history.at(at)} the gradient of {places(names)} became {factor:.3g} times as large "
            yield at, f"{text}as those of the others, and stayed so."


def added_gradients(history: History) -> Sentences:
    """Find gradients that are never cleared: k that add up have a norm of sqrt(k) to k times that of one."""
    values = history.common_grads
    for at in range(8, len(values) - 8):
        before = values[at - 8 : at]
        room = np.ptp(before) / 2
        is_new = values[at + 7] > before.max() + room
        steps = abs(np.diff(values[at + 2 : at + 8]))
        is_smooth = np.median(steps) < 0.15
        # From one to two, four and eight of them.
        doubled = [np.median(before), *values[[at + 1, at + 3, at + 7]]]
        powers = np.diff(doubled) / math.log(2.0)
        if is_new and is_smooth and powers.min() > 0.2 and powers.max() < 1.5:
            text = f"{history.at(at)} all gradients began to grow with the number of steps: they add up, so zero_grad "
            yield at, f"{text}is not called, or does not clear them."


def repeated_data(history: History) -> Sentences:
    """Find where the loss and all gradients stopped fluctuating, and the loss fell from one record to the next."""
    losses = history.losses
    # How much a value differs from the line between its neighbours; at i that of record i + 1.
    of_loss = abs(np.diff(losses, 2))
    of_grads = np.nanmedian(abs(np.diff(history.grads, 2, axis=0)), 1)
    for at in range(8, len(losses) - 8):
        falling = losses[at : at + 8]
        first = falling[0]
        last = falling[-1]
        earlier = slice(at - 8, at - 1)
        later = slice(at, at + 6)
        usual_grads = np.median(of_grads[earlier])
        is_calm = np.median(of_loss[later]) < 0.25 * np.median(of_loss[earlier])
        are_calm = np.median(of_grads[later]) < 0.5 * usual_grads
        falls = (np.diff(falling) < 0).all() and last < 0.9 * first
        # One batch from the beginning is smooth all along.
        if is_calm and are_calm and falls and usual_grads > 0.1:
            text = f"{history.at(at)} the loss began to fall without fluctuating, from {first:.4g} to {last:.4g}, "
            yield at, f"{text}and the gradients did not fluctuate either: the same data in every step."


def steep_updates(history: History) -> Sentences:
    """Find a large parameter that the first updates of a run change by a large part of it, unlike the others."""
    run = history.run[:5]
    name, ratio, usual = _steepest(run)
    if len(run) > 2 and run[0].updates < 3 and ratio > max(LARGE_RATIO, JUMP * usual):
        text = f"{history.since(0)} an update changed {place(name)} by {ratio:.0%} of its norm, and most others by "
        yield 0, f"{text}{usual:.1%}: its learning rate is too high."


def _steepest(run: Run) -> tuple[str, float, float]:
    """Return the largest update / weight of large parameters, with its name, and the median of all of them. Small
    parameters, which may begin at zero, have large ratios."""
    params = run[-1].params
    most = max(of.numel for of in params.values())
    ratios = {}
    for name in History(run).names:
        if params[name].numel * 10 >= most and run[0].params[name].weight_norm:
            ratios[name] = median(stats.params[name].ratio or 0.0 for stats in run)
    if not ratios:
        return "", 0.0, 0.0  # all of them begin at zero
    steepest = max(ratios, key=ratios.__getitem__)
    return steepest, ratios[steepest], median(ratios.values())


def jump(history: History) -> Sentences:
    """Find gradient norms far above those before them, and whether they and the loss came back."""
    run = history.run
    norms = history.of_steps("grad_norm")
    losses = history.losses
    for at, stats in enumerate(run):
        window = np.arange(max(at - NUM_BEFORE, 0), at)
        before = window[np.isfinite(norms[window])]
        if len(before) < 3:
            continue
        usual = np.median(norms[before])
        if not 0 < JUMP * usual < norms[at] < math.inf:
            continue
        after = norms[at + 1 : at + 4]
        recovers = (after < JUMP / 2 * usual).any()
        is_in_loss = losses[at] > np.nanmax(losses[before])
        factor = ALONE if is_in_loss else GROWN
        if recovers and norms[at] < factor * norms[before].max():
            continue  # small batches are noisy
        squares = np.exp(2 * history.grads[at])
        usual_squares = np.exp(2 * np.nanmedian(history.grads[before], 0))
        growth = np.nan_to_num(squares) - np.nan_to_num(usual_squares)
        where = place(history.names[np.argmax(growth)])
        ratio_to_usual = norms[at] / usual
        text = f"at step {stats.step} the gradient norm was {norms[at]:.3g}, {ratio_to_usual:.3g} times the usual; "
        text += f"it grew most in {where}"
        near = run[max(at - 2, 0) : at + 3]
        around = [other for other in near if other.params.keys() == stats.params.keys()]
        steepest, ratio, _ = _steepest(around)
        old_loss = np.nanmedian(losses[before])
        new_loss = np.nanmedian(losses[at + 4 : at + 14])
        if not len(after):
            text += ", in the last recorded step."
        elif recovers and new_loss > 1.2 * old_loss:
            text += f"; it came back, but the loss went from {old_loss:.3g} to {new_loss:.3g}."
        elif recovers:
            text += ", and it came back in the next steps: a bad batch of data."
        elif ratio > LARGE_RATIO:
            text += f", and it did not come back; around it, an update changed {place(steepest)} by {ratio:.0%} of "
            text += "its norm: the learning rate is too high."
        else:
            text += ", and it did not come back."
        yield at, text
