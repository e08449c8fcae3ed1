"""Detectors of steps that made no update: skipped ones, and those that raised an error."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from opt_distributed.step import BAD_LOSS, OVERFLOW
from opt_stack.diagnosis.history import Finding, History, Run, Sentences
from opt_stack.diagnosis.tensor_stats import StepStats, fault, non_finite

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
    for _, in_a_row in groupby(run, _kind):
        skipped = list(in_a_row)
        stats = skipped[0]
        reason = stats.reason
        after = run[at + len(skipped) :]
        if reason == OVERFLOW and (stats.overflowed or not _finds_its_scale(run[:at], skipped, after)):
            yield at, _sentence(skipped, after)
        elif reason == BAD_LOSS:
            yield at, f"a {reason} skipped the step: the loss was {stats.loss:.4g}; look at its batch of data."
        elif reason not in ("", OVERFLOW) and stats.grad_norms:
            largest = max(stats.grad_norms, key=stats.grad_norms.__getitem__)
            yield (
                at,
                f"a {reason} skipped the step: the gradient norm was {stats.grad_norm:.4g}, most in {largest!r}; look "
                "at its batch of data.",
            )
        at += len(skipped)


def _kind(stats: StepStats) -> str:
    """Why a step was skipped. A loss that is not finite is an overflow too, of the forward pass."""
    is_infinite = stats.reason == BAD_LOSS and not math.isfinite(stats.loss or 0.0)
    return OVERFLOW if is_infinite else stats.reason


def _finds_its_scale(before: Run, skipped: Run, after: Run) -> bool:
    """Return whether only the scaled loss overflowed: the loss was finite, and the next step was applied, with a scale
    not far below the last one that fitted."""
    first = skipped[0]
    losses = [stats.loss or 0.0 for stats in skipped]
    weights = [of.weight_norm for of in first.params.values()]
    fitted = [stats.loss_scale for stats in before if stats.success]
    lowest = fitted[-1] / FITS if fitted else 1.0
    # The recording may end before the first applied step.
    last = after[0] if after else skipped[-1]
    is_known = bool(after) or not fitted
    are_finite = all(map(math.isfinite, losses + weights))
    return is_known and are_finite and first.loss_scale > 1 and last.loss_scale > lowest


def _sentence(skipped: Sequence[StepStats], after: Run) -> str:
    stats = skipped[0]
    were = "s were" if len(skipped) > 1 else " was"
    text = f"backward gave {fault(stats.grad_norm, stats)}; {len(skipped)} step{were} skipped"
    if stats.overflowed:
        text = f"the forward pass overflowed first in layer {stats.overflowed!r}; {text}"
    bad_weights = non_finite({name: of.weight_norm for name, of in stats.params.items()})
    if bad_weights:
        return f"{text}; the weights of {bad_weights[0]!r} were not finite before: go back to a checkpoint before it."
    if stats.loss_scale > 1:
        text += f" with loss scale {stats.loss_scale:g} to {skipped[-1].loss_scale:g}: it overflowed in fp16"
        if not any(later.success for later in after):
            text += ", and lower scales did not help: the forward overflows, so use bf16, or smaller activations there"
        return f"{text}."
    if after and after[0].success:
        return f"{text}, and the next was applied: a bad batch of data."
    if after:
        return f"{text}."
    return f"{text}, to the end: NaN in the data or the forward pass."
