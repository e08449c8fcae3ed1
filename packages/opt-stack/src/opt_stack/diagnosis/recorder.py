"""`Recorder`: warns of skipped steps, and keeps the statistics of the last recorded steps, in memory and in a file.

A recording is `DIR/recording/NUMBER/rankR.jsonl`, one number for each run and one line for each step, written by the
first and the last rank when state is saved, after an error in a step, when the optimizer is deleted, and at exit.
"""

import json
import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import ref

from torch import Tensor

from opt_config import OptimizerConfig
from opt_distributed.comm import Comm, Roles
from opt_distributed.pieces import Ready
from opt_distributed.step import Outcome, Report
from opt_stack.diagnosis.lines import to_line
from opt_stack.diagnosis.tensor_stats import (
    ABOVE_LIMIT,
    OVERFLOW,
    SPIKE,
    Recorded,
    StepStats,
    TensorSums,
    non_finite,
    reason_of,
)
from opt_stack.wording import listed

FOLDER = "recording"
FILES = "rank[0-9]*.jsonl"
NUM_KEPT = 100  # steps of a run
NUM_RUNS = 20  # recordings of a directory
NUM_REFUSED = 5  # steps of a run, with their errors
_INSIDE = ("contextlib", "opt_distributed", "opt_stack", "torch")  # modules that a warning does not point to
WAIT_SECONDS = 5.0  # before a recording is written, for a device whose peers may be dead
Callback = Callable[[StepStats], object]


class SkippedStepWarning(UserWarning):
    """A step was skipped, or refused by a guard: no weight and no state has changed. Given once for each cause."""


@dataclass(slots=True)
class _Cause:
    text: str
    first: int  # step
    last: int
    count: int = 0


@dataclass(eq=False)
class Recorder:
    """The `Watch` of an optimizer."""

    _config: OptimizerConfig
    _roles: Roles
    _is_late: bool  # whether the host reads a step later than it is made
    _make_sums: Callable[[], TensorSums]  # of the model; collective
    every: int = 0
    spectrum: bool = False
    callback: Callback | None = None
    file: Path | None = None  # of this rank
    _at_end: Finalize | None = None  # writes the file when the optimizer is deleted, or at exit
    records: deque[StepStats] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    refused: list[tuple[int, str]] = field(default_factory=list)  # the first steps that raised an error, with it
    _num_loaded: int = 0  # updates of earlier runs, which the steps of this one follow
    _sums: TensorSums | None = None
    _is_recording: bool = False
    _has_skipped: bool = False  # the last step that was read
    _applied: int = 0
    _causes: dict[str, _Cause] = field(default_factory=dict)
    # Steps that the host has not read, with the numbers of the groups.
    _open: list[tuple[Outcome, Recorded | None, dict[str, dict[str, float]]]] = field(default_factory=list)

    @property
    def _everyone(self) -> Comm:
        return self._roles.everyone

    def start(
        self, every: int, callback: Callback | None, directory: str | Path | None, spectrum: bool, *, next_step: int
    ) -> None:
        """Record every `every` steps from the next one on. Collective. Raises as `Optimizer.stats_every`."""
        asked = f"stats_every({every}, spectrum={spectrum}), {'no' if directory is None else 'a'} directory"
        per_rank = {text: rank for rank, text in enumerate(self._everyone.gather_objects(asked))}
        if len(per_rank) > 1:
            calls = "; ".join(f"rank {rank}: {text}" for text, rank in per_rank.items())
            raise ValueError(f"stats_every: ranks differ ({calls}); make the same call on every rank")
        if every < 0:
            raise ValueError(f"stats_every({every}): pass a number of steps, 1 or more, or 0 to stop")
        self.every = every
        self.callback = callback
        self.spectrum = spectrum
        if directory is not None:
            self._start_file(Path(directory).absolute() / FOLDER)
        if every:
            sums = self._sums_of_model()
            sums.expect(self._is_due(next_step))
            updates = max(self._everyone.gather_objects(sums.num_updates()))
            self._num_loaded = max(self._num_loaded, updates + 1 - next_step)

    def _start_file(self, folder: Path) -> None:
        """Take the number of a new run in `folder`, and delete the oldest recordings. Collective."""
        rank = self._everyone.rank
        runs = {int(run.name): run for run in folder.glob("*") if run.name.isdecimal()}
        number = max(self._everyone.gather_objects(max(runs, default=0))) + 1
        if rank == 0:
            with suppress(OSError):
                _delete_oldest(runs)
        if rank not in (0, self._everyone.size - 1):
            return
        self.file = folder / f"{number:04}" / f"rank{rank}.jsonl"
        with suppress(OSError):  # `write` warns
            self.file.parent.mkdir(parents=True, exist_ok=True)  # the number is taken
        if self._at_end is not None:
            self._at_end.cancel()
        # Keeps no callback alive, which may refer to the optimizer. Unlike atexit, this also runs in processes that
        # multiprocessing starts.
        arguments = (ref(self), self.file, self._head(), self.records)
        self._at_end = Finalize(self, _write_at_end, arguments, exitpriority=10)

    def _sums_of_model(self) -> TensorSums:
        if self._sums is None:
            self._sums = self._make_sums()
        return self._sums

    def _is_due(self, step: int) -> bool:
        return self.every > 0 and (step - 1) % self.every == 0

    # --- the watch of a step ----------------------------------------------------------------------------------------

    def before(self, step: int, ready: Sequence[Ready], inverse: float | Tensor, *, skipped: bool) -> None:
        # Several ranks have read the verdict on the step before when this one began, so that all know the same. Without
        # a callback to call in the same step on every rank, statistics are read once they have arrived.
        has_others = self._everyone.size > 1
        self._settle(within=None if has_others and self.every else 0.0)
        if has_others and self._open:
            report = self._open[-1][0].resolve()
            self._has_skipped = report.is_skipped
        is_due = self._is_due(step)
        self._is_recording = is_due or skipped or (self._is_late and self._has_skipped)
        if self._is_recording:
            spectrum = self.spectrum and is_due
            self._sums_of_model().begin(ready, inverse, updates=not skipped, spectrum=spectrum)

    def after(self, outcome: Outcome, groups: Sequence[Mapping[str, Any]], *, max_norm: float) -> None:
        recorded = None
        settings = {"": {"clip_grad": max_norm}}
        if self._is_recording:
            recorded = self._sums_of_model().finish(outcome, max_norm=max_norm)
            settings |= {str(group.get("name", at)): numbers_of(group) for at, group in enumerate(groups)}
        self._open.append((outcome, recorded, settings))
        if not self._is_late:
            self._settle(within=None)
        if self._sums is not None:
            self._sums.expect(self._has_skipped or self._is_due(outcome.step + 1))

    def on_refusal(self, step: int, error: Exception, found: Sequence[str]) -> None:
        """Name the ranks at fault, with their guard. Collective. On a single rank the error itself names the cause."""
        local = (self._everyone.rank, found[:1], str(error))
        here = self._roles.totals.gather_objects(local)
        per_instance = self._roles.dense.inter.gather_objects(here)
        per_rank = [of_rank for of_instance in per_instance for of_rank in of_instance]
        at_fault = [of_rank for of_rank in per_rank if of_rank[1]]
        what = per_rank[0][2]  # such as groups that differ: no rank is at fault
        text = str(error)
        if at_fault:
            _, guards, first_error = at_fault[0]
            ranks = ranks_text(rank for rank, _, _ in at_fault)
            what = f"{ranks}, guard {guards[0]}"
            text = f"{what}: {first_error}"
        self._note_refusal(step, text)
        self._count(what, step, f"was refused on every rank by {what}", warns=len(per_rank) > 1)

    def _settle(self, *, within: float | None) -> None:
        """Read the steps that are open, waiting `within` seconds for each; None: until it is there."""
        while self._open:
            outcome, recorded, settings = self._open[0]
            if within is not None and not (recorded or outcome).arrives(within):
                return
            self._open.pop(0)
            report = outcome.resolve()
            stats = None
            if recorded is not None:
                read = recorded.read()
                self._num_loaded = max(self._num_loaded, read.updates + 1 - outcome.step)
                rates = {name: numbers["lr"] for name, numbers in settings.items() if "lr" in numbers}
                stats = replace(read, step=outcome.step + self._num_loaded, lr=rates, settings=settings)
            self._has_skipped = report.is_skipped
            if outcome.error is not None:  # on an accelerator; on a CPU, `on_refusal` has counted it
                text = f"was refused on every rank: {outcome.error}"
                self._note_refusal(outcome.step, str(outcome.error))
                self._count(str(outcome.error), outcome.step, text, warns=self._everyone.size > 1)
            elif self._has_skipped:
                self._explain(outcome.step, report, stats)
            else:
                self._applied += report.success
            if stats is not None and (self._has_skipped or self._is_due(outcome.step)):
                self.records.append(stats)
                if self.callback is not None:
                    self.callback(stats)

    def _explain(self, step: int, report: Report, stats: StepStats | None) -> None:
        """Count a skipped step by its reason, its place in the model and the ranks at fault, and warn of the first."""
        where = ""
        ranks = ""
        norm = report.norms[0]
        norms = {"": norm}
        if stats is not None:
            norms = stats.grad_norms
            bad = non_finite(norms)
            if not report.overflow and norms:
                bad = [max(norms, key=norms.__getitem__)]
            if not bad:
                where = " in a copy that norms do not count"
            elif 1 < len(bad) == len(norms):
                where = f" of all {len(bad)} parameters"
            else:
                where = f" of {bad[-1]!r}"
                if len(bad) > 1:  # backward spreads a NaN to parameters before it in the model
                    where += f" and of {len(bad) - 1} before it in the model"
            at_fault = non_finite(stats.rank_norms)
            if report.overflow and at_fault:
                ranks = f", on {ranks_text(at_fault)} before the mean over ranks"
        config = self._config
        reason = reason_of(report)
        key = f"{reason}{where}{ranks}"
        largest = f"; the largest is that{where}" if where else ""
        spread = f"{config.skip_sigma:g} deviations (skip_sigma) above the mean of the last {config.skip_window} steps"
        if reason == OVERFLOW:
            what = "NaN" if any(map(math.isnan, norms.values())) else "infinite values"
            text = f"{what} in the gradient{where}{ranks}"
            if config.fp16 and config.loss_scale is None:
                text += "; the loss scale is lowered, as expected in the first steps of a dynamic loss scale"
        elif reason == ABOVE_LIMIT:
            limit = config.grad_norm_skip_threshold
            text = f"the gradient norm {norm:.4g} is above grad_norm_skip_threshold={limit:g}{largest}"
        elif reason == SPIKE:
            text = f"the gradient norm {norm:.4g} is a spike above {report.bounds[0]:.4g}, {spread}{largest}"
        elif report.loss is not None and math.isfinite(report.loss):
            key = reason
            text = f"the loss {report.loss:.4g} is a spike above {report.bounds[1]:.4g}, {spread}"
        else:
            key = reason
            text = f"the loss was {report.loss}"
        self._count(key, step, f"was skipped on every rank: {text}")

    def _note_refusal(self, step: int, error: str) -> None:
        """Keep the error of a step for the recording, once."""
        step += self._num_loaded
        if len(self.refused) < NUM_REFUSED and all(step != known for known, _ in self.refused):
            self.refused.append((step, " ".join(error.split())))

    def _count(self, key: str, step: int, text: str, *, warns: bool = True) -> None:
        step += self._num_loaded
        cause = self._causes.setdefault(key, _Cause(text, step, step))
        cause.count += 1
        cause.last = step
        if cause.count == 1 and warns:
            advice = "No weight or state has changed; optimizer.report() has the counts"
            warnings.warn(f"step {step} {text}. {advice}", SkippedStepWarning, stacklevel=caller_level())

    # --- what it has found ------------------------------------------------------------------------------------------

    def last(self) -> StepStats:
        """Return the last record, for which the host waits. Raises RuntimeError if there is none."""
        self._settle(within=None)
        if not self.records:
            raise RuntimeError("no step was recorded; call optimizer.stats_every(1), then take a step")
        return self.records[-1]

    def report(self) -> str:
        """Return the counts of steps and causes, and the last record."""
        self._settle(within=None)
        num_bad = sum(cause.count for cause in self._causes.values())
        lines = [f"{self._applied + num_bad} steps: {self._applied} applied, {num_bad} skipped or refused"]
        for cause in self._causes.values():
            steps = f"step {cause.first}" if cause.count == 1 else f"steps {cause.first} to {cause.last}"
            lines.append(f"  {cause.count} time{'s' * (cause.count > 1)} ({steps}): {cause.text}")
        lines.append(str(self.records[-1]) if self.records else "no recorded step")
        return "\n".join(lines)

    @contextmanager
    def on_error(self, step: int) -> Iterator[None]:
        """Write the recording if the block, a part of `step`, raises."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._note_refusal(step, text)
            self.write(text)
            raise

    def write(self, reason: str, *, within: float = WAIT_SECONDS) -> None:
        """Write the recording of this rank, if `stats_every` was given a directory. A failure is a warning."""
        if self.file is not None:
            self._settle(within=within)
            _write_records(self.file, self._head(), self.records, reason)

    def _head(self) -> dict[str, Any]:
        return {"recording": 1, "rank": self._everyone.rank, "ranks": self._everyone.size, "refused": self.refused}


def _delete_oldest(runs: Mapping[int, Path]) -> None:
    """Delete recordings until a new one fits. Runs without a recording, and folders of other programs, do not count."""
    recorded = [number for number in sorted(runs) if any(runs[number].glob(FILES))]
    for number in recorded[: 1 - NUM_RUNS]:
        for file in runs[number].glob(FILES):
            file.unlink()
        with suppress(OSError):
            runs[number].rmdir()  # unless other files are in it


def _write_at_end(recorder: ref[Recorder], file: Path, head: dict[str, Any], records: deque[StepStats]) -> None:
    """Write the recording at exit, or when the optimizer has been deleted.

    It may be garbage while a graph is captured, when nothing may wait: then only what the host has read is written.
    """
    living = recorder()
    if living is not None:
        living.write("exit")
    else:
        _write_records(file, head, records, "the optimizer was deleted")


def _write_records(file: Path, head: dict[str, Any], records: deque[StepStats], reason: str) -> None:
    if not records and not head["refused"]:
        return
    first_line = json.dumps({**head, "end": reason, "time": time.time()})
    text = "".join(map(to_line, records))
    partial = file.with_suffix(".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"{first_line}\n{text}", encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        warnings.warn(f"the recording was not written to {file}: {error}", stacklevel=3)


def numbers_of(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a group that the host knows; those of `betas` as `beta1` and `beta2`."""
    values = dict(group)
    for at, beta in enumerate(group.get("betas", ()), 1):
        values[f"beta{at}"] = beta
    return {key: float(value) for key, value in values.items() if type(value) in (int, float)}


def caller_level() -> int:
    """Return the `stacklevel` with which a warning of the caller of this function points to the user's code."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level += 1
        frame = frame.f_back
    return level


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0, 3`."""
    numbers = sorted(ranks)
    word = "ranks" if len(numbers) > 1 else "rank"
    return f"{word} {listed(numbers, 8)}"
