"""Saves in the background: takes a snapshot, and writes files later. The next call raises failures, on every rank.

A snapshot is in host memory: pinned for tensors of a GPU, in buffers that the next snapshot reuses. Training may change
everything as soon as `async_save` returns, so the values are copied first. Only what this rank holds is copied, view by
view, never the whole storage of a view.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.dcp.plan import PlanCache
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run import unreported
from opt_checkpoint.run.ranks import Ranks, check_equal, leave, own_and_all, ranks_of, texts_of
from opt_checkpoint.run.save_load import save_as
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import EMPTY, Path, ShardedObject, ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tensors import is_dtensor
from opt_checkpoint.state.tree import flatten_state, map_leaves
from opt_checkpoint.store import AnyPath, Location, location_of, target_at

SAVE_TIMEOUT_S = 1800.0


class CudaDevice:
    """What snapshots need of a GPU, whose operations may return before they have run.

    `opt_distributed.comm.device.Device` has the same methods, so its test double, which delays work, can test staging.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """Return the stream on which operations are currently queued."""
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> Any:
        """Return a stream for copies to the host."""
        return self._side

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Return a context in which operations are queued on a stream."""
        return torch.cuda.stream(stream)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised host memory for non-blocking copies, with the shape and dtype of `tensor`."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


@cache
def device_of(device: torch.device) -> CudaDevice | None:
    """Return the streams of a CUDA device; None for a device with synchronous copies to the host."""
    return CudaDevice(device) if device.type == "cuda" else None


class Staging:
    """Host memory for snapshots, allocated once and reused.

    The first snapshot allocates, which costs more than its copy; later ones of the same state only copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[Path, Tensor] = {}
        self._sides: dict[torch.device, Any] = {}  # the copy streams

    def snapshot(self, state: ShardedStateDict) -> ShardedStateDict:
        """Return a copy of a state whose tensors are in this memory; valid until the next snapshot.

        Copies from a GPU run on a separate stream, after the work that is on the current stream at the time of the
        call, and have finished when this returns.

        Args:
            state: what `save` takes. Factories are built before copying; plain values are deep-copied.

        Raises:
            CheckpointingException: the state cannot be flattened.
        """
        flat = flatten_state(state, saves=True)
        used: set[Path] = set()

        def copied(path: Path, tensor: Tensor) -> Tensor:
            used.add(path)
            return self._copy(path, tensor.detach())

        def staged(path: Path, value: Any) -> Any:
            if isinstance(value, ShardedTensorFactory):
                return map_leaves(flat.built[path], lambda inner, piece: staged(path + inner, piece))
            if path in flat.plain and is_dtensor(value):
                return staged(path, flat.tensors[path])
            if isinstance(value, ShardedTensor) and value.data is not None:
                return dataclasses.replace(value, data=copied(path, value.data))
            if path in flat.plain:
                return copied(path, value)
            if isinstance(value, ShardedObject):
                return dataclasses.replace(value, data=copy.deepcopy(value.data))
            return _plain_copy(value)

        snapshot: ShardedStateDict = map_leaves(flat.state, staged, scoped=True)
        for path in self._buffers.keys() - used:
            del self._buffers[path]
        for side in self._sides.values():
            side.record_event().synchronize()
        return snapshot

    def _copy(self, path: Path, source: Tensor) -> Tensor:
        device = device_of(source.device)
        target = self._buffers.get(path)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            with torch.inference_mode(False):  # a save outside of inference mode must be able to write it, too
                if device is None:
                    target = torch.empty(source.shape, dtype=source.dtype, device="cpu")
                else:
                    target = device.pinned_like(source)
            self._buffers[path] = target
        if device is None:
            return target.copy_(source)
        # On the side stream. The state keeps the source alive until `snapshot` has waited for the copy.
        side = self._sides.setdefault(source.device, device.side_stream())
        side.wait_event(device.current_stream().record_event())
        with device.on(side):
            return target.copy_(source, non_blocking=True)


def _plain_copy(value: Any) -> Any:
    """A deep copy in which tensors are on the CPU, detached."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _plain_copy(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain_copy(v) for v in value)
    return copy.deepcopy(value)


class SaveHandle:
    """A running save.

    Args:
        path: path of the checkpoint.
        blocked_s: seconds for which the snapshot blocked training.
        step: number of the step, if the checkpoint is one of a series.
    """

    def __init__(self, path: Location, blocked_s: float, step: int | None = None) -> None:
        self.path = path
        self.blocked_s = blocked_s
        self._step = step
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
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
            unreported.discard(self._finished)
            raise self._error
        return self.path

    def _finish(self, error: BaseException | None) -> None:
        """Note the end of the save. If no call raises its error, the exit of the process prints it as one line."""
        self._error = error
        if error is not None:
            what = "the state" if self._step is None else f"step {self._step}"
            reason = "; ".join(str(error).splitlines())
            text = f"opt-checkpoint: {what} was not saved to {self.path}: {type(error).__name__}: {reason}"
            unreported.add(self._finished, text)
        self._finished.set()


class AsyncSaver:
    """Saves in a background thread, one save at a time, with its own process group and staging memory.

    The thread is not a daemon: a process that ends without waiting finishes its save first. If that fails, it prints
    one line on stderr for each failure that no call has raised, and ends with status 1 instead of 0 (with glibc).

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
        self._staging = Staging()
        self._plans = PlanCache()
        self._last: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._once = once
        self._process = os.getpid()

    def save(
        self,
        state: ShardedStateDict,
        path: AnyPath,
        *,
        common: Literal["equal", "first_rank"] = "equal",
        details: Mapping[str, Any] = EMPTY,
    ) -> SaveHandle:
        """Take a snapshot and save it in the background. First waits for the previous save, and raises its failure.

        Args:
            state: as for `save`; it may change as soon as this returns.
            path: as for `save`.
            common: as for `save`.
            details: as for `save`.

        Raises:
            CheckpointExistsError: something is at `path`.
            CheckpointingException: the previous save failed, a rank's state cannot be copied, or ranks were given
                different paths or `common`; on every rank. Or this saver is closed. Once the script has ended, as in an
                exit handler, a save is not in the background, and raises its own failure.
        """

        def write(snapshot: ShardedStateDict, place: Location, ranks: Ranks) -> None:
            save_as(snapshot, place, process_group=ranks, common=common, details=details, plans=self._plans)

        def check() -> None:
            store, name = target_at(location_of(path))
            store.check_free(name)

        return self.start(state, path, write, begin=check, common=common)

    def start(
        self,
        state: ShardedStateDict,
        target: AnyPath,
        write: Callable[[ShardedStateDict, Location, Ranks], object],
        *,
        begin: Callable[[], object] = lambda: None,
        step: int | None = None,
        **arguments: object,
    ) -> SaveHandle:
        """Take a snapshot and write it in the background. First waits for the previous save, and raises its failure.

        Args:
            state: as for `save`.
            target: where it is written, for messages and the handle.
            write: called in the background on every rank, with the snapshot, the location of `target`, and the ranks
                with a separate process group.
            begin: called on rank 0 before its snapshot; raises an error if the save is refused. The other ranks learn
                of that after theirs.
            step: number of the step, for messages.
            arguments: must be the same on all ranks, and so must `target` if there are any.

        Raises:
            CheckpointingException: as `save`.
        """
        if self._closed:
            raise CheckpointValueError(f"cannot save {target}: this saver is closed; make a new one")
        self.wait()
        started = time.perf_counter()
        # The write, until the thread or an exit before it takes it: the only reference to the snapshot and the group.
        pending: list[Callable[[], object]] = []

        def take() -> SaveHandle:
            if self._ranks.rank == 0:
                begin()
            # The ranks of now: if `close` is interrupted, the thread may run after it.
            place = location_of(target)
            snapshot = self._staging.snapshot(state)
            pending.append(partial(write, snapshot, place, self._ranks))
            return SaveHandle(place, time.perf_counter() - started, step)

        def texts(handle: SaveHandle) -> dict[str, str]:
            return texts_of({"path": handle.path, **arguments} if arguments else {})

        handle, per_rank = own_and_all(self._ranks, take, texts, f"beginning to save {target}")
        check_equal("saving", per_rank)

        def work() -> None:
            error: BaseException | None = None
            if not pending:  # an exit took it
                return
            try:
                pending.pop()()
            except BaseException as raised:  # raised by the next call of `save`, `wait` or `close`
                error = raised
            if self._once:
                self._leave()
            handle._finish(error)

        try:
            self._last = handle
            self._thread = _started(work, f"opt-checkpoint {target}")
        except BaseException as error:  # an exit, as by the handler of a signal
            with suppress(IndexError):  # the thread has taken the work, and finishes it
                pending.pop()
                handle._finish(error)
            raise
        if self._thread is None:
            work()
            self.wait()
        return handle

    def wait(self) -> None:
        """Wait for the last save; raises its failure once, on every rank.

        Raises:
            CheckpointingException: it failed.
        """
        if self._thread is not None:
            self._thread.join()
        last = self._last if self._process == os.getpid() else None  # a forked process has no thread that saves
        self._last = None  # only now: Ctrl-C may have ended the line before
        if last is not None:
            last.wait()

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
        group = self._group
        self._group = None
        self._ranks = Ranks()  # the group's sockets are closed with the last reference to it
        if group is not None:
            leave(group)


def _started(work: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that does the work; None after the end of the script, when Python starts none or does not join it."""
    if not threading.main_thread().is_alive():
        return None
    thread = threading.Thread(target=work, name=name)
    try:
        thread.start()
    except RuntimeError:  # the script has ended in the meantime
        return None
    unreported.watch(thread)
    return thread


def background_group(process_group: dist.ProcessGroup | Ranks | None, timeout_s: float) -> dist.ProcessGroup | None:
    """Return a gloo group of the same ranks, so that messages of the background thread are separate from those of
    training.

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
    details: Mapping[str, Any] = EMPTY,
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
