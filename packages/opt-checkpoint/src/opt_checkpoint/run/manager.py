"""A series of checkpoints in one directory: finds the newest complete one and removes old ones."""

from __future__ import annotations

import logging
import operator
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Self, SupportsFloat, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from opt_checkpoint.dcp.plan import PlanCache
from opt_checkpoint.disk.checkpoint import first_damage, read_committed, removed, was_removed
from opt_checkpoint.disk.index import StoredFile
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointValueError
from opt_checkpoint.run.async_save import SAVE_TIMEOUT_S, AsyncSaver
from opt_checkpoint.run.best import KeepBest, metric_number, to_details
from opt_checkpoint.run.ranks import Ranks, from_all, from_rank_0, ranks_of, same_everywhere, same_location
from opt_checkpoint.run.save_load import LoadReport, load, save_as
from opt_checkpoint.run.series import Series, committed_steps
from opt_checkpoint.run.torch_optimizer import OptimizerLoadReport, load_optimizer
from opt_checkpoint.run.trainer import Trainer
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.store import AnyPath, Location
from opt_checkpoint.store.paths import reached_from

logger = logging.getLogger(__name__)
T = TypeVar("T")
LOAD_ATTEMPTS = 20  # to load the newest step, if its trainer removes each one before it is read


def step_number(step: int) -> int:
    """Return a step as an int.

    Raises:
        CheckpointingException: it is negative, or not an integer.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise CheckpointValueError(f"step={step!r} must be an integer") from None
    if number < 0:
        raise CheckpointValueError(f"step={number} must not be negative")
    return number


class Closing:
    """A manager that is closed at the end of a `with` block, without replacing the exception of the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"In addition, closing {type(self).__name__} failed: {type(failure).__name__}: {failure}")
            logger.error("closing a %s failed after another error: %s", type(self).__name__, failure)

    def close(self) -> None:
        """Wait, and release what saving in the background needs; raises like `wait`."""
        raise NotImplementedError


class CheckpointManager(Closing):
    """Saves steps, keeps the newest few, and loads the newest complete one.

    All ranks construct it and call its methods together. Only rank 0 lists the directory, so that a rank with a stale
    view of a network file system gets the same answer. Only `save` changes the directory: a manager that is opened to
    load, next to a training run, deletes nothing.

    A run may go back: once it has saved a step, steps with a higher number are abandoned. `latest` and `steps` leave
    them out; they can be loaded by number until the run saves a later step, which deletes them. A run that loads a step
    with this manager may save the later ones again. A damaged step may be saved again too.

    Steps with missing or cut files do not count as kept. The step that was loaded last stays until `keep` later saves
    are committed.

    A series has one trainer. `save` is refused if a step appeared that this manager has not saved and did not see when
    it was opened or last loaded, or if another trainer replaced or abandoned its last one. To continue a series whose
    trainer may still run, open a new manager: after its first save, the other trainer's next save is refused.

    Args:
        directory: parent of the steps, created when needed. A directory, the URL of a place in an object store, or an
            `ObjectPath` for a store with options.
        keep: how many of the newest checkpoints to keep, at least 1.
        keep_every: steps that are multiples of this are never removed; None for none.
        keep_best: how many checkpoints to keep for the `metric` of their save, and whether lower or higher is better;
            None for none. Each is kept until a better one is whole. Metrics are stored with the checkpoints, so another
            process that opens the series with `keep_best` continues with those of before.
        in_background: whether `save` returns after the snapshot.
        process_group: the ranks.
        timeout_s: how long a rank waits for the others during a save in the background.

    Raises:
        ValueError: `keep` or `keep_every` is below 1, or `keep_best` is not a `KeepBest`.
        CheckpointingException: ranks were given different arguments.
    """

    def __init__(
        self,
        directory: AnyPath,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        in_background: bool = True,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        self._group = process_group
        self._ranks = ranks_of(process_group)
        self.directory = same_location(
            self._ranks,
            "opening",
            directory,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            in_background=in_background,
        )
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep={keep}, keep_every={keep_every}: both must be at least 1")
        if not isinstance(keep_best, KeepBest | None):
            raise CheckpointValueError(f"keep_best={keep_best!r} must be a KeepBest, as KeepBest(count=2, mode='min')")
        self._keep = keep
        self._keep_every = keep_every
        self._keep_best = keep_best
        self._timeout_s = timeout_s
        self._in_background = in_background
        self._plans = PlanCache()
        self.saver: AsyncSaver | None = None  # made by the first save: a reader needs none
        self._closed = False
        self.series = Series(self.directory)
        self._loaded: int | None = None  # the step that was loaded last and not saved after
        self._verified: set[str | None] = set()  # saves whose checksums are right
        if self._ranks.rank == 0:  # the only rank that reads and deletes steps
            self.trainer = Trainer(self.series)

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        metric: SupportsFloat | None = None,
        common: Literal["equal", "first_rank"] = "equal",
    ) -> Location:
        """Save a step. In the background, first wait for the previous save and raise its failure.

        A save that is refused raises here, on every rank.

        Once the checkpoint is committed, rank 0 removes older ones that need not be kept, in the background if the save
        is. Checkpoints that cannot be removed are logged and tried again after the next save.

        Args:
            step: number of the step, not negative; each step is saved once.
            state: as for `opt_checkpoint.save`.
            metric: of this step, for `keep_best`; the same on all ranks. A step without one, or with NaN, is not kept
                for it. Of equal metrics, the later step is kept.
            common: as for `opt_checkpoint.save`.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointExistsError: this step already exists, or another trainer saves to this directory.
            CheckpointingException: this save, or the one before, failed.
        """
        step = step_number(step)
        path = self.series.path(step)
        if self._closed:
            raise CheckpointValueError(f"cannot save step {step}: this manager is closed; make a new one")
        number = None if metric is None else metric_number(metric)
        details = {"step": step} if number is None else {"step": step, "metric": to_details(number)}
        self._loaded = None
        save_id = uuid.uuid4().hex
        # Runs once: before a save in the background is started, so that it is refused here, else within the save.
        begin_once = cache(lambda: self.trainer.begin(step, save_id))

        def write(snapshot: ShardedStateDict, _: Location, ranks: Ranks) -> None:
            save_as(
                snapshot,
                path,
                process_group=ranks,
                common=common,
                details=details,
                plans=self._plans,
                save_id=save_id,
                begin=begin_once,
                committed=lambda: self._retire(step, save_id, number),
                metric=number,
            )

        if not self._in_background:
            write(state, path, self._ranks)
            return path
        if self.saver is None:
            self.saver = AsyncSaver(self._group, timeout_s=self._timeout_s)
        return self.saver.start(state, path, write, begin=begin_once, step=step, common=common, metric=number).path

    def wait(self) -> None:
        """Wait for the running save.

        Raises:
            CheckpointingException: the save failed; the same on every rank.
        """
        if self.saver is not None:
            self.saver.wait()

    def close(self) -> None:
        self._closed = True
        if self.saver is not None:
            self.saver.close()

    def latest(self, *, at_most: int | None = None) -> int | None:
        """Return the highest committed step, as seen by rank 0; None if there never was one. First waits for the
        running save.

        Steps that the run has abandoned are left out, and so are those that a load has found damaged. Nothing is
        verified: `load` does that.

        Args:
            at_most: steps with a higher number are ignored.

        Raises:
            CheckpointCorruptError: without `at_most`: there are checkpoints, but all are damaged.
            CheckpointFailedError: the directory cannot be read.
            CheckpointingException: the save that was running failed.
        """
        self.wait()
        find_newest = lambda: self.series.newest(at_most=at_most)
        return from_rank_0(self._ranks, find_newest, f"listing {self.directory}")

    def best(self) -> int | None:
        """Return the step with the best metric, by `keep_best`, as seen by rank 0; None if none has a metric.

        Waits like `latest`. Steps that the run has abandoned, or that are damaged, are left out.

        Raises:
            CheckpointValueError: this manager was opened without `keep_best`.
            CheckpointFailedError: the directory cannot be read.
            CheckpointingException: the save that was running failed.
        """
        rule = self._keep_best
        if rule is None:
            raise CheckpointValueError("best() needs CheckpointManager(..., keep_best=KeepBest(count, mode))")
        self.wait()

        def find_best() -> list[int]:
            series = self.series
            if not self.trainer.has_saved:  # another process may have saved steps again since they were read here
                series = Series(self.directory)
                series.damaged = self.series.damaged
            return series.best(rule)

        return next(iter(from_rank_0(self._ranks, find_best, f"listing {self.directory}")), None)

    def steps(self) -> list[int]:
        """Return all steps with committed and complete checkpoints, in order. Waits and raises like `latest`."""
        self.wait()
        list_steps = lambda: [step for step in committed_steps(self.directory) if not self.series.is_damaged(step)]
        return from_rank_0(self._ranks, list_steps, f"listing {self.directory}")

    def load(self, state: ShardedStateDict, *, step: int | None = None, **options: Any) -> LoadReport:
        """Load a step, by default the newest good one. First waits for the running save.

        Without a number, the ranks first compare all files of the step with their checksums, each a share of them. A
        damaged step is skipped with a warning. Later loads and `latest` skip it too, and it may be saved again. If its
        trainer removes the step during the load, the newest step is loaded again.

        Args:
            state: as for `opt_checkpoint.load`.
            step: number of the step; None for the newest.
            options: as for `opt_checkpoint.load`.

        Raises:
            CheckpointNotFoundError: there is none, or it was removed during the load.
            CheckpointingException: as `opt_checkpoint.load`; or the save that was running failed.
        """
        read = lambda path: load(state, path, process_group=self._group, **options)
        return self._read(read, step, options.get("verify"))

    def load_optimizer(
        self, model: nn.Module, optimizer: Optimizer, *, step: int | None = None, **options: Any
    ) -> OptimizerLoadReport:
        """Load an optimizer, by default from the step that was loaded last, else from the newest good one, as `load`.

        Args:
            model: as for `opt_checkpoint.load_optimizer`.
            optimizer: as for `opt_checkpoint.load_optimizer`.
            step: number of the step; None for the one that was loaded last, unless the run has saved since; a newer
                one may have appeared in the meantime. Without a load before, None is the newest.
            options: as for `opt_checkpoint.load_optimizer`.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointingException: as `opt_checkpoint.load_optimizer`.
        """
        read = lambda path: load_optimizer(model, optimizer, path, process_group=self._group, **options)
        return self._read(read, self._loaded if step is None else step, options.get("verify"))

    def _read(self, read: Callable[[Location], T], step: int | None, verify: str | None) -> T:
        """Read a step: the given one, or the newest good one, and then a newer one if a trainer has removed it.

        Raises:
            CheckpointNotFoundError: there is none, or each of `LOAD_ATTEMPTS` was removed while it was read.
        """
        self.wait()
        same_everywhere(self._ranks, "loading", step=step, verify=verify)  # they decide which exchanges follow
        for attempts_left in reversed(range(LOAD_ATTEMPTS if step is None else 1)):
            number = step
            if step is None:
                number = self.latest() if verify == "none" else self.latest_good()
            if number is None:
                raise CheckpointNotFoundError(f"no committed checkpoint in {self.directory}")
            chosen = step_number(number)
            try:
                report = read(self.series.path(chosen))
            except CheckpointNotFoundError:  # the same on every rank
                self.series.forget(chosen)
                if not attempts_left:
                    raise
            else:
                break

        from_rank_0(self._ranks, lambda: self.trainer.note_loaded(chosen), f"listing {self.directory}")
        self._loaded = chosen
        return report

    def latest_good(self) -> int | None:
        """Return the highest step whose files match their checksums; None if there never was one. Raises like
        `latest`."""
        while (newest := self.latest()) is not None:
            with suppress(CheckpointNotFoundError):  # a newer one is there
                if self.is_good(newest):
                    return newest
        return None

    def is_good(self, step: int) -> bool:
        """Compare the files of a step with their checksums, each rank a share of them.

        If it is damaged, warn; `latest` skips it from now on, and it may be saved again.

        Raises:
            CheckpointNotFoundError: its trainer has removed it; on every rank.
        """

        def read_files() -> tuple[str | None, Location, str | None, dict[str, StoredFile]]:
            try:
                index = read_committed(self.series.path(step))
            except (CheckpointCorruptError, FileNotFoundError) as error:
                return str(error), self.directory, None, {}
            return None, index.path, index.save_id, index.files

        what = f"verifying step {step} of {self.directory}"
        problem, folder, save_id, files = from_rank_0(self._ranks, read_files, what)
        if problem is None and save_id not in self._verified:
            path = reached_from(self.directory, folder)
            share = dict(sorted(files.items())[self._ranks.rank :: self._ranks.size])
            problem = next(filter(None, from_all(self._ranks, lambda: first_damage(path, share), what)), None)
        if problem is None:
            self._verified.add(save_id)
            return True

        def is_gone() -> bool:
            if was_removed(self.series.path(step), save_id):
                self.series.forget(step)
                return True
            return False

        if from_rank_0(self._ranks, is_gone, what):
            raise removed(self.series.path(step))
        self.series.damaged[step] = save_id
        if self._ranks.rank == 0:
            warnings.warn(f"{self.series.path(step)} is damaged and is skipped: {problem}", stacklevel=5)
        return False

    def _retire(self, saved: int, save_id: str, metric: float | None) -> None:
        """Delete all but the newest `keep` steps, the best ones, and `saved`, which was just saved with a metric.

        Steps that were found damaged stay for inspection; the step that was loaded last stays until `keep` later saves
        are committed. In an object store this also removes leftovers of dead saves of other steps. On disks every save
        does that.
        """
        self.trainer.note_saved(saved, save_id)
        self.series.add(saved, metric)
        stays = self.trainer.loaded_step_to_keep(self._keep)
        try:
            self.series.finish(saved, save_id, stays)
            best = [] if self._keep_best is None else self.series.best(self._keep_best)
            self.series.retire(saved, self._keep, self._keep_every, stays.union(best))
        except (OSError, CheckpointCorruptError) as error:
            logger.warning("could not remove old checkpoints of %s: %s", self.directory, error)
