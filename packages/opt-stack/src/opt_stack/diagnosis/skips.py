"""Detectors of steps that made no update: skipped ones, and those that raised an error."""

import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import median

from opt_stack.diagnosis.history import JUMP, NUM_BEFORE, Finding, History, Run, Sentences, place
from opt_stack.diagnosis.recorder import ranks_text
from opt_stack.diagnosis.tensor_stats import OVERFLOW, StepStats, non_finite

FITS = 4.0  # factor by which a dynamic loss scale may fall below one that fitted


def refused_steps(refused: Sequence[tuple[int, str]], run: Run) -> Iterator[Finding]:
    """Find the first step that raised an error, and say whether the run ended there."""
    for step, error in refused[:1]:
        later = next((stats for stats in run if stats.step >= step), None)
        end = "" if later else ", and the run ended there"
        yield Finding(later, f"step {step} was refused with an error{end}: {error[:300].removesuffix('.')}.")


def skipped_steps(history: History) -> Sentences:
    """Find the first skipped steps, except where a dynamic loss scale finds its level."""
    run = history.run
    at = 0
    while at < len(run):
        stats = run[at]
        skipped = list(takewhile(lambda later: not later.success, run[at:]))
        if stats.reason == OVERFLOW and not _finds_its_scale(run, at, skipped):
            yield at, _sentence(run, at, skipped)
        elif stats.reason not in ("", OVERFLOW) and stats.grad_norms:
            where = place(max(stats.grad_norms, key=stats.grad_norms.__getitem__))
            text = f"step {stats.step} was skipped for a {stats.reason}: the gradient norm was {stats.grad_norm:.4g}, "
            yield at, f"{text}most in {where}; look at its batch of data."
        at += max(len(skipped), 1)


def _finds_its_scale(run: Run, at: int, skipped: Sequence[StepStats]) -> bool:
    """Return whether only the scaled loss overflowed from record `at` on: the loss was finite, and the next step was
    applied, with a scale not far below the last one that fitted."""
    first = skipped[0]
    losses = [stats.loss or 0.0 for stats in skipped]
    weights = [of.weight_norm for of in first.params.values()]
    are_finite = all(map(math.isfinite, losses + weights))
    fitted = [stats.loss_scale for stats in run[:at] if stats.success]
    lowest = fitted[-1] / FITS if fitted else 1.0
    end = at + len(skipped)
    # The recording may end before the first applied step.
    scale = 0.0 if fitted else skipped[-1].loss_scale
    if end < len(run):
        scale = run[end].loss_scale
    return first.loss_scale > 1 and are_finite and scale > lowest


def _sentence(run: Run, at: int, skipped: Sequence[StepStats]) -> str:
    stats = skipped[0]
    norms = stats.grad_norms
    wrong = non_finite(norms)
    what = "NaN" if any(math.isnan(norms[name]) for name in wrong) else "infinite"
    if len(wrong) == len(norms) > 1:
        text = f"at step {stats.step} all gradients were {what}, so the loss or its forward pass was"
    else:
        # Backward spreads a NaN to the parameters before it in the model.
        where = place(wrong[-1]) if wrong else "a copy on another rank"
        text = f"at step {stats.step} the gradient of {where} was {what}"
        if len(wrong) > 1:
            text += f", and those of {len(wrong) - 1} parameters before it in the model, to which backward spread it"
    ranks = non_finite(stats.rank_norms)
    if ranks:
        only = "only " if len(ranks) < len(stats.rank_norms) else ""
        text += f"; {only}on {ranks_text(ranks)} before the mean over ranks"
    were = "s were" if len(skipped) > 1 else " was"
    text += f"; {len(skipped)} step{were} skipped"
    recovers = at + len(skipped) < len(run)
    before = [earlier.grad_norm for earlier in run[max(at - NUM_BEFORE, 0) : at]]
    bad_weights = non_finite({name: of.weight_norm for name, of in stats.params.items()})
    if bad_weights:
        weights = place(bad_weights[0])
        return f"{text}; the weights of {weights} were not finite before the step: go back to a checkpoint before it."
    if stats.loss_scale > 1:
        last = skipped[-1].loss_scale
        text += f" with loss scale {stats.loss_scale:g}"
        if last != stats.loss_scale:
            text += f" to {last:g}"
        text += ": it overflowed in fp16"
        if not recovers:
            text += ", and lower scales did not help: the forward overflows, so use bf16, or smaller activations there"
        return f"{text}."
    if recovers:
        return f"{text}, and the next was applied: a bad batch of data."
    if before and before[-1] > JUMP * median(before):
        return f"{text}, to the end: the gradients had grown in the steps before."
    return f"{text}, to the end: NaN in the data or the forward pass{' of that rank' if ranks else ''}."
