"""`Recorder`: warns of skipped steps, and keeps the statistics of the last recorded steps, in memory and in a file.

A recording is `DIR/recording/NUMBER/rankR.jsonl`, one number for each run and one line for each step, written by the
first and the last rank when state is saved, after an error in a step, when the optimizer is deleted, and at exit.
"""

import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import ref

from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed.comm import Comm, Roles, device
from opt_distributed.pieces import Ready
from opt_distributed.step import ABOVE_LIMIT, OVERFLOW, SPIKE, Outcome, Report
from opt_kernels.params import Group, Groups
from opt_stack.diagnosis.lines import to_line
from opt_stack.diagnosis.tensor_stats import (
    Settings,
    StepStats,
    TensorSums,
    by_rank,
    fault,
)
from opt_stack.wording import caller_level, ranks_text

FOLDER = "recording"
FILES = "rank[0-9]*.jsonl"
NUM_KEPT = 100  # steps of a run
NUM_RUNS = 20  # recordings of a directory
NUM_REFUSED = 5  # steps of a run, with their errors
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
    _write_file: Callable[[str], None] | None = None  # with the reason
    _at_end: Finalize | None = None  # writes the file when the optimizer is deleted, or at exit
    records: deque[StepStats] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    refused: dict[int, str] = field(default_factory=dict)  # the first steps that raised an error, with it
    _num_loaded: int = 0  # updates of earlier runs, which the steps of this one follow
    _sums: TensorSums | None = None
    _is_recording: bool = False
    _has_skipped: bool = False  # the last step that was read
    _applied: int = 0
    _causes: dict[str, _Cause] = field(default_factory=dict)
    # Steps that the host has not read, with their sums, and the numbers of their groups.
    _open: list[tuple[Outcome, device.HostCopy | None, Settings]] = field(default_factory=list)

    @property
    def _everyone(self) -> Comm:
        return self._roles.everyone

    def start(
        self,
        every: int,
        callback: Callback | None,
        directory: str | Path | None,
        spectrum: bool,
        forward: nn.Module | None,
        *,
        next_step: int,
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
        self._settle(within=None)
        if every or self._sums is not None:
            sums = self._sums_of_model()
            sums.watch_forward(forward if every else None)
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
                # Runs without a recording, and folders of other programs, do not count.
                recorded = [run for _, run in sorted(runs.items()) if any(run.glob(FILES))]
                for run in recorded[: 1 - NUM_RUNS]:
                    for old in run.glob(FILES):
                        old.unlink()
                    with suppress(OSError):
                        run.rmdir()  # unless other files are in it
        if rank not in (0, self._everyone.size - 1):
            return
        file = folder / f"{number:04}" / f"rank{rank}.jsonl"
        with suppress(OSError):  # `_write_records` warns
            file.parent.mkdir(parents=True, exist_ok=True)  # the number is taken
        if self._at_end is not None:
            self._at_end.cancel()
        # Keeps no callback alive, which may refer to the optimizer. Unlike atexit, this also runs in processes that
        # multiprocessing starts.
        head = {"recording": 1, "rank": rank, "ranks": self._everyone.size}
        self._write_file = partial(_write_records, file, head, self.records, self.refused)
        self._at_end = Finalize(self, _write_at_end, (ref(self), self._write_file), exitpriority=10)

    def _sums_of_model(self) -> TensorSums:
        if self._sums is None:
            self._sums = self._make_sums()
        return self._sums

    def _is_due(self, step: int) -> bool:
        return self.every > 0 and (step - 1) % self.every == 0

    # --- the watch of a step ----------------------------------------------------------------------------------------

    def before(self, step: int, ready: Sequence[Ready], inverse: float | Tensor, *, skipped: bool) -> None:
        has_others = self._everyone.size > 1
        # A callback is called in the same step on every rank; else statistics are read once they have arrived.
        self._settle(within=None if has_others and self.every else 0.0)
        if has_others and self._open:  # all have read the verdict on the step before when this one began
            self._has_skipped = bool(self._open[-1][0].resolve().reason)
        is_due = self._is_due(step)
        follows_skip = self._is_late and self._has_skipped  # the host learns of a skip a step late
        self._is_recording = is_due or skipped or follows_skip
        if self._is_recording:
            self._sums_of_model().begin(ready, inverse, updates=not skipped, spectrum=self.spectrum and is_due)

    def after(self, outcome: Outcome, groups: Groups, *, max_norm: float) -> None:
        copy = None
        settings = {"": {"clip_grad": max_norm}}
        if self._is_recording:
            copy = self._sums_of_model().finish()
            settings |= {str(group.get("name", at)): numbers_of(group) for at, group in enumerate(groups)}
        self._open.append((outcome, copy, settings))
        if not self._is_late:
            self._settle(within=None)
        if self._sums is not None:
            self._sums.expect(self._has_skipped or self._is_due(outcome.step + 1))

    def on_refusal(self, step: int, error: Exception, found: Sequence[str]) -> None:
        """Name the ranks at fault, with their guard. Collective. On a single rank the error itself names the cause."""
        per_rank = by_rank(self._roles, found[:1])
        at_fault = {rank: guards for rank, guards in per_rank.items() if guards}
        text = str(error)  # such as groups that differ: no rank is at fault
        if at_fault:
            guards, *_ = at_fault.values()
            text = f"{ranks_text(at_fault)}, guard {guards[0]}"
        self._refuse(step, f" by {text}", text)

    def _refuse(self, step: int, what: str, error: str) -> None:
        """Count a refused step, and keep its error for the recording."""
        self._note_refusal(step, error)
        self._count(what, step, f"was refused on every rank{what}", warns=self._everyone.size > 1)

    def _settle(self, *, within: float | None) -> None:
        """Read the steps that are open, waiting `within` seconds for each; None: until it is there."""
        while self._open:
            outcome, copy, settings = self._open[0]
            if within is not None and not (copy or outcome).arrives(within):
                return
            self._open.pop(0)
            report = outcome.resolve()
            stats = None
            if copy is not None:
                stats = self._sums_of_model().read(copy, outcome, settings, self._num_loaded)
                self._num_loaded = stats.step - outcome.step
            self._has_skipped = bool(report.reason)
            if outcome.error is not None:  # on an accelerator; on a CPU, `on_refusal` has counted it
                self._refuse(outcome.step, f": {outcome.error}", str(outcome.error))
            elif self._has_skipped:
                text = self._explain(report, stats)
                key = text if report.reason == OVERFLOW else report.reason  # overflows are counted by their place
                self._count(key, outcome.step, f"was skipped on every rank: {text}")
            else:
                self._applied += report.success
            if stats is not None and (self._has_skipped or self._is_due(outcome.step)):
                self.records.append(stats)
                if self.callback is not None:
                    self.callback(stats)

    def _explain(self, report: Report, stats: StepStats | None) -> str:
        """Return why a step was skipped, with its numbers."""
        config = self._config
        norm = report.norms[0]
        if report.reason == OVERFLOW:
            text = fault(norm, stats)
            if config.fp16 and config.loss_scale is None:
                text += "; the loss scale is lowered, as expected in the first steps of a dynamic loss scale"
            return text
        norms = stats.grad_norms if stats is not None else {}
        largest = f"; the largest is that of {max(norms, key=norms.__getitem__)!r}" if norms else ""
        if report.reason == ABOVE_LIMIT:
            limit = f"grad_norm_skip_threshold={config.grad_norm_skip_threshold:g}"
            return f"the gradient norm {norm:.4g} is above {limit}{largest}"
        spread = f"{config.skip_sigma:g} deviations (skip_sigma) above the mean of the last {config.skip_window} steps"
        if report.reason == SPIKE:
            return f"the gradient norm {norm:.4g} is a spike above {report.bounds[0]:.4g}, {spread}{largest}"
        if report.loss is not None and math.isfinite(report.loss):
            return f"the loss {report.loss:.4g} is a spike above {report.bounds[1]:.4g}, {spread}"
        return f"the loss was {report.loss}"

    def _note_refusal(self, step: int, error: str) -> None:
        """Keep the error of a step for the recording, once."""
        if len(self.refused) < NUM_REFUSED:
            self.refused.setdefault(step + self._num_loaded, " ".join(error.split()))

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
            # On an accelerator, a step raises the error of the step before, if nobody has read that.
            earlier = (outcome.step for outcome, *_ in self._open if outcome.error is error)
            self._note_refusal(next(earlier, step), text)
            self.write(text)
            raise

    def write(self, reason: str) -> None:
        """Write the recording of this rank, if `stats_every` was given a directory. A failure is a warning."""
        if self._write_file is not None:
            self._settle(within=WAIT_SECONDS)
            self._write_file(reason)


def _write_at_end(recorder: ref[Recorder], write_file: Callable[[str], None]) -> None:
    """Write the recording at exit, or when the optimizer has been deleted.

    It may be garbage while a graph is captured, when nothing may wait: then only what the host has read is written.
    """
    living = recorder()
    if living is not None:
        living.write("exit")
    else:
        write_file("the optimizer was deleted")


def _write_records(
    file: Path, head: dict[str, Any], records: deque[StepStats], refused: dict[int, str], reason: str
) -> None:
    if not records and not refused:
        return
    head = {**head, "refused": [*refused.items()], "end": reason, "time": time.time()}
    unfinished = file.with_suffix(".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text("".join([json.dumps(head), "\n", *map(to_line, records)]), encoding="utf-8")
        os.replace(unfinished, file)
    except OSError as error:
        warnings.warn(f"the recording was not written to {file}: {error}", stacklevel=3)


def numbers_of(group: Group) -> dict[str, float]:
    """Return the numbers of a group that the host knows; those of `betas` as `beta1` and `beta2`."""
    betas = {f"beta{at}": beta for at, beta in enumerate(group.get("betas", ()), 1)}
    return {key: float(value) for key, value in {**group, **betas}.items() if type(value) in (int, float)}
