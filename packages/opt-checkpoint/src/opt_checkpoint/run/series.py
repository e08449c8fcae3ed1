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
import uuid
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from opt_checkpoint.disk.data_file import read_small_file
from opt_checkpoint.disk.detect import has_commit, read_committed
from opt_checkpoint.disk.files import Files, LocalFiles, make_parents, write_file
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.disk.object_target import discard_checkpoint
from opt_checkpoint.disk.verify import check_sizes
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.objects.path import AnyPath, Location, ObjectPath, location_of, subdirectories

logger = logging.getLogger(__name__)
SUPERSEDED = "superseded.json"
_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """Name of the directory of a step, such as `step-000000100`; names sort like their numbers."""
    return f"step-{step:09d}"


def named_steps(directory: Location) -> list[tuple[int, Location]]:
    """Step and path of every directory that is named like a step, complete or not, in order."""
    found: list[tuple[int, Location]] = []
    for entry in subdirectories(directory):
        match = _STEP.fullmatch(entry.name)
        if match and entry.name == step_name(int(match[1])):
            found.append((int(match[1]), entry))
    return sorted(found, key=lambda named: named[0])


def complete_index(path: Location) -> CheckpointIndex | None:
    """The index of a committed checkpoint whose files have their sizes; None, with a warning if it is damaged."""
    try:
        index = read_committed(path)
        check_sizes(index)
    except FileNotFoundError:
        return None
    except CheckpointCorruptError as error:
        logger.warning("skipping %s: %s", path, error)
        return None
    return index


def committed_steps(directory: AnyPath) -> list[int]:
    """The steps whose checkpoint is committed and complete, by its manifest and file sizes, in order.

    A damaged checkpoint is skipped with a warning in the log. Steps that the run abandoned are left out.

    Raises:
        OSError: a directory, file or object cannot be read, so that it is unknown whether it holds a checkpoint.
    """
    series = Series(location_of(directory))
    gone, found = series.abandoned(), []
    for step, path in named_steps(series.directory):
        index = complete_index(path)
        if index is not None and gone.get(step) != index.save_id:
            found.append(step)
    return found


def newest_index(series: Series, damaged: Collection[int] = ()) -> tuple[int, CheckpointIndex] | None:
    """The newest committed and complete step that was not abandoned; None if no checkpoint was ever committed.

    Args:
        series: where.
        damaged: steps that are known to be damaged.

    Raises:
        CheckpointCorruptError: there are checkpoints, but all are damaged.
        OSError: as `committed_steps`.
    """
    bad, gone = [], series.abandoned()
    for step, path in reversed(named_steps(series.directory)):
        index = None if step in damaged else complete_index(path)
        if index is not None and gone.get(step) != index.save_id:
            return step, index
        if index is None and has_commit(path):
            bad.append(path.name)
    if bad:
        raise CheckpointCorruptError(
            f"every checkpoint in {series.directory} is damaged: {', '.join(bad)}; verify them, or move them away to "
            f"start from the beginning"
        )
    return None


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


class _Record(NamedTuple):
    """The content of `superseded.json`: steps abandoned for good, and rollbacks that depend on a save."""

    steps: dict[int, str]
    pending: list[Rollback]


class Series:
    """The steps in one directory, and the record of abandoned ones. Used on rank 0 only.

    Args:
        directory: parent of the steps.
        files: the file system.
    """

    def __init__(self, directory: Location, files: Files | None = None) -> None:
        self.directory, self._files = directory, files or LocalFiles()
        self._place = directory / SUPERSEDED
        self._issued: set[str] = set()  # saves of this process that may still be committed
        self._lock = threading.RLock()  # two tiers save in two threads

    def abandoned(self) -> dict[int, str]:
        """The saves of the steps that the run has abandoned.

        Raises:
            CheckpointCorruptError: the record is damaged.
            OSError: it cannot be read.
        """
        record = self._read()
        for pending in record.pending:
            if self.save_of(pending.step) == pending.save_id:
                record.steps.update(pending.steps)
        return record.steps

    def pending(self) -> list[Rollback]:
        """Rollbacks whose save may not have been committed."""
        return self._read().pending

    def begin(self, step: int, save_id: str) -> Rollback | None:
        """Record, before a save, that later steps are abandoned once it is committed; None if there are none."""
        with self._lock:
            saves = {later: self.save_of(later) for later, _ in named_steps(self.directory) if later > step}
            later = {number: save for number, save in saves.items() if save is not None}
            if not later:
                return None
            rollback = Rollback(step, save_id, later)
            self._issued.add(save_id)
            others = [other for other in self.pending() if other.save_id in self._issued]
            self._write(_Record(self.abandoned(), [*others, rollback]))
            return rollback

    def finish(self, saved: int, rollback: Rollback | None) -> None:
        """After the commit of a step, abandon what its rollback names, and delete abandoned steps before it."""
        with self._lock:
            record = self._read()
            if not record.steps and not record.pending:
                return
            gone = {**self.abandoned(), **(rollback.steps if rollback is not None else {})}
            left = {step: save for step, save in gone.items() if self.save_of(step) == save}
            pending = [other for other in record.pending if other.save_id in self._issued and other != rollback]
            if left or pending:  # first, so that no deletion can bring a step back
                self._write(_Record(left, pending))
            for step in [step for step in left if step < saved]:
                discard_checkpoint(self._files, self.directory / step_name(step))
                del left[step]
            if not left and not pending:
                self._remove()

    def save_of(self, step: int) -> str | None:
        """The save of a committed step; None if none is committed, or its manifest is damaged."""
        try:
            return read_committed(self.directory / step_name(step)).save_id
        except (FileNotFoundError, CheckpointCorruptError):
            return None

    def _read(self) -> _Record:
        try:
            content = json.loads(read_small_file(self._place))
            pending = [Rollback(int(p["step"]), str(p["save_id"]), _saves(p["steps"])) for p in content["pending"]]
            return _Record(_saves(content["steps"]), pending)
        except FileNotFoundError:
            return _Record({}, [])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorruptError(
                f"{self._place} is damaged, so that it is unknown which steps the run has abandoned; remove it to "
                f"resume from the step with the highest number"
            ) from error

    def _write(self, record: _Record) -> None:
        content = {"steps": record.steps, "pending": [pending._asdict() for pending in record.pending]}
        raw = json.dumps(content).encode()
        if isinstance(self._place, ObjectPath):
            self._place.client.put(self._place.key, raw)
            return
        make_parents(self._files, self._place)
        new = self._place.with_name(f".{SUPERSEDED}-{uuid.uuid4().hex}")
        write_file(self._files, new, raw)
        self._files.rename(new, self._place)
        self._files.sync_dir(self._place.parent)

    def _remove(self) -> None:
        if isinstance(self._place, ObjectPath):
            self._place.client.delete([self._place.key])
        else:
            self._files.remove(self._place)


def _saves(content: Mapping[str, Any]) -> dict[int, str]:
    return {int(step): str(save) for step, save in content.items()}
