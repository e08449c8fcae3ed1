"""A series of checkpoints in one directory: finds the newest complete one and removes old ones."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from opt_checkpoint.dcp.plan_cache import PlanCache
from opt_checkpoint.disk.detect import has_commit, read_committed
from opt_checkpoint.disk.files import Files, LocalFiles
from opt_checkpoint.disk.object_target import discard_checkpoint, remove_leftovers_below
from opt_checkpoint.disk.verify import check_sizes
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException, CheckpointNotFoundError
from opt_checkpoint.objects.path import AnyPath, Location, ObjectPath, location_of, subdirectories
from opt_checkpoint.run.async_save import SAVE_TIMEOUT_S, AsyncSaver
from opt_checkpoint.run.closing import Closing
from opt_checkpoint.run.ranks import agreed, ranks_of, same_location
from opt_checkpoint.run.save_load import LoadReport, load, save
from opt_checkpoint.run.torch_optimizer import OptimizerLoadReport, load_optimizer
from opt_checkpoint.state.sharded import ShardedStateDict

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """Name of the directory of a step, such as `step-000000100`; names sort like their numbers."""
    return f"step-{step:09d}"


def committed_steps(directory: AnyPath) -> list[int]:
    """The steps whose checkpoint is committed and complete, by its manifest and file sizes, in order.

    A damaged checkpoint is skipped with a warning in the log.

    Raises:
        OSError: a directory, file or object cannot be read, so that it is unknown whether it holds a checkpoint.
    """
    return [step for step, path in named_steps(location_of(directory)) if _is_whole(path)]


def latest_step(directory: AnyPath) -> int | None:
    """The newest committed and complete step; None if no checkpoint was ever committed. Older ones are not read.

    Raises:
        CheckpointCorruptError: there are checkpoints, but all are damaged.
        OSError: as `committed_steps`.
    """
    damaged = []
    for step, path in reversed(named_steps(location_of(directory))):
        if _is_whole(path):
            return step
        if has_commit(path):
            damaged.append(path.name)
    if damaged:
        raise CheckpointCorruptError(
            f"every checkpoint in {directory} is damaged: {', '.join(damaged)}; verify them, or move them away to "
            f"start from the beginning"
        )
    return None


def named_steps(directory: Location) -> list[tuple[int, Location]]:
    """Step and path of every directory that is named like a step, complete or not, in order."""
    found: list[tuple[int, Location]] = []
    for entry in subdirectories(directory):
        match = _STEP.fullmatch(entry.name)
        if match and entry.name == step_name(int(match[1])):
            found.append((int(match[1]), entry))
    return sorted(found, key=lambda named: named[0])


def _is_whole(path: Location) -> bool:
    try:
        check_sizes(read_committed(path))
    except FileNotFoundError:
        return False
    except CheckpointCorruptError as error:
        logger.warning("skipping %s: %s", path, error)
        return False
    return True


class CheckpointManager(Closing):
    """Saves steps, keeps the newest few, and loads the newest complete one.

    All ranks construct it and call its methods together. Only rank 0 lists the directory, so that a rank with a stale
    view of a network file system gets the same answer. Only `save` changes the directory: a manager that is opened to
    load, next to a training run, deletes nothing.

    Steps are compared by number. A run that goes back to an older step keeps the newer ones, and `latest` finds them:
    remove them, or save to another directory.

    Args:
        directory: parent of the steps, created when needed. A directory, the URL of a place in an object store, or an
            `ObjectPath` for a store with options.
        keep: how many of the newest checkpoints to keep, at least 1.
        keep_every: steps that are multiples of this are never removed; None for none.
        in_background: whether `save` returns after the snapshot.
        process_group: the ranks.
        files: the file system; the local one by default.
        timeout_s: how long a rank waits for the others during a save in the background.

    Raises:
        ValueError: `keep` or `keep_every` is below 1.
        CheckpointingException: ranks were given different arguments.
    """

    def __init__(
        self,
        directory: AnyPath,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        in_background: bool = True,
        process_group: dist.ProcessGroup | None = None,
        files: Files | None = None,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        self._group, self._ranks = process_group, ranks_of(process_group)
        own = {"keep": keep, "keep_every": keep_every, "in_background": in_background}
        self.directory = same_location(self._ranks, "opening", directory, **own)
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep={keep}, keep_every={keep_every}: both must be at least 1")
        self._keep, self._keep_every, self._timeout_s = keep, keep_every, timeout_s
        self._files: Files = files or LocalFiles()
        self._in_background = in_background
        self._plans = PlanCache()
        self._saver: AsyncSaver | None = None  # made by the first save: a reader needs none
        self._closed = False

    def save(self, step: int, state: ShardedStateDict, *, common: Literal["equal", "first_rank"] = "equal") -> Location:
        """Save a step. In the background, first wait for the previous save and raise its failure.

        Once the checkpoint is committed, rank 0 removes older ones that need not be kept, in the background if the save
        is. Checkpoints that cannot be removed are logged and tried again after the next save.

        Args:
            step: number of the step, not negative; each step is saved once.
            state: as for `opt_checkpoint.save`.
            common: as for `opt_checkpoint.save`.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointExistsError: this step already exists.
            CheckpointingException: this save, or the one before, failed.
        """
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        path = self.directory / step_name(step)
        details = {"step": step}
        if self._closed:
            raise CheckpointingException(f"cannot save step {step}: this manager is closed; make a new one")
        if not self._in_background:
            save(
                state,
                path,
                process_group=self._group,
                common=common,
                details=details,
                files=self._files,
                plans=self._plans,
            )
            agreed(self._ranks, lambda: self._retire(step), f"removing old checkpoints ({path} is committed)")
            return path
        if self._saver is None:
            self._saver = AsyncSaver(self._group, files=self._files, timeout_s=self._timeout_s)
        after = partial(self._retire, step) if self._ranks.rank == 0 else None
        return self._saver.save(state, path, common=common, details=details, after=after).path

    def wait(self) -> None:
        """Wait for the running save.

        Raises:
            CheckpointingException: the save failed; the same on every rank.
        """
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait, and release what saving in the background needs; raises like `wait`."""
        self._closed = True
        try:
            self.wait()
        finally:
            if self._saver is not None:
                self._saver.close()

    def latest(self) -> int | None:
        """The newest step whose checkpoint is committed and complete, as seen by rank 0; None if there never was one.

        Raises:
            CheckpointCorruptError: there are checkpoints, but all are damaged.
            CheckpointFailedError: the directory or a file in it cannot be read.
        """
        return agreed(self._ranks, lambda: latest_step(self.directory), f"listing {self.directory}")

    def steps(self) -> list[int]:
        """All steps with committed and complete checkpoints, in order."""
        return agreed(self._ranks, lambda: committed_steps(self.directory), f"listing {self.directory}")

    def load(self, state: ShardedStateDict, *, step: int | None = None, **options: Any) -> LoadReport:
        """Load a step, by default the newest complete one.

        Args:
            state: as for `opt_checkpoint.load`.
            step: number of the step; None for the newest.
            options: as for `opt_checkpoint.load`.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointingException: as `opt_checkpoint.load`.
        """
        return load(state, self._path_of(step), process_group=self._group, **options)

    def load_optimizer(
        self, model: nn.Module, optimizer: Optimizer, *, step: int | None = None, **options: Any
    ) -> OptimizerLoadReport:
        """Load an optimizer from a step, by default the newest complete one.

        Args:
            model: as for `opt_checkpoint.load_optimizer`.
            optimizer: as for `opt_checkpoint.load_optimizer`.
            step: number of the step; None for the newest.
            options: as for `opt_checkpoint.load_optimizer`.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointingException: as `opt_checkpoint.load_optimizer`.
        """
        return load_optimizer(model, optimizer, self._path_of(step), process_group=self._group, **options)

    def _path_of(self, step: int | None) -> Location:
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise CheckpointNotFoundError(f"no committed checkpoint in {self.directory}")
        return self.directory / step_name(chosen)

    def _retire(self, saved: int) -> None:
        """Delete all but the newest `keep` complete checkpoints; damaged ones stay for inspection.

        In an object store this also removes leftovers of dead saves of other steps. On disks every save does that.

        Args:
            saved: the step just saved, which stays; a run that went back also has newer steps.
        """
        try:
            if isinstance(self.directory, ObjectPath):
                remove_leftovers_below(self.directory, self.directory / step_name(saved))
            for step in committed_steps(self.directory)[: -self._keep]:
                if step != saved and (self._keep_every is None or step % self._keep_every):
                    discard_checkpoint(self._files, self.directory / step_name(step))
        except (OSError, CheckpointCorruptError) as error:
            logger.warning("could not remove old checkpoints of %s: %s", self.directory, error)
