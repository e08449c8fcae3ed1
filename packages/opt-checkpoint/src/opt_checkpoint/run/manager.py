"""A series of checkpoints in one directory: the newest whole one is found, the oldest go."""

from __future__ import annotations

import logging
import os
import re
import uuid
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from opt_checkpoint.dcp.writer import is_leftover, remove_leftover
from opt_checkpoint.disk.files import Files, LocalFiles, discard
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.disk.verify import check_sizes
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from opt_checkpoint.run.async_save import AsyncSaver
from opt_checkpoint.run.ranks import agreed, ranks_of, same_everywhere
from opt_checkpoint.run.save_load import LoadReport, load, save
from opt_checkpoint.state.sharded import ShardedStateDict

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """Name of the directory of a step: `step-000000100`, which sorts as the numbers do."""
    return f"step-{step:09d}"


def committed_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps whose checkpoint is committed and whole by its manifest and file sizes, in order.

    A directory that cannot be read, or holds something else, is no step; nothing but the directories decides.
    """
    where = Path(directory)
    if not where.is_dir():
        return []
    found = []
    for entry in where.iterdir():
        match = _STEP.fullmatch(entry.name)
        if match and entry.name == step_name(int(match[1])) and _is_whole(entry):
            found.append(int(match[1]))
    return sorted(found)


def _is_whole(path: Path) -> bool:
    try:
        check_sizes(read_manifest(path))
    except FileNotFoundError:
        return False
    except (CheckpointCorruptError, OSError) as error:
        logger.warning("%s is passed over: %s", path, error)
        return False
    return True


class CheckpointManager:
    """Saves steps, keeps the newest few, and loads the newest whole one.

    The name is the reference's for this role. All ranks construct it and call its methods together; rank 0 looks at
    the directory, so that a rank with a stale view of a network file system sees what the others see.

    Args:
        directory: where the steps are; made when needed.
        keep: how many of the newest checkpoints to keep, at least 1.
        keep_every: steps that are multiples of this are kept for good; None for none.
        in_background: whether `save` returns after the snapshot.
        process_group: the ranks.
        files: the file system; the local one by default.

    Raises:
        ValueError: `keep` or `keep_every` is below 1.
        CheckpointingException: ranks were given different arguments.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        in_background: bool = True,
        process_group: dist.ProcessGroup | None = None,
        files: Files | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._group, self._ranks = process_group, ranks_of(process_group)
        own = {"keep": keep, "keep_every": keep_every, "in_background": in_background}
        same_everywhere(self._ranks, "opening", path=self.directory, **own)
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(
                f"keep={keep}, keep_every={keep_every}: both must be at least 1; one checkpoint always stays"
            )
        self._keep, self._keep_every = keep, keep_every
        self._files: Files = files or LocalFiles()
        self._saver = AsyncSaver(process_group, files=files) if in_background else None
        agreed(self._ranks, self.remove_leftovers, f"opening {self.directory}")

    def save(self, step: int, state: ShardedStateDict, *, common: Literal["equal", "first_rank"] = "equal") -> Path:
        """Save a step; in the background, first wait for the save before and raise its failure.

        Older checkpoints are removed when a newer one is committed: by this call in the foreground, by the next call
        or `wait` in the background.

        Args:
            step: number of the step, not negative; each is saved once.
            state: as for `opt_checkpoint.save`.
            common: as for `opt_checkpoint.save`.

        Returns:
            Where the checkpoint is or will be.

        Raises:
            CheckpointExistsError: this step is there already.
            CheckpointingException: this save, or the one before, failed.
        """
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        path = self.directory / step_name(step)
        details = {"step": step}
        if self._saver is None:
            save(state, path, process_group=self._group, common=common, details=details, files=self._files)
            agreed(self._ranks, self._retire, f"removing old checkpoints of {self.directory}")
            return path
        self.wait()
        return self._saver.save(state, path, common=common, details=details).path

    def wait(self) -> None:
        """Wait for the save under way, then remove what is old.

        Raises:
            CheckpointingException: the save failed; the same on every rank.
        """
        if self._saver is not None:
            self._saver.wait()
        agreed(self._ranks, self._retire, f"removing old checkpoints of {self.directory}")

    def close(self) -> None:
        """Wait, and give back what saving in the background needs; raises as `wait`."""
        try:
            self.wait()
        finally:
            if self._saver is not None:
                self._saver.close()

    def latest(self) -> int | None:
        """The newest step whose checkpoint is committed and whole, as rank 0 sees it; None where there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def steps(self) -> list[int]:
        """All such steps, in order."""
        return agreed(self._ranks, lambda: committed_steps(self.directory), f"listing {self.directory}")

    def load(self, state: ShardedStateDict, *, step: int | None = None, **options: Any) -> LoadReport:
        """Load a step, the newest whole one by default.

        Args:
            state: as for `opt_checkpoint.load`.
            step: which; None for the newest.
            options: as for `opt_checkpoint.load`.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointingException: as `opt_checkpoint.load`.
        """
        chosen = self.latest() if step is None else step
        if chosen is None:
            raise CheckpointNotFoundError(f"no committed checkpoint in {self.directory}")
        return load(state, self.directory / step_name(chosen), process_group=self._group, **options)

    def remove_leftovers(self) -> None:
        """Delete what interrupted saves and deletions left; only directories that are named as ours are touched."""
        if not self.directory.is_dir():
            return
        for entry in sorted(self.directory.iterdir()):
            if is_leftover(entry.name) and _STEP.match(entry.name) and entry.is_dir():
                remove_leftover(self._files, entry, uuid.uuid4().hex)

    def _retire(self) -> None:
        """Delete all but the newest `keep` whole checkpoints; a damaged one is left for its owner to look at."""
        steps = committed_steps(self.directory)
        for step in steps[: -self._keep]:
            if self._keep_every is None or step % self._keep_every:
                discard(self._files, self.directory / step_name(step), uuid.uuid4().hex)
