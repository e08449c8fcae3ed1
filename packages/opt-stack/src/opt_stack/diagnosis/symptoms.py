"""Detectors of what a run shows from inside: gradients, the loss, weights that grow.

Each compares a series with its own past, or with those of other parameters.
"""

import math
import re
from collections.abc import Iterator
from statistics import median

import numpy as np

from opt_stack.diagnosis.history import JUMP, NUM_BEFORE, Finding, History, Run, change, logs, place, places, shifts
from opt_stack.diagnosis.tensor_stats import StepStats

ALONE = 3.0  # factor over other parameters
GROWN = 10.0  # factor of a weight norm over those of its peers, or of a loss
LARGE_RATIO = 0.1  # update / weight
SILENT = 0.999  # share of zeros


def silent_gradients(history: History) -> Iterator[Finding]:
    """Find parameters whose gradient is missing or zero from one record to the end, and was not before."""
    run = history.run
    norms = history.of(lambda stats: stats.grad_norm)
    is_alive = (norms > 0) & (history.of(lambda stats: stats.zeros) < SILENT)
    begun: dict[int, list[str]] = {}
    for name, alive in zip(history.names, is_alive.T, strict=True):
        at = int(np.flatnonzero(alive).max(initial=-1)) + 1
        if 0 < at <= len(run) - 3 - 3 * (at - alive.sum()):
            begun.setdefault(at, []).append(name)
    for at, names in begun.items():
        text = (
            f"from step {run[at].step} on the gradient of {places(names)} was zero or missing: frozen, or cut off from "
        )
        yield Finding(run[at], f"{text}the loss.")


def scaled_gradients(history: History) -> Iterator[Finding]:
    """Find where all gradients changed by one factor, and the loss by the same or not at all."""
    run = history.run
    losses = np.nan_to_num(logs(history.losses))
    found = list(shifts(history.common_grads, 0.3))
    for at in range(3, len(run)):
        if change(losses, at) > math.log(GROWN):  # then one record is enough
            found.append((at, float(change(losses, at))))
    for at, size in found:
        of_loss = change(losses, at)
        is_near = abs(change(history.grads, at) - size) < 0.3 * abs(size) + 0.1
        if is_near.mean() > 0.7 and min(abs(of_loss), abs(of_loss - size)) < 0.1 * abs(size) + 0.05:
            what = "the loss and all gradients" if abs(of_loss) > abs(size) / 2 else "all gradients"
            text = (
                f"{history.at(at)} {what} became {math.exp(size):.3g} times as large by one factor: a sum in "
                "place of a mean, another scale of the loss or of its data, or gradients that add up."
            )
            yield Finding(run[at], text)


def other_data(history: History) -> Iterator[Finding]:
    """Find where the loss changed at once, in a forward pass before which no update was unusual."""
    run = history.run
    losses = history.losses
    updates = np.linalg.norm(np.nan_to_num(history.of(lambda stats: stats.update_norm)), axis=1)
    for at, size in shifts(losses, 0.1 * abs(float(np.median(losses)))):
        before = float(np.median(losses[at - 8 : at]))
        is_usual = updates[at - 4 : at].max() <= 2 * np.median(updates[max(at - NUM_BEFORE, 0) : at - 4])
        if is_usual and not before / 2 < before + size < before:
            text = (
                f"{history.at(at)} the loss went from {before:.4g} to {before + size:.4g} and stayed "
                "there, without an unusual update before: the data, its labels or the forward pass changed."
            )
            yield Finding(run[at], text)


def one_gradient(history: History) -> Iterator[Finding]:
    """Find a parameter whose gradient changed at once while those of most others did not."""
    run = history.run
    relative = history.grads - history.common_grads[:, None]
    found: dict[int, list[tuple[float, str]]] = {}
    for name, values in zip(history.names, relative.T, strict=True):
        for at, size in shifts(values, math.log(ALONE) / 2):
            found.setdefault(at, []).append((size, name))
    for at, sizes in found.items():
        sizes.sort(key=lambda entry: -abs(entry[0]))
        if abs(sizes[0][0]) > math.log(ALONE) and len(sizes) <= 1 + relative.shape[1] / 4:
            text = f"{history.at(at)} the gradient of {places([name for _, name in sizes])} became "
            yield Finding(
                run[at], f"{text}{math.exp(sizes[0][0]):.3g} times as large as those of the others, and stayed so."
            )


def added_gradients(history: History) -> Iterator[Finding]:
    """Find gradients that are never cleared: k that add up have a norm of sqrt(k) to k times that of one."""
    values = history.common_grads
    for at in range(8, len(values) - 8):
        before = values[at - 8 : at]
        # From one to two, four and eight of them.
        powers = np.diff([np.median(before), values[at + 1], values[at + 3], values[at + 7]]) / math.log(2.0)
        is_new = values[at + 7] > before.max() + np.ptp(before) / 2
        is_smooth = np.median(abs(np.diff(values[at + 2 : at + 8]))) < 0.15
        if is_new and is_smooth and powers.min() > 0.2 and powers.max() < 1.5:
            text = (
                f"{history.at(at)} all gradients began to grow with the number of steps: they add up, so "
                "zero_grad is not called, or does not clear them."
            )
            yield Finding(history.run[at], text)


def repeated_data(history: History) -> Iterator[Finding]:
    """Find where the loss and all gradients stopped to fluctuate, and the loss fell from one record to the next."""
    losses = history.losses
    # How much a value differs from the line between its neighbours; at i that of record i + 1.
    of_loss = abs(np.diff(losses, 2))
    of_grads = np.nanmedian(abs(np.diff(history.grads, 2, axis=0)), 1)
    for at in range(8, len(losses) - 8):
        after = losses[at : at + 8]
        before = np.median(of_loss[at - 8 : at - 1]), np.median(of_grads[at - 8 : at - 1])
        is_calm = (
            np.median(of_loss[at : at + 6]) < 0.25 * before[0] and np.median(of_grads[at : at + 6]) < 0.5 * before[1]
        )
        # One batch from the beginning is smooth all along.
        if is_calm and before[1] > 0.1 and (np.diff(after) < 0).all() and after[-1] < 0.9 * after[0]:
            text = (
                f"{history.at(at)} the loss began to fall without fluctuating, from {after[0]:.4g} to {after[-1]:.4g}, "
                "and the gradients did not fluctuate either: the same data in every step."
            )
            yield Finding(history.run[at], text)


def growing_weights(history: History) -> Iterator[Finding]:
    """Find a weight whose norm changed, over 10, 30 or 100 records, by a factor that those of its kind in other layers,
    or of most others if it has none, did not."""
    run = history.run
    norms = history.of(lambda stats: stats.weight_norm)
    weights = logs(norms)
    rms = norms / np.sqrt([run[-1].params[name].numel for name in history.names])
    kinds = np.array([re.sub(r"\d+", "*", name) for name in history.names])
    for column, name in enumerate(history.names):
        kind = kinds == kinds[column]
        peers = kind if kind.sum() > 2 else kinds == kinds
        for num in {min(num, len(run) - 1) for num in (10, 30, 99)}:
            sizes = weights[num:] - weights[:-num]
            own = abs(sizes[:, column])
            apart = abs(sizes[:, column] - np.median(sizes[:, peers], 1))
            # Biases, which begin near zero, grow in healthy runs.
            was_large = rms[:-num, column] > np.median(rms[-1]) / 3
            is_huge = rms[num:, column] > JUMP * np.median(rms[-1])
            hits = np.flatnonzero((was_large | is_huge) & (np.minimum(own, apart) > math.log(GROWN)))
            if len(hits):
                last = hits[0] + num
                at = hits[0] + int(np.argmax(abs(np.diff(norms[hits[0] : last + 1, column]))))
                text = (
                    f"from step {run[at].step} on the norm of {place(name)} went from {norms[at, column]:.3g} to "
                    f"{norms[last, column]:.3g} at step {run[last].step}, unlike those of its peers."
                )
                yield Finding(run[at], text)


def steep_updates(history: History) -> Iterator[Finding]:
    """Find a large parameter that the first updates of a run change by a large part of it, unlike the others."""
    run = history.run[:5]
    ratios = _ratios(run)
    steepest = max(ratios, key=ratios.__getitem__)
    if len(run) > 2 and run[0].updates < 3 and ratios[steepest] > max(LARGE_RATIO, JUMP * median(ratios.values())):
        text = (
            f"from step {run[0].step} on an update changed {place(steepest)} by {ratios[steepest]:.0%} of its "
            f"norm, and most others by {median(ratios.values()):.1%}: its learning rate is too high."
        )
        yield Finding(run[0], text)


def _ratios(run: Run) -> dict[str, float]:
    """Return update / weight of the largest parameters. Small ones, which may begin at zero, have large ratios."""
    most = max(of.numel for of in run[-1].params.values())
    found = {}
    for name in History(run).names:
        ratios = [stats.params[name].ratio or 0.0 for stats in run]
        if run[-1].params[name].numel * 10 >= most and run[0].params[name].weight_norm:
            found[name] = median(ratios)
    return found


def jump(history: History) -> Iterator[Finding]:
    """Find the first gradient norm far above those before it, and whether it and the loss came back."""
    run = history.run
    for at, stats in enumerate(run):
        window = run[max(at - NUM_BEFORE, 0) : at]
        before = [earlier for earlier in window if math.isfinite(earlier.grad_norm)]
        norms = [earlier.grad_norm for earlier in before]
        usual = median(norms) if len(norms) >= 3 else 0.0
        if not usual or not JUMP * usual < stats.grad_norm < math.inf:
            continue
        after = run[at + 1 :]
        recovers = any(later.grad_norm < JUMP / 2 * usual for later in after[:3])
        losses = [earlier.loss for earlier in before if earlier.loss is not None]
        is_in_loss = bool(losses) and stats.loss is not None and stats.loss > max(losses)
        if recovers and stats.grad_norm < (ALONE if is_in_loss else GROWN) * max(norms):
            continue  # small batches are noisy
        where = place(max(stats.params, key=lambda name: _growth(name, before, stats)))
        text = f"at step {stats.step} the gradient norm was {stats.grad_norm:.3g}, {stats.grad_norm / usual:.3g} times"
        text += f" the usual; it grew most in {where}"
        ratios = _ratios([near for near in run[max(at - 2, 0) : at + 3] if near.params.keys() == stats.params.keys()])
        steepest = max(ratios, key=ratios.__getitem__)
        later_losses = [later.loss for later in after[3:13] if later.loss is not None]
        if not after:
            text += ", in the last recorded step."
        elif recovers and losses and later_losses and median(later_losses) > 1.2 * median(losses):
            text += f"; it came back, but the loss went from {median(losses):.3g} to {median(later_losses):.3g}."
        elif recovers:
            text += ", and it came back in the next steps: a bad batch of data."
        elif ratios[steepest] > LARGE_RATIO:
            text += f", and it did not come back; around it, an update changed {place(steepest)} by "
            text += f"{ratios[steepest]:.0%} of its norm: the learning rate is too high."
        else:
            text += ", and it did not come back."
        yield Finding(stats, text)


def _growth(name: str, before: Run, stats: StepStats) -> float:
    present = (earlier.params[name].grad_norm for earlier in before if name in earlier.params)
    norms = [norm for norm in present if norm]
    usual = median(norms) if norms else 0.0
    now = stats.params[name].grad_norm or 0.0
    return now**2 - usual**2
