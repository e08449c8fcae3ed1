"""Saves in the background: takes a snapshot, and writes files later. The next call raises failures, on every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from opt_checkpoint.dcp.plan import PlanCache
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.ranks import Ranks, check_equal, from_all, leave, ranks_of, texts_of
from opt_checkpoint.run.save_load import NO_DETAILS, save_as
from opt_checkpoint.run.staging import Staging
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.store import AnyPath, Location, location_of

SAVE_TIMEOUT_S = 1800.0


class SaveHandle:
    """A running save.

    Args:
        path: path of the checkpoint.
        blocked_s: seconds for which the snapshot blocked training.
    """

    def __init__(self, path: Location, blocked_s: float) -> None:
        self.path, self.blocked_s = path, blocked_s
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> Location:
        """Wait until the checkpoint is committed, and return its path.

        Raises:
            CheckpointingException: the save failed; the same on every rank.
            TimeoutError: it is still running after `timeout_s` seconds.
        """
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"saving {self.path} is still running after {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self.path


class AsyncSaver:
    """Saves in a background thread, one save at a time, with its own process group and staging memory.

    The thread is not a daemon: a process that ends without waiting finishes its save first.

    Args:
        process_group: the ranks that save together; they all construct this together.
        timeout_s: how long a rank waits for the others during a save before it raises; a rank that died is not
            detected earlier.
        once: whether the process group is destroyed at the end of the first save.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | Ranks | None = None,
        *,
        timeout_s: float = SAVE_TIMEOUT_S,
        once: bool = False,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive")
        self._group = background_group(process_group, timeout_s)
        self._ranks = ranks_of(process_group if self._group is None else self._group)
        self._staging, self._plans = Staging(), PlanCache()
        self._last: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self._closed, self._once = False, once

    def save(
        self,
        state: ShardedStateDict,
        path: AnyPath,
        *,
        common: Literal["equal", "first_rank"] = "equal",
        details: Mapping[str, Any] = NO_DETAILS,
    ) -> SaveHandle:
        """Take a snapshot and save it in the background. First waits for the previous save, and raises its failure.

        Args:
            state: as for `save`; it may change as soon as this returns.
            path: as for `save`.
            common: as for `save`.
            details: as for `save`.

        Raises:
            CheckpointingException: the previous save failed, a rank's state cannot be copied, or ranks were given
                different paths or `common`; on every rank. Or this saver is closed.
        """

        def write(snapshot: ShardedStateDict, place: Location, ranks: Ranks) -> None:
            save_as(snapshot, place, process_group=ranks, common=common, details=details, plans=self._plans)

        return self.start(state, path, write, common=common)

    def start(
        self,
        state: ShardedStateDict,
        target: AnyPath,
        write: Callable[[ShardedStateDict, Location, Ranks], object],
        **arguments: object,
    ) -> SaveHandle:
        """Take a snapshot and write it in the background. First waits for the previous save, and raises its failure.

        Args:
            state: as for `save`.
            target: where it is written, for messages and the handle.
            write: called in the background on every rank, with the snapshot, the location of `target`, and the ranks
                with a separate process group.
            arguments: must be the same on all ranks, and so must `target` if there are any.

        Raises:
            CheckpointingException: as `save`.
        """
        if self._closed:
            raise CheckpointValueError(f"cannot save {target}: this saver is closed; make a new one")
        self.wait()
        started = time.perf_counter()
        works: list[Callable[[], object]] = []
        handles: list[SaveHandle] = []

        def take() -> dict[str, str]:
            # The ranks of now: if `close` is interrupted, the thread may run after it.
            place, snapshot, ranks = location_of(target), self._staging.snapshot(state), self._ranks
            works.append(partial(write, snapshot, place, ranks))
            handles.append(SaveHandle(place, time.perf_counter() - started))
            return texts_of({"path": place, **arguments} if arguments else {})

        check_equal("saving", from_all(self._ranks, take, f"taking a snapshot for {target}"))
        self._last = handle = handles[0]

        def work() -> None:
            try:
                works.pop()()  # which had the only references to the snapshot and the group
            except BaseException as raised:  # raised by the next call of `save`, `wait` or `close`
                handle._error = raised
            if self._once:
                self._leave()
            handle._finished.set()

        self._thread = threading.Thread(target=work, name=f"opt-checkpoint {target}")
        self._thread.start()
        return handle

    def wait(self) -> None:
        """Wait for the last save; raises its failure once, on every rank.

        Raises:
            CheckpointingException: it failed.
        """
        if self._thread is not None:
            self._thread.join()
        last, self._last = self._last, None  # only now: Ctrl-C may have ended the line before
        if last is not None:
            last.wait()

    @property
    def busy(self) -> bool:
        """Whether a save is running."""
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        """Wait for the last save, and destroy the process group; all ranks call this together.

        Raises:
            CheckpointingException: the last save failed; the group is destroyed nevertheless.
        """
        try:
            self.wait()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        group, self._group = self._group, None
        self._ranks = Ranks()  # the group's sockets are closed with the last reference to it
        if group is not None:
            leave(group)


def background_group(process_group: dist.ProcessGroup | Ranks | None, timeout_s: float) -> dist.ProcessGroup | None:
    """A gloo group of the same ranks, so that messages of the background thread are separate from those of training.

    None for one rank.
    """
    if isinstance(process_group, Ranks) or ranks_of(process_group).size == 1:
        return None
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    group: dist.ProcessGroup | None = dist.new_group(
        ranks=ranks,
        backend="gloo",
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=process_group is not None,
    )
    if group is None:
        raise CheckpointValueError("this rank is not in the process group that saves")
    return group


def async_save(
    state: ShardedStateDict,
    path: AnyPath,
    *,
    saver: AsyncSaver | None = None,
    process_group: dist.ProcessGroup | None = None,
    common: Literal["equal", "first_rank"] = "equal",
    details: Mapping[str, Any] = NO_DETAILS,
) -> SaveHandle:
    """Save in the background; the state may change as soon as this returns.

    Args:
        state: as for `save`.
        path: as for `save`.
        saver: keeps group and memory from one save to the next, and raises the failure of the previous save. Without
            one, each call creates a new one, which releases its group when the save has ended, and only the handle
            reports a failure.
        process_group: the ranks that save, if `saver` is None.
        common: as for `save`.
        details: as for `save`.

    Returns:
        A handle to wait on.

    Raises:
        CheckpointingException: as `AsyncSaver.save`.
    """
    if saver is not None:
        return saver.save(state, path, common=common, details=details)
    single = AsyncSaver(process_group, once=True)
    try:
        return single.save(state, path, common=common, details=details)
    except BaseException:
        single.close()
        raise
