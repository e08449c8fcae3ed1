"""The steps in one directory: which are complete, and which the run has abandoned by going back to an older step.

A run that loads step 100 and saves step 110 has abandoned a step 120 that is there. `superseded.json` records that.
It is written before the save of step 110 and counts once that save is committed, so a crash at any point leaves either
step 120 or step 110 as the newest. Abandoned steps stay on disk until the run saves a later step, and can still be
loaded by number. The record is removed with the last of them.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from opt_checkpoint.disk.checkpoint import check_sizes, read_committed, was_removed
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.run.best import KeepBest, from_details
from opt_checkpoint.store import AnyPath, Location, Store, location_of, store_at

logger = logging.getLogger(__name__)
SUPERSEDED = "superseded.json"
_STEP = re.compile(r"step-(\d+)")
_MOST_PENDING = 7  # besides the new one: saves that failed may be among them, and at most two are under way


def step_name(step: int) -> str:
    """Return name of the directory of a step, such as `step-000000100`; names sort like their numbers."""
    return f"step-{step:09d}"


def named_steps(store: Store) -> list[int]:
    """Return the step of every directory that is named like one, complete or not, in order."""
    matches = [_STEP.fullmatch(name) for name in store.children()]
    steps = [int(match[1]) for match in matches if match and match[0] == step_name(int(match[1]))]
    return sorted(steps)


def steady_steps(store: Store) -> Iterator[list[int]]:
    """Yield `named_steps`, and again until they have not changed: a trainer may have removed some in the meantime, and
    saved others before."""
    listed: list[int] | None = None
    while listed != (now := named_steps(store)):
        listed = now
        yield now


def committed_steps(directory: AnyPath) -> list[int]:
    """Return the steps whose checkpoint is committed and complete, by its manifest and file sizes, in order.

    A damaged checkpoint is skipped with a warning in the log. Steps that the run abandoned are left out.

    Raises:
        OSError: a directory, file or object cannot be read, so that it is unknown whether it holds a checkpoint.
    """
    series = Series(location_of(directory))
    for listed in steady_steps(series.store):
        gone = series.abandoned()
        whole = [step for step in listed if not series.is_abandoned(step, gone) and series.is_whole(step, headers=True)]
    return whole


class Rollback(NamedTuple):
    """A save of a step lower than existing ones.

    Args:
        step: the step that is saved.
        save_id: its save; the rollback counts once that is committed.
        steps: the save of each abandoned step.
    """

    step: int
    save_id: str
    steps: Mapping[int, str]


class Series:
    """The steps in one directory, and the record of abandoned ones. Used on rank 0 only.

    Args:
        directory: parent of the steps.
    """

    def __init__(self, directory: Location) -> None:
        self.directory = directory
        self.store = store_at(directory)
        self.damaged: dict[int, str | None] = {}  # the save of each step that was found damaged: it may be saved again
        self._issued: set[str] = set()  # saves of this process that may still be committed
        self._whole: dict[int, bool] = {}  # of committed steps: whether manifest and sizes were found right
        self._metrics: dict[int, float | None] = {}  # of the whole ones
        self._lock = threading.RLock()  # two tiers save in two threads

    def path(self, step: int) -> Location:
        """Return path of a step."""
        return self.directory / step_name(step)

    def is_committed(self, step: int) -> bool:
        """Return whether the checkpoint of a step was committed; a damaged one counts too. Each step is looked at once.

        Raises:
            OSError: the step cannot be read.
        """
        if step not in self._whole:
            try:
                if self.store.committed(step_name(step)) is None:
                    return False
            except CheckpointCorruptError:
                pass
            self._whole[step] = False
        return True

    def committed(self) -> set[int]:
        """Return the steps whose checkpoint was committed. Raises like `is_committed`."""
        return {step for step in named_steps(self.store) if self.is_committed(step)}

    def newest(self, *, at_most: int | None) -> int | None:
        """Return the highest committed step that was not abandoned; None if no checkpoint was ever committed.

        Args:
            at_most: steps with a higher number are ignored; None for none.

        Raises:
            CheckpointCorruptError: without `at_most`: there are checkpoints, but all are damaged.
            OSError: as `is_committed`.
        """
        for listed in steady_steps(self.store):
            bad = []
            gone = self.abandoned()
            for step in reversed(listed):
                if at_most is not None and step > at_most:
                    continue
                if self.is_committed(step) and not self.is_abandoned(step, gone):
                    if not self.is_damaged(step):
                        return step
                    bad.append(step_name(step))
        if bad and at_most is None:
            raise CheckpointCorruptError(
                f"every checkpoint in {self.directory} is damaged: {', '.join(bad)}; verify them, or move them away to "
                f"start from the beginning"
            )
        return None

    def is_damaged(self, step: int) -> bool:
        """Return whether the present save of a step was found damaged."""
        return step in self.damaged and self.save_of(step) == self.damaged[step]

    def is_abandoned(self, step: int, gone: Mapping[int, str]) -> bool:
        return step in gone and self.save_of(step) == gone[step]

    def add(self, step: int, metric: float | None) -> None:
        """Remember that this process has saved a step, and with which metric."""
        self._whole[step] = True
        self._metrics[step] = metric

    def forget(self, step: int) -> None:
        """Forget what is known of a step, which was removed or may be replaced."""
        self._whole.pop(step, None)
        self._metrics.pop(step, None)

    def is_whole(self, step: int, *, headers: bool = False) -> bool:
        """Return whether a committed step has all its files, by manifest, sizes and headers. Each step is looked at
        once."""
        if self.is_damaged(step):
            return False
        if not self._whole.get(step):
            save_id: str | None = None
            try:
                index = read_committed(self.path(step))
                save_id = index.save_id
                check_sizes(index, headers=headers)
                self.add(step, from_details(index.details))
            except FileNotFoundError:  # deleted by its trainer
                return False
            except CheckpointCorruptError as error:
                if was_removed(self.path(step), save_id):
                    return False
                self.damaged[step] = save_id
                logger.warning("%s does not count as kept: %s", self.path(step), error)
        return self._whole.get(step, False)

    def best(self, keep_best: KeepBest) -> list[int]:
        """Return the whole steps with the best metrics, the best one first. Damaged and abandoned ones do not count.

        Args:
            keep_best: how many, and which are better.

        Raises:
            OSError: a step cannot be read.
        """
        for listed in steady_steps(self.store):
            gone = self.abandoned()
            metrics: dict[int, float] = {}
            for step in listed:
                if not self.is_abandoned(step, gone) and self.is_whole(step):
                    metric = self._metrics.get(step)
                    if metric is not None:
                        metrics[step] = metric
        return keep_best.steps(metrics)

    def retire(
        self,
        new: int,
        keep: int,
        keep_every: int | None,
        stays: Collection[int],
    ) -> None:
        """Delete all but the newest `keep` whole steps, by number, and the folders of dead saves to other steps.

        Damaged steps stay for inspection and do not count, as abandoned ones do.

        Args:
            new: the step just saved, which stays.
            keep: how many steps to keep.
            keep_every: multiples of this stay; None for none.
            stays: steps that stay too; they count if they are among the newest.
        """
        gone = self.abandoned()
        kept = 0
        uncommitted = []
        for step in reversed(named_steps(self.store)):
            if self.is_damaged(step) or self.is_abandoned(step, gone):
                continue
            if kept >= keep and step != new and keep_every is not None and step % keep_every == 0:
                continue
            try:
                if not self.is_committed(step):
                    uncommitted.append(step_name(step))
                elif kept < keep or step == new:
                    kept += self.is_whole(step)
                elif step not in stays:
                    self._delete(step)
            except (OSError, CheckpointCorruptError) as error:
                logger.warning("could not remove old checkpoints of %s: %s", self.directory, error)
        for left in self.store.leftovers(uncommitted) if uncommitted else ():
            if left.writer is None:
                self.store.discard(left.folder)

    def _delete(self, step: int) -> None:
        self.store.retire(step_name(step))
        self.forget(step)

    def abandoned(self) -> dict[int, str]:
        """Return the saves of the steps that the run has abandoned.

        Raises:
            CheckpointCorruptError: the record is damaged.
            OSError: it cannot be read.
        """
        steps, pending = self.read()
        for rollback in pending:
            if self.save_of(rollback.step) == rollback.save_id:
                steps |= rollback.steps
        return steps

    def begin(self, step: int, save_id: str) -> bool:
        """Record, before a save, that later steps are abandoned once it is committed; False if there are none."""
        with self._lock:
            self.forget(step)
            saves = {later: self.save_of(later) for later in named_steps(self.store) if later > step}
            later = {number: save for number, save in saves.items() if save is not None}
            if later:
                others = [other for other in self.read()[1] if other.save_id in self._issued][-_MOST_PENDING:]
                self._issued.add(save_id)
                self._write(self.abandoned(), [*others, Rollback(step, save_id, later)])
            return bool(later)

    def finish(self, saved: int, save_id: str, stays: Collection[int] = ()) -> None:
        """After the commit of a step by a save, abandon what its rollback names, and delete abandoned steps before it
        but `stays`."""
        with self._lock:
            steps, before = self.read()
            if not steps and not before:
                return
            gone = self.abandoned()
            for other in before:
                gone |= other.steps if other.save_id == save_id else {}
            left = {step: save for step, save in gone.items() if self.save_of(step) == save}
            pending = [other for other in before if other.save_id in self._issued - {save_id}]
            if left or pending:  # first, so that no deletion can bring a step back
                self._write(left, pending)
            for step in [step for step in left if step < saved and step not in stays]:
                self._delete(step)
                del left[step]
            if not left and not pending:
                self.store.remove(SUPERSEDED)

    def save_of(self, step: int) -> str | None:
        """Return the save of a committed step; None if none is committed, or its manifest is damaged."""
        try:
            return read_committed(self.path(step)).save_id
        except (FileNotFoundError, CheckpointCorruptError):
            return None

    def read(self) -> tuple[dict[int, str], list[Rollback]]:
        """Return the record: steps abandoned for good, and rollbacks whose save may not have been committed."""
        try:
            content = json.loads(self.store.read(SUPERSEDED))
            pending = [Rollback(int(p["step"]), str(p["save_id"]), _saves(p["steps"])) for p in content["pending"]]
            return _saves(content["steps"]), pending
        except FileNotFoundError:
            return {}, []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorruptError(
                f"{self.store.path(SUPERSEDED)} is damaged, so that it is unknown which steps the run has abandoned; "
                f"remove it to resume from the step with the highest number"
            ) from error

    def _write(self, steps: Mapping[int, str], pending: Sequence[Rollback]) -> None:
        content = {"steps": steps, "pending": [rollback._asdict() for rollback in pending]}
        self.store.put(SUPERSEDED, json.dumps(content).encode())


def _saves(content: Mapping[str, Any]) -> dict[int, str]:
    return {int(step): str(save) for step, save in content.items()}
