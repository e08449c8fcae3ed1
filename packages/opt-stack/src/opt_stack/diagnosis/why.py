"""`why`: say in sentences what changed first in a recording, between two recordings, or between two checkpoints."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import NamedTuple
from warnings import catch_warnings

import numpy as np
from numpy import ndarray

from opt_checkpoint import read_index
from opt_scheduler.draw import svg_plot, text_plot
from opt_stack.diagnosis.history import Finding, History, Run
from opt_stack.diagnosis.interventions import (
    WRITTEN,
    changed_settings,
    lost_state,
    rate_left_behind,
    setting,
    unexplained,
    written_weights,
)
from opt_stack.diagnosis.lines import from_line
from opt_stack.diagnosis.ranks import equal_ranks, ranks_apart
from opt_stack.diagnosis.recorder import FOLDER
from opt_stack.diagnosis.skips import refused_steps, skipped_steps
from opt_stack.diagnosis.symptoms import (
    added_gradients,
    jump,
    one_gradient,
    other_data,
    repeated_data,
    scaled_gradients,
    silent_gradients,
    steep_updates,
)
from opt_stack.diagnosis.tensor_stats import StepStats

OTHER = 1e-3  # relative difference of numbers that are not the same
MAX_SHOWN = 20  # tensors of checkpoints that differ


class Recording(NamedTuple):
    """The records of a run, and the first steps that raised an error, with it."""

    run: Run
    refused: Sequence[tuple[int, str]]


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis:
    """The findings, the first cause first. `str()` shows them with a plot in characters, notebooks with
    a drawing."""

    head: str
    findings: Sequence[Finding]
    run: Run = ()

    def __str__(self) -> str:
        lines = [self.head, *(fill(text, 100, subsequent_indent="  ") for text in self._sentences())]
        if self.run:
            norms, _ = self._curves()
            title = f"log10 of the gradient norm, steps {self.run[0].step} to {self.run[-1].step}:"
            last = len(self.run) - 1
            lines += ["", title, text_plot([norms], steps=max(last, 1), width=min(last + 2, 72), height=8)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from html import escape  # takes long to import

        paragraphs = [f"<p>{escape(line)}</p>" for line in (self.head, *self._sentences())]
        return "".join([*paragraphs, self.svg()])

    def _sentences(self) -> list[str]:
        if self.run and not self.findings:
            return ["Nothing unusual was found."]
        return [f"{'Then' if at else 'First'}: {finding.text}" for at, finding in enumerate(self.findings)]

    def svg(self) -> str:
        """Draw the gradient norm (blue) and the model's update/weight (yellow) as base-10 logarithms."""
        return svg_plot(self._curves(), steps=max(len(self.run) - 1, 1)) if self.run else ""

    def _curves(self) -> list[Callable[[float], float]]:
        history = History(self.run)
        with np.errstate(all="ignore"):
            updates = np.linalg.norm(np.nan_to_num(history.of_params("update_norm")), axis=1)
            ratios = updates / np.linalg.norm(history.of_params("weight_norm"), axis=1)
            return [_logarithm(history.of_steps("grad_norm")), _logarithm(ratios)]


def _logarithm(values: ndarray) -> Callable[[float], float]:
    """Return the logarithm by position; NaN and infinite values are above the others."""
    logs = np.log10(values)
    known = logs[np.isfinite(logs)]
    above = known.max(initial=0.0) + 1
    logs = np.nan_to_num(logs, nan=above, posinf=above, neginf=known.min(initial=0.0))
    return lambda x: float(logs[min(round(x), len(logs) - 1)])


def why(directory: str | Path, other: str | Path | None = None) -> Diagnosis:
    """Say what changed first in a recording, where, on which rank, and at which step.

    Args:
        directory: a directory with recordings (`stats_every(directory=)`), of which the newest is read, and compared
            with the one before it; or a file of JSON lines.
        other: another one, to compare the newest recordings of both. If neither holds recordings, both are checkpoints,
            whose tensors are compared by name.

    Raises:
        FileNotFoundError: there is no recording, or only one of the two is a recording.
        ValueError: a recording cannot be read.
        CheckpointingException: a checkpoint cannot be read.
    """
    paths = [path for path in (directory, other) if path is not None]
    found = [read_recordings(path) for path in paths]
    if other is not None and not any(found):
        return _between_checkpoints(directory, other)
    heads = []
    for path, runs in zip(paths, found, strict=True):
        if not runs:
            raise FileNotFoundError(
                f"{path} holds no recording; call optimizer.stats_every(1, directory={str(path)!r})"
            )
        run, errors = runs[-1]
        steps = f", {run[0].step} to {run[-1].step}" if run else ""
        num_skipped = sum(not stats.success for stats in run)
        refusals = f", {len(errors)} refused" if errors else ""
        heads.append(f"{path}: {len(run)} recorded steps{steps}, {num_skipped} of them skipped{refusals}")
    *_, before, last = [Recording([], []), *found[0]] if other is None else [runs[-1] for runs in found]
    compares = other is not None or (bool(last.run) and last.run[0].updates > 0)
    refused = refused_steps(last.refused, last.run)
    differences = _difference(before.run, last.run) if compares else ()
    return Diagnosis("\n".join(heads), find(_joined(before.run, last.run), refused, differences), last.run)


def read_recordings(directory: str | Path) -> list[Recording]:
    """Return the recordings in a directory, oldest first; those of one run once, from the rank that has most steps."""
    path = Path(directory)
    folders = [folder for folder in (path / FOLDER).glob("*") if folder.name.isdecimal()]
    runs = [_read(path)] if path.is_file() else []
    for folder in sorted(folders, key=lambda folder: int(folder.name)):
        of_ranks = [_read(file) for file in sorted(folder.glob("rank*.jsonl"))]
        runs += sorted(of_ranks, key=lambda recording: -len(recording.run))[:1]
    return [recording for recording in runs if recording.run or recording.refused]


def _read(path: Path) -> Recording:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # A process that was killed while it wrote leaves an unfinished line.
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        run = [from_line(row) for row in rows if "params" in row]
        return Recording(run, rows[0].get("refused", []) if rows else [])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recording: {error!r}") from error


# --- findings ---------------------------------------------------------------------------------------------------------

DETECTORS = (
    # What records prove.
    written_weights,
    changed_settings,
    rate_left_behind,
    ranks_apart,
    equal_ranks,
    silent_gradients,
    # What a step computes, in its order: the loss, gradients, state and weights.
    skipped_steps,
    added_gradients,
    scaled_gradients,
    other_data,
    one_gradient,
    lost_state,
    repeated_data,
    steep_updates,
    # What any of them leads to.
    jump,
)
"""In the order of precedence: the earliest finding is the cause; of several in one record, the first detector's."""
LASTING = (rate_left_behind, equal_ranks, silent_gradients)  # to the end of the run
OF_ALL_STEPS = (skipped_steps, jump)  # others see the records of steps that made an update
MAX_FINDINGS = 3


def find(history: History, refused: Iterable[Finding] = (), differences: Iterable[Finding] = ()) -> list[Finding]:
    """Return the first cause, and at most two later findings: in one record, what was `refused` comes before the
    findings of the detectors, and `differences` to another run after them."""
    order = {id(stats): at for at, stats in enumerate(history.run)}
    start = order.get(id(history.resumed), 0)

    def position(finding: Finding) -> int:
        return order.get(id(finding.record), len(order))

    applied = History([stats for stats in history.run if stats.success], history.resumed)
    found = list(refused)
    for detector in DETECTORS:
        seen = history if detector in OF_ALL_STEPS else applied
        if not seen.run or not seen.names:
            continue
        with catch_warnings(action="ignore", category=RuntimeWarning), np.errstate(all="ignore"):  # of NaN
            findings = []
            for at, text in detector(seen):
                stats = seen.run[at]
                where = f"at step {stats.step}"
                if detector in LASTING:
                    where = f"from step {stats.step} on"
                elif stats is history.resumed:
                    where += ", the first of the resumed run,"
                findings.append(Finding(stats, f"{where} {text}"))
        found += sorted([finding for finding in findings if position(finding) >= start], key=position)[:1]
    found += differences
    return sorted(found, key=position)[:MAX_FINDINGS]  # keeps the order of one record


# --- two recordings, two checkpoints ----------------------------------------------------------------------------------


def _joined(first: Run, second: Run) -> History:
    """Return the records of a run after those of the run before it, if it continues that one: with parameters of the
    same names, from its updates, or without them, from its weights."""
    if not first or not second or first[-1].params.keys().isdisjoint(second[0].params):
        return History(second)
    last = first[-1]
    start = second[0]
    before = [stats for stats in first if stats.updates < start.updates]
    has_same_params = last.params.keys() == start.params.keys()
    if start.updates == 0 and has_same_params and (unexplained(History([last, start])) < WRITTEN).all():
        before = list(first)
    return History([*before, *second], start if before else None)


def _difference(first: Run, second: Run) -> Iterator[Finding]:
    """Find the first number that differs between two runs, in the steps after the same number of updates."""
    known = {stats.updates: _numbers(stats) for stats in first if stats.success}
    for stats in second:
        old = known.get(stats.updates, {}) if stats.success else {}
        for what, new in _numbers(stats).items():
            if what in old and not math.isclose(old[what], new, rel_tol=OTHER, abs_tol=1e-12):
                where = f"after {stats.updates} updates (step {stats.step} of the second run)"
                yield Finding(stats, f"{where} the {what} is {new:.4g}, and was {old[what]:.4g}.")
                return


def _numbers(stats: StepStats) -> dict[str, float]:
    """Return the numbers of a step by their place, in the order in which they lead to one another."""
    found: dict[str, float | None] = {}
    for group, numbers in stats.settings.items():
        found |= {setting(key, group): value for key, value in {"lr": None, **numbers}.items()}
    for kind in ("weight_norm", "grad_norm", "update_norm"):
        what = kind.replace("_", " ")
        found |= {f"{what} of {name!r}": getattr(of, kind) for name, of in stats.params.items()}
    return {what: value for what, value in found.items() if value is not None}


def _between_checkpoints(first: str | Path, second: str | Path) -> Diagnosis:
    from opt_checkpoint import differences  # imports `convert`, which training does not need

    one = read_index(first)
    two = read_index(second)
    found = sorted(differences(one, two), key=lambda difference: "NaN" not in difference.text)
    num_tensors = len(one.tensors.keys() | two.tensors.keys())
    num_nan = sum("NaN" in difference.text for difference in found)
    lines = [f"{first} and {second}: {len(found)} of {num_tensors} tensors differ, {num_nan} of them in NaN"]
    lines += [f"{key}: {text}" for key, text in found[:MAX_SHOWN]]
    return Diagnosis("\n".join(lines), [])
