"""Checkpoints in two tiers: frequent ones on the nodes, each copied to another node, and rare durable ones."""

from __future__ import annotations

import logging
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, SupportsFloat, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.names import StrictHandling
from opt_checkpoint.disk.archives import SafeGlobals
from opt_checkpoint.disk.checkpoint import Opened, removed
from opt_checkpoint.disk.data_file import crc32
from opt_checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    CheckpointValueError,
)
from opt_checkpoint.run.async_save import SAVE_TIMEOUT_S, AsyncSaver, background_group
from opt_checkpoint.run.best import KeepBest
from opt_checkpoint.run.manager import LOAD_ATTEMPTS, CheckpointManager, Closing, step_number
from opt_checkpoint.run.ranks import (
    Ranks,
    from_all,
    from_rank_0,
    in_turn,
    leave,
    on_all,
    own_and_all,
    ranks_of,
    same_everywhere,
)
from opt_checkpoint.run.save_load import LoadReport, PathLike
from opt_checkpoint.run.torch_optimizer import OptimizerLoadReport, fill_optimizer
from opt_checkpoint.state.sharded import EMPTY, ShardedStateDict
from opt_checkpoint.store import AnyPath, Location
from opt_checkpoint.store.paths import local_path
from opt_checkpoint.tiers.local_tier import NOTHING, RUN, LocalTier, Verdict, keepers, name_run, run_names, this_node
from opt_checkpoint.tiers.parts import load_part, open_part, plan_part

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ANY_KEYS: Mapping[str, Any] = MappingProxyType({"strict": "ignore_all", "dtype": "cast"})


class Resume(NamedTuple):
    """The checkpoint that a run resumes from.

    Args:
        step: the step.
        tier: the tier that it is read from.
        holders: for the local tier, the rank that provided each rank's part; the rank itself if it was on its own node.
        skipped_reasons: why newer steps, or the other tier, were skipped.
    """

    step: int
    tier: Literal["local", "durable"]
    holders: tuple[int, ...]
    skipped_reasons: tuple[str, ...]


class TieredCheckpointManager(Closing):
    """A series of checkpoints in a local and a durable tier. Resumes from the newest step that is complete in either.

    Every `save` goes to the local tier: each rank writes what it holds to a directory on its node, in the background,
    and sends a copy to a rank on the next node, so the loss of one node loses nothing. Every `durable_every` steps the
    state is saved to the durable tier too, as by `CheckpointManager`.

    The local tier is read by the same number of ranks with the same layout. Its parts belong to one run, which
    `run.json` in the durable directory names; parts of another run are never loaded. A run that has not gone on from a
    local step gets a new name with its first save, so that nodes which come back with later steps do not bring these
    back. All ranks construct it and call its methods together.

    Args:
        local: a directory on each node, as on tmpfs or NVMe; the ranks of a node may share it.
        durable: as for `CheckpointManager`: a directory that all ranks see, or a place in an object store.
        durable_every: minimum number of steps between saves to the durable tier.
        keep_local: how many local steps to keep. One more exists while it is written, and each of them on two nodes.
        keep, keep_every, keep_best: as for `CheckpointManager`, of the durable tier.
        node: names this rank's node; by default the host's name, and the number of the node under `torchrun`.
        process_group: the ranks.
        timeout_s: how long a rank waits for the others during a save in the background.

    Raises:
        ValueError: a number is below 1.
        CheckpointingException: ranks were given different arguments.

    Warns:
        UserWarning: all ranks are on one node: no copies are made, and its loss loses the local tier.
    """

    def __init__(
        self,
        local: PathLike,
        durable: AnyPath,
        *,
        durable_every: int,
        keep_local: int = 1,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | None = None,
        node: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        self._group = process_group
        self._ranks = ranks_of(process_group)
        same_everywhere(self._ranks, "opening", durable_every=durable_every, keep_local=keep_local)
        if durable_every < 1 or keep_local < 1:
            raise ValueError(f"durable_every={durable_every}, keep_local={keep_local}: both must be at least 1")
        self._durable = CheckpointManager(
            durable,
            keep=keep,
            keep_every=keep_every,
            keep_best=keep_best,
            process_group=process_group,
            timeout_s=timeout_s,
        )
        place = lambda: local_path(local, "the local tier")
        name = lambda _: node or this_node()
        self._local_path, nodes = own_and_all(self._ranks, place, name, "opening the local tier")
        self._keepers = keepers(nodes)
        self._durable_every = durable_every
        self._keep_local = keep_local
        self._timeout_s = timeout_s
        if self._keepers is None and self._ranks.rank == 0:
            warnings.warn(
                f"all {self._ranks.size} rank(s) are on one node: the local tier {self._local_path} survives the loss "
                f"of processes, not of the node",
                stacklevel=2,
            )
        self._saver: AsyncSaver | None = None
        self._own_group: dist.ProcessGroup | None = None  # of the savers of both tiers
        self._tier: LocalTier | None = None  # under the name of the run
        self._own_tier: LocalTier | None = None  # where this manager saves; its name is the run's after the first save
        self._last_durable: int | None = None
        self._resume: Resume | None = None
        self._has_loaded = False  # from the local step of `_resume`
        self._closed = False

    def save(self, step: int, state: ShardedStateDict, *, metric: SupportsFloat | None = None) -> bool:
        """Save a step to the local tier, and to the durable one if it is due; in the background.

        Waits for the previous local save, and raises its failure. If later steps exist, the run has gone back: those of
        the local tier are removed, and those of the durable tier are abandoned as by `CheckpointManager`.

        Args:
            step: number of the step, not negative.
            state: as for `opt_checkpoint.save`; it may change as soon as this returns.
            metric: as for `CheckpointManager.save`. It counts if this step is saved to the durable tier.

        Returns:
            Whether the durable tier is saved to.

        Raises:
            CheckpointingException: this save, or the one before, failed; the same on every rank.
        """
        step = step_number(step)
        if self._closed:
            raise CheckpointValueError(f"cannot save step {step}: this manager is closed; make a new one")
        same_everywhere(self._ranks, "saving", step=step)
        if self._saver is None:
            self._own_group = background_group(self._group, self._timeout_s)
            local, durable = in_turn(ranks_of(self._own_group or self._ranks), "local", "durable")
            self._saver = AsyncSaver(local, timeout_s=self._timeout_s)
            self._durable.saver = AsyncSaver(durable, timeout_s=self._timeout_s)
        tier = self._tier_to_write()
        saver = self._saver
        last_durable = self._last_durable
        self._last_durable = None  # looked up again after a failure
        if last_durable is None or last_durable > step:
            last_durable = self._durable.latest(at_most=step) or 0
        is_due = step - last_durable >= self._durable_every
        saver.wait()
        if is_due:  # first, because it may be refused
            self._durable.save(step, state, metric=metric)
            last_durable = step
        series = self._durable.series

        def write(snapshot: ShardedStateDict, _: Location, ranks: Ranks) -> None:
            """Save to the local tier. Later durable steps are abandoned once all ranks have their parts."""
            save = from_rank_0(ranks, lambda: uuid.uuid4().hex, "naming a save")
            what = f"recording step {step} in {series.directory}"

            def begin() -> bool:
                self._durable.trainer.check_alone()
                return series.begin(step, save)

            goes_back = from_rank_0(ranks, begin, what)
            tier.write(ranks, snapshot, step, save)
            if self._tier is not tier:  # before, the run had another name
                from_rank_0(ranks, lambda: name_run(series.store, tier.name), f"naming the run of {series.directory}")
                self._tier = tier
                tier.remove_former()
            if goes_back:

                def abandon_later() -> None:
                    series.finish(step, save)
                    self._durable.trainer.note_gone_back()

                from_rank_0(ranks, abandon_later, f"{what} (it is in the local tier)")

        saver.start(state, tier.place(step, self._ranks.rank), write, step=step)
        self._last_durable = last_durable
        self._resume = None
        self._has_loaded = False
        return is_due

    def wait(self) -> None:
        """Wait for the running saves. Raises CheckpointingException if one failed; the same on every rank."""
        try:
            if self._saver is not None:
                self._saver.wait()
        finally:
            last_durable = self._last_durable
            self._last_durable = None  # looked up again after a failure
            self._durable.wait()
            self._last_durable = last_durable

    def close(self) -> None:
        self._closed = True
        with ExitStack() as last:
            last.callback(self._leave)
            last.callback(self._durable.close)
            if self._saver is not None:
                self._saver.close()

    def _leave(self) -> None:
        group = self._own_group
        self._own_group = None
        if group is not None:
            self._saver = self._durable.saver = None  # sockets are closed with the last reference to the group
            leave(group)

    def find(self, state: ShardedStateDict | None = None) -> Resume | None:
        """Find the newest step that is complete in either tier; None if there never was one.

        Parts of the local tier that are not on their rank's node are fetched from copies, and all of them are compared
        with their checksums. Loads use the same answer until the next save.

        Args:
            state: the state to be loaded. If a local step was saved in another layout, the durable tier is then used
                instead; without a state, its load raises CheckpointMismatchError.

        Raises:
            CheckpointCorruptError: there are checkpoints, but all are damaged.
            CheckpointMismatchError: the local tier is complete, but was saved by another number of ranks or in another
                layout, and no durable checkpoint exists.
            CheckpointFailedError: a tier cannot be read.
        """
        return self._find(state, _ANY_KEYS)

    def _find(self, state: ShardedStateDict | None, rules: Mapping[str, Any]) -> Resume | None:
        """`find`, for a load by these options."""
        same_everywhere(self._ranks, "looking for a step", state="None" if state is None else "given")
        if self._resume is None:
            self.wait()
            self._resume = self._newest()
            if self._ranks.rank == 0 and self._resume is None:
                for reason in self._skipped_reasons:
                    logger.warning("nothing to resume from: %s", reason)
        if state is None or self._resume is None or self._resume.tier == "durable":
            return self._resume
        try:
            with self._opened(self._resume.step) as opened:
                plan_part(self._ranks, ShardedLoadPlanner(state, opened, **rules))
        except CheckpointMismatchError as error:  # of this world's layout
            problem = f"step {self._resume.step} of the local tier: {error}"
            if self._has_loaded:
                raise CheckpointMismatchError(f"{problem}; another part of this step has been loaded already") from None
            durable = self._durable.latest_good()
            if durable is None:
                raise CheckpointMismatchError(f"{problem}; {self._no_durable()}") from None
            self._resume = Resume(durable, "durable", (), (*self._resume.skipped_reasons, problem))
        return self._resume

    def _newest(self) -> Resume | None:
        """Like `find`, but ignores the layout. Records in `_skipped_reasons` why steps were skipped."""
        reasons: list[str] = []
        durable: int | None = None
        damage: CheckpointCorruptError | None = None
        try:
            durable = self._durable.latest()
        except CheckpointCorruptError as error:  # the same on every rank
            damage = error
            reasons.append(f"the durable tier: {error}")
        if self._own_tier is None:  # beside a trainer, which may have named the run anew
            self._tier = None
        tier = self._tier_of_run()
        verdict = NOTHING
        if tier is None:
            reasons.append(f"the local tier: {self._durable.directory} has no {RUN}, so no local part belongs to it")
        else:
            verdict = tier.settle(self._ranks, not_before=durable or 0)
            reasons += verdict.skipped_reasons
            if verdict.local is None:
                verdict = self._unrecorded(tier, durable or 0) or verdict
        self._skipped_reasons = tuple(reasons)
        if verdict.local is not None:
            return Resume(verdict.local.step, "local", verdict.local.holders, self._skipped_reasons)
        if damage is not None:
            raise damage
        if durable is not None:
            try:
                if self._durable.is_good(durable):
                    return Resume(durable, "durable", (), self._skipped_reasons)
            except CheckpointNotFoundError:  # removed by its trainer, which has a newer one
                return self._newest()
            newest = self._newest()  # without the damaged step
            skipped = f"step {durable} of the durable tier is damaged"
            return newest and newest._replace(skipped_reasons=(skipped, *newest.skipped_reasons))
        if verdict.unusable is not None:
            raise CheckpointMismatchError(f"{verdict.unusable}; {self._no_durable()}")
        return None

    def _unrecorded(self, tier: LocalTier, durable: int) -> Verdict | None:
        """The local step of a run that went back and died before the durable tier recorded that it is complete."""
        series = self._durable.series
        for rollback in from_rank_0(self._ranks, lambda: series.read()[1], f"reading {series.directory}"):
            if rollback.step < durable:
                verdict = tier.settle(self._ranks, not_before=rollback.step)
                if verdict.local is not None and verdict.local.save == rollback.save_id:
                    return verdict
        return None

    def _no_durable(self) -> str:
        return (
            f"{self._durable.directory} holds no checkpoint to load instead. Resume as it was saved, or remove "
            f"{self._local_path} to start from the beginning"
        )

    def latest(self, state: ShardedStateDict | None = None) -> int | None:
        """Return the step of `find(state)`."""
        found = self.find(state)
        return None if found is None else found.step

    def load(
        self,
        state: ShardedStateDict,
        *,
        strict: str | StrictHandling = StrictHandling.RAISE_UNEXPECTED,
        dtype: Literal["exact", "cast"] = "exact",
        aliases: Mapping[str, str] = EMPTY,
        safe_globals: SafeGlobals = (),
    ) -> LoadReport:
        """Load the step that `find` returned; calls `find(state)` if it was not called before.

        If another trainer removes that step in the meantime, this raises CheckpointNotFoundError, or finds a newer one
        if `find` was not called before.

        Arguments are as for `opt_checkpoint.load`.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or it was removed.
            CheckpointMismatchError: the local step was saved in another layout, and `find` was called without `state`.
            CheckpointingException: as `opt_checkpoint.load`.
        """
        same_everywhere(self._ranks, "loading", strict=strict, dtype=dtype)
        rules = {"strict": strict, "dtype": dtype, "aliases": aliases, "safe_globals": safe_globals}

        def read(found: Resume) -> LoadReport:
            if found.tier == "durable":
                return self._durable.load(state, step=found.step, **rules)
            with self._opened(found.step) as opened:
                return self._load_part(state, opened, rules)

        return self._read(lambda: self._find(state if self._resume is None else None, rules), read)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> OptimizerLoadReport:
        """Load an optimizer from the step that `find` returned.

        Arguments are as for `opt_checkpoint.load_optimizer`; options are `at`, `on_conflict` and `override`.

        Raises:
            CheckpointingException: as `load`, and as `opt_checkpoint.load_optimizer`.
        """

        def read(found: Resume) -> OptimizerLoadReport:
            if found.tier == "durable":
                return self._durable.load_optimizer(model, optimizer, step=found.step, **options)
            with self._opened(found.step) as opened:
                read_part = lambda wanted: self._load_part(wanted, opened, {})
                return fill_optimizer(model, optimizer, opened, read_part, ranks=self._ranks, **options)

        return self._read(self.find, read)

    def _read(self, find: Callable[[], Resume | None], read: Callable[[Resume], T]) -> T:
        """Read the step that was found before, or find one; that again if its trainer removes it in the meantime.

        Raises:
            CheckpointNotFoundError: there is none; or the step that was found before, or each of `LOAD_ATTEMPTS`, was
                removed.
        """
        attempts = 1 if self._resume is not None else LOAD_ATTEMPTS
        while True:
            try:
                found = find()
                if found is None:
                    raise CheckpointNotFoundError(f"no checkpoint in {self._durable.directory} or {self._local_path}")
                return read(found)
            except CheckpointNotFoundError:  # the same on every rank
                attempts -= 1
                was_found = self._resume is not None
                self._resume = None
                self._has_loaded = False
                if not attempts or not was_found:
                    raise

    @contextmanager
    def _opened(self, step: int) -> Iterator[Opened]:
        """This rank's part of a local step.

        Raises:
            CheckpointNotFoundError: the block failed because a part was removed in the meantime; on every rank.
        """
        tier = self._tier_of_run()
        assert tier is not None  # a local step was found, so the run has a name
        place = tier.place(step, self._ranks.rank)
        what = f"opening step {step} of the local tier"
        try:
            yield on_all(self._ranks, lambda: open_part(place), what)
        except (CheckpointCorruptError, CheckpointStorageError) as error:  # the same on every rank
            if not all(from_all(self._ranks, place.is_dir, what)):
                raise removed(place) from error
            raise

    def _load_part(self, state: ShardedStateDict, opened: Opened, rules: Mapping[str, Any]) -> LoadReport:
        try:
            report = load_part(self._ranks, ShardedLoadPlanner(state, opened, **rules))
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"{error}\nThe local tier loads only with the layout that saved it; if the layout has changed, call "
                f"find(state), which continues with the durable tier"
            ) from error
        self._has_loaded = True
        return report

    def _tier_of_run(self) -> LocalTier | None:
        """The local tier of this run; None where the durable directory names no run."""
        if self._tier is None and (names := self._names()):
            self._tier = self._tier_named(names)
        return self._tier

    def _tier_to_write(self) -> LocalTier:
        """The local tier of a run that goes on from a local step; of another one, under a new name."""
        if self._own_tier is None:
            self._own_tier = self._tier_of_run() if self._has_loaded else None
        if self._own_tier is None:
            new = from_rank_0(self._ranks, lambda: uuid.uuid4().hex, "naming a run")
            self._own_tier = self._tier_named([new, *self._names()])
        return self._own_tier

    def _names(self) -> list[str]:
        what = f"reading the name of the run of {self._durable.directory}"
        return from_rank_0(self._ranks, lambda: run_names(self._durable.series.store), what)

    def _tier_named(self, names: list[str]) -> LocalTier:
        durable = self._durable.directory
        where = str(durable.absolute() if isinstance(durable, Path) else durable)
        place = f"{crc32(where.encode()):08x}"
        return LocalTier(self._local_path, names, place, keep=self._keep_local, keeper_of=self._keepers)
