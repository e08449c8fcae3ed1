"""`why`: say in sentences what changed first in a recording, between two recordings, or between two checkpoints."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple
from warnings import catch_warnings

import numpy as np

from opt_checkpoint import read_index
from opt_scheduler.draw import svg_plot, text_plot
from opt_stack.diagnosis import interventions, ranks, skips, symptoms
from opt_stack.diagnosis.history import Detector, Finding, History, Run, place
from opt_stack.diagnosis.interventions import WRITTEN, unexplained
from opt_stack.diagnosis.lines import from_line
from opt_stack.diagnosis.recorder import FOLDER
from opt_stack.diagnosis.tensor_stats import StepStats

# Relative differences of norms.
SAME = 1e-5  # at most: equal weights
OTHER = 1e-3  # at least: different weights
MAX_SHOWN = 20  # tensors of checkpoints that differ


class Recording(NamedTuple):
    """The records of a run, and the first steps that raised an error, with it."""

    run: Run
    refused: Sequence[tuple[int, str]]


class Diagnosis:
    """The findings, the first cause first. `str()` shows them with a plot in characters, notebooks with
    a drawing."""

    def __init__(self, head: str, findings: Sequence[Finding], run: Run = ()):
        self.head = head
        self.run = run
        self.findings = findings

    def __str__(self) -> str:
        lines = [self.head, *(fill(text, 100, subsequent_indent="  ") for text in self._sentences())]
        if self.run:
            norms = [stats.grad_norm for stats in self.run]
            title = f"log10 of the gradient norm, steps {self.run[0].step} to {self.run[-1].step}:"
            width = min(len(norms) + 1, 72)
            plot = text_plot([_logarithm(norms)], steps=max(len(norms) - 1, 1), width=width, height=8)
            lines += ["", title, plot]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape  # takes long to import

        lines = [self.head, *self._sentences()]
        paragraphs = [f"<p>{escape(line)}</p>" for line in lines]
        return "".join([*paragraphs, self.svg()])

    def _sentences(self) -> list[str]:
        if not self.findings:
            return ["Nothing unusual was found."] if self.run else []
        first, *others = self.findings
        return [f"First: {first.text}", *(f"Then: {finding.text}" for finding in others)]

    def svg(self) -> str:
        """Draw the gradient norm (blue) and the model's update/weight (yellow) as base-10 logarithms."""
        if not self.run:
            return ""
        norms = _logarithm([stats.grad_norm for stats in self.run])
        ratios = _logarithm([_ratio(stats) for stats in self.run])
        return svg_plot([norms, ratios], steps=max(len(self.run) - 1, 1))


def why(directory: str | Path, other: str | Path | None = None) -> Diagnosis:
    """Say what changed first in a recording, where, on which rank, and at which step.

    Args:
        directory: a directory with recordings (`stats_every(directory=)`), of which the newest is read, and compared
            with the one before it; or a file of JSON lines.
        other: another one, to compare the newest recordings of both. If neither holds recordings, both are checkpoints,
            whose tensors are compared by name.

    Raises:
        FileNotFoundError: there is no recording.
        ValueError: a recording cannot be read, or only one of the two is a recording.
        CheckpointingException: a checkpoint cannot be read.
    """
    runs = read_recordings(directory)
    if other is None:
        if not runs:
            raise FileNotFoundError(
                f"{directory} holds no recording; call optimizer.stats_every(1, directory={str(directory)!r})"
            )
        last = runs[-1]
        given = list(skips.refused_steps(last.refused, last.run))
        before = runs[-2].run if len(runs) > 1 else ()
        history = _joined(before, last.run)
        if last.run and last.run[0].updates:
            given += _between(before, last.run)
        return Diagnosis(_head(directory, last), find(history, given), last.run)
    others = read_recordings(other)
    if not runs and not others:
        return _between_checkpoints(directory, other)
    if not runs or not others:
        raise ValueError(f"{other if runs else directory} holds no recording, but the other directory does")
    first = runs[-1]
    last = others[-1]
    given = [*_between(first.run, last.run), *skips.refused_steps(last.refused, last.run)]
    return Diagnosis(f"{_head(directory, first)}\n{_head(other, last)}", find(History(last.run), given), last.run)


def read_recordings(directory: str | Path) -> list[Recording]:
    """Return the recordings in a directory, oldest first; those of one run once, from the rank that has most steps."""
    path = Path(directory)
    if path.is_file():
        runs = [_read(path)]
    else:
        numbered = [folder for folder in (path / FOLDER).glob("*") if folder.name.isdecimal()]
        numbered.sort(key=lambda folder: int(folder.name))
        runs = []
        for folder in numbered:
            of_ranks = [_read(file) for file in sorted(folder.glob("rank*.jsonl"))]
            runs += sorted(of_ranks, key=lambda recording: -len(recording.run))[:1]
    return [recording for recording in runs if recording.run or recording.refused]


def _read(path: Path) -> Recording:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # the process was killed while it wrote
        run = [stats for line in lines if (stats := from_line(line)) is not None]
        head = json.loads(lines[0]) if lines else {}
        return Recording(run, head.get("refused", []))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recording: {error!r}") from error


# --- one recording ----------------------------------------------------------------------------------------------------

PROOFS: Sequence[Detector] = (
    interventions.written_weights,
    interventions.changed_settings,
    interventions.rate_left_behind,
    ranks.ranks_apart,
    ranks.equal_ranks,
    symptoms.silent_gradients,
)
SYMPTOMS: Sequence[Detector] = (
    skips.skipped_steps,
    symptoms.scaled_gradients,
    symptoms.other_data,
    symptoms.one_gradient,
    interventions.lost_state,
    symptoms.added_gradients,
    symptoms.repeated_data,
    symptoms.steep_updates,
    symptoms.jump,
)
"""All detectors, in the order of precedence: the earliest finding is the cause; of several in one record, the first
detector's.

First what records prove; then what a step computes, in its order: the loss, gradients, state and weights; last what any
of them leads to."""
OF_ALL_STEPS = (skips.skipped_steps, symptoms.jump)  # others see the records of steps that made an update
MAX_FINDINGS = 3


def find(history: History, given: Iterable[Finding] = ()) -> list[Finding]:
    """Return the first cause, and at most two later findings. Those `given` come before those of the detectors."""
    order = {id(stats): at for at, stats in enumerate(history.run)}
    start = order.get(id(history.resumed), 0)

    def position(finding: Finding) -> int:
        return order.get(id(finding.record), len(order))

    applied = History([stats for stats in history.run if stats.success], history.resumed)
    found = list(given)
    for detector in (*PROOFS, *SYMPTOMS):
        seen = history if detector in OF_ALL_STEPS else applied
        if not seen.run or not seen.names:
            continue
        with catch_warnings(action="ignore", category=RuntimeWarning), np.errstate(all="ignore"):  # of NaN
            findings = [Finding(seen.run[at], text) for at, text in detector(seen)]
        new = [finding for finding in findings if position(finding) >= start]
        new.sort(key=position)
        found += new[:1]
    found.sort(key=position)  # keeps the order of one record
    return found[:MAX_FINDINGS]


# --- two recordings, two checkpoints ----------------------------------------------------------------------------------


def _joined(first: Run, second: Run) -> History:
    """Return the records of a run after those of the run before it, if it continues that one: with parameters of the
    same names, from its updates, or without them, from its weights."""
    if not first or not second or first[-1].params.keys().isdisjoint(second[0].params):
        return History(second)
    last = first[-1]
    start = second[0]
    before = [stats for stats in first if stats.updates < start.updates]
    if start.updates == 0 and last.params.keys() == start.params.keys():
        moved = unexplained(History([last, start]))
        if (moved < WRITTEN).all():
            before = list(first)
    return History([*before, *second], start if before else None)


def _between(first: Run, second: Run) -> Iterator[Finding]:
    """Find the first difference between two runs, matched by the number of updates."""
    if not first or not second:
        return
    start = second[0].updates
    matches = [stats.updates for stats in first if _weights_match(stats, second[0])]
    if matches and start not in matches and start > 0:
        text = f"the second run begins after {start} updates with the weights that the first had after {matches[-1]}: "
        yield Finding(second[0], f"{text}weights and optimizer state come from different checkpoints.")
    known = {stats.updates: stats for stats in first if stats.success}
    for stats in second:
        then = known.get(stats.updates)
        difference = _difference(then, stats) if then is not None and stats.success else None
        if difference is not None:
            where = f"after {stats.updates} updates (step {stats.step} of the second run)"
            yield Finding(stats, f"{where} the {difference}.")
            return


def _difference(then: StepStats, now: StepStats) -> str | None:
    """Return the first number that differs, in the order of the model; None if all are the same."""
    for group, lr in now.lr.items():
        if then.lr.get(group, lr) != lr:
            return f"learning rate of group {group!r} is {lr:g}, and was {then.lr[group]:g}"
    for kind in ("weight_norm", "grad_norm", "update_norm"):
        for name in (name for name in now.params if name in then.params):
            old = getattr(then.params[name], kind)
            new = getattr(now.params[name], kind)
            if None not in (old, new) and not math.isclose(old, new, rel_tol=OTHER, abs_tol=1e-12):
                return f"{kind.replace('_', ' ')} of {place(name)} is {new:.4g}, and was {old:.4g}"
    return None


def _weights_match(one: StepStats, other: StepStats) -> bool:
    shared = one.params.keys() & other.params.keys()
    for name in shared:
        ours = one.params[name].weight_norm
        theirs = other.params[name].weight_norm
        if not math.isclose(ours, theirs, rel_tol=SAME):
            return False
    return bool(shared)


def _between_checkpoints(first: str | Path, second: str | Path) -> Diagnosis:
    from opt_checkpoint import differences  # imports `convert`, which training does not need

    one = read_index(first)
    two = read_index(second)
    found = sorted(differences(one, two), key=lambda difference: "NaN" not in difference.text)
    num_tensors = len(one.tensors.keys() | two.tensors.keys())
    num_nan = sum("NaN" in difference.text for difference in found)
    lines = [f"{first} and {second}: {len(found)} of {num_tensors} tensors differ, {num_nan} of them in NaN"]
    lines += [f"{key}: {text}" for key, text in found[:MAX_SHOWN]]
    if len(found) > MAX_SHOWN:
        lines.append(f"... and {len(found) - MAX_SHOWN} more")
    return Diagnosis("\n".join(lines), [])


# --- words and numbers ------------------------------------------------------------------------------------------------


def _head(directory: str | Path, recording: Recording) -> str:
    run = recording.run
    skipped = sum(not stats.success for stats in run)
    refused = f", {len(recording.refused)} refused" if recording.refused else ""
    steps = f", {run[0].step} to {run[-1].step}" if run else ""
    return f"{directory}: {len(run)} recorded steps{steps}, {skipped} of them skipped{refused}"


def _ratio(stats: StepStats) -> float:
    update = math.hypot(*(of.update_norm or 0.0 for of in stats.groups.values()))
    weight = math.hypot(*(of.weight_norm for of in stats.groups.values()))
    return update / weight if weight else 0.0


def _logarithm(values: Sequence[float]) -> Callable[[float], float]:
    """Return the logarithm by position; NaN and infinite values are above the others."""
    known = [math.log10(value) for value in values if 0 < value < math.inf] or [0.0]
    logs = []
    for value in values:
        if 0 < value < math.inf:
            logs.append(math.log10(value))
        else:
            logs.append(max(known) + 1 if value else min(known))
    return lambda x: logs[min(round(x), len(logs) - 1)]
