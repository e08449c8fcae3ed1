"""Saving and loading a nested state of sharded types, all ranks together."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch.distributed as dist

from opt_checkpoint.dcp.global_plan import AssignedParts
from opt_checkpoint.dcp.load_planner import DtypeRule, ShardedLoadPlanner
from opt_checkpoint.dcp.local_contents import LocalContents
from opt_checkpoint.dcp.plan_cache import Offer, PlanCache
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.dcp.save_planner import Common, Planned, ShardedSavePlanner
from opt_checkpoint.dcp.stored_names import NESTED_KEYS
from opt_checkpoint.dcp.strictness import StrictHandling
from opt_checkpoint.dcp.writer import CheckpointWriter
from opt_checkpoint.disk.detect import Opened, open_checkpoint
from opt_checkpoint.disk.index import Kind
from opt_checkpoint.disk.stored_objects import SafeGlobals
from opt_checkpoint.disk.verify import check_sizes
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.ranks import Ranks, agreed, everyone, from_everyone, ranks_of, same_location, through_first
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.store import AnyPath, Location
from opt_checkpoint.store.paths import reached_from

PathLike: TypeAlias = str | os.PathLike[str]  # of files that are converted
Verify: TypeAlias = Literal["sizes", "chunks", "none"]
_CHECKS: Mapping[str, Literal["reading", "before", "never"]] = MappingProxyType(
    {"sizes": "reading", "chunks": "before", "none": "never"}
)
NO_ALIASES: Mapping[str, str] = MappingProxyType({})
NO_DETAILS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of a load.

    Args:
        state: the requested state, with tensors, objects and plain values in place of their descriptions.
        missing: keys and plain values that this rank requested and that are not stored.
        unexpected: stored keys and plain values that no rank requested; the same on all ranks.
        cast: keys whose stored dtype was converted.
        kind: who wrote the checkpoint.
        bytes_wanted: bytes of stored values that this rank requested.
        bytes_read: bytes that were read for them.
    """

    state: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]
    kind: Kind
    bytes_wanted: int
    bytes_read: int

    @classmethod
    def of(cls, planner: ShardedLoadPlanner, reader: CheckpointReader) -> LoadReport:
        """The report of a finished load by this planner and reader."""
        return cls(
            state=planner.assembled,
            missing=tuple(planner.missing),
            unexpected=planner.unexpected,
            cast=tuple(planner.cast),
            kind=reader.index.kind,
            bytes_wanted=reader.count.wanted,
            bytes_read=reader.count.read,
        )


def save(
    state: ShardedStateDict,
    path: AnyPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    common: Literal["equal", "first_rank"] = "equal",
    details: Mapping[str, Any] = NO_DETAILS,
    plans: PlanCache | None = None,
) -> None:
    """Save a state as a new checkpoint; all ranks of the group call this together.

    Every element is written once, by a rank that holds it; plain values once, by rank 0. When this returns on any rank,
    the checkpoint is complete and survives a power loss. An error is raised on every rank and leaves no checkpoint.
    One exception: if only the last sync fails, the checkpoint exists, and the message says so.

    Args:
        state: nested dicts of `ShardedTensor`, `ShardedTensorFactory`, `ShardedObject`, `LocalNonpersistentObject` and
            plain values (what `torch.load(weights_only=True)` accepts). Plain tensors must be equal and on all ranks;
            `sharded_like(key, tensor)` describes one that only some ranks have.
        path: the checkpoint's directory, on a file system that all ranks share, or its place in an object store: a URL,
            or an `ObjectPath` for a store with options. It must not exist. The same on all ranks.
        process_group: the ranks that save; None for all, or for this process alone without torch.distributed.
        common: what to do if a plain value differs between ranks: refuse, or store rank 0's.
        details: recorded in the manifest for people, as JSON.
        plans: caches the plan of this save for the next one by the same ranks. It is reused only if keys, dtypes,
            shapes and placements are unchanged on all ranks.

    Raises:
        CheckpointExistsError: something is at `path`.
        CheckpointingException: the states do not fit together (a hole, an overlap, other shapes), or cannot be stored;
            or ranks were given different paths or `common`.
        CheckpointFailedError: a rank failed for another reason; `.causes` has an exception for each such rank. It is an
            OSError too, with its errno, if a file system or store failed (`CheckpointStorageError`).
    """
    how = SaveAs(uuid.uuid4().hex)
    save_as(state, path, how, process_group=process_group, common=common, details=details, plans=plans)


class SaveAs(NamedTuple):
    """How rank 0 commits a save.

    Args:
        save_id: 32 hexadecimal digits that name the save.
        replace: whether an existing checkpoint is replaced by the commit.
    """

    save_id: str
    replace: bool = False


def save_as(
    state: ShardedStateDict,
    path: AnyPath,
    how: SaveAs,
    *,
    process_group: dist.ProcessGroup | None,
    common: Literal["equal", "first_rank"],
    details: Mapping[str, Any],
    plans: PlanCache | None,
) -> None:
    """`save`, whose commit may replace a checkpoint. Arguments and errors as for `save`."""
    ranks = ranks_of(process_group)
    target = same_location(ranks, "saving", path, common=common)
    writer = CheckpointWriter(
        target,
        save_id=how.save_id,
        details=MappingProxyType({"ranks": ranks.size, NESTED_KEYS: True, **details}),
        replace=how.replace,
    )
    what = f"saving {target}"
    planner = ShardedSavePlanner(state, common=Common(common), cache=plans)

    def offer() -> Offer:
        _check_details(details)
        return planner.offer(ranks.rank)

    planner.accept(from_everyone(ranks, offer, what))
    carry_out_save(ranks, planner, writer, what)


def _check_details(details: Mapping[str, Any]) -> None:
    """Raise CheckpointingException for a detail that is not JSON, before anything is written."""
    for name, value in details.items():
        try:
            json.dumps({name: value}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointValueError(
                f"details[{name!r}] is {value!r:.80} ({type(value).__name__}), which JSON cannot represent: {error}; "
                f"pass numbers, text, lists and dicts of Python, such as int(step)"
            ) from error


class Writer(Protocol):
    """Writes one save to a temporary directory."""

    @property
    def temporary(self) -> Location:
        """The directory."""

    def begin(self, planned: Planned) -> list[Any]:
        """On rank 0, create the directory; returns the message for each rank."""

    def write_data(self, message: Any, planner: ShardedSavePlanner) -> Any:
        """Write the parts of this rank; returns what rank 0 must know of them."""

    def finish(self, written: list[Any]) -> None:
        """On rank 0, complete the save after all ranks have written; gets what each rank has returned."""

    def abandon(self) -> None:
        """Remove it."""


def carry_out_save(
    ranks: Ranks,
    planner: ShardedSavePlanner,
    writer: Writer,
    what: str,
    *,
    then: Callable[[], object] = lambda: None,
) -> None:
    """Plan a save and write it; all ranks call this together. If it fails, written files are removed.

    Args:
        ranks: those that save.
        planner: of this rank.
        writer: of this rank.
        what: named in errors.
        then: called on every rank after all of them have written.

    Raises:
        CheckpointingException: as `save`.
    """

    def assign(contents: list[LocalContents]) -> list[tuple[AssignedParts | None, Any]]:
        assigned, planned = planner.create_global_plan(contents)
        return list(zip(assigned, writer.begin(planned), strict=True))

    def write() -> Any:
        planner.finish_plan(assigned)
        return writer.write_data(message, planner)

    def finish(written: list[Any]) -> list[None]:
        writer.finish(written)
        return [None] * ranks.size

    try:
        assigned, message = through_first(ranks, planner.create_local_plan, assign, what)
        through_first(ranks, write, finish, what)
        then()
    except BaseException:
        if ranks.rank == 0:
            _abandon(writer)
        raise


def _abandon(writer: Writer) -> None:
    """Clean up after a failed save. The next save removes files that cannot be removed now."""
    try:
        writer.abandon()
    except OSError as error:
        warnings.warn(f"could not remove {writer.temporary}: {error}; the next save will try again", stacklevel=4)


def load(
    state: ShardedStateDict,
    path: AnyPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: str | StrictHandling = StrictHandling.RAISE_UNEXPECTED,
    dtype: Literal["exact", "cast"] = "exact",
    verify: Verify = "sizes",
    aliases: Mapping[str, str] = NO_ALIASES,
    safe_globals: SafeGlobals = (),
    threads: int = 4,
) -> LoadReport:
    """Load a checkpoint into the memory of a state, however it was sharded when saved; all ranks call this together.

    Keys, shapes, dtypes, coverage, and what `verify` requires are checked on all ranks before any memory is written.
    Only the tensors of `state` are written (tensors without data get memory). Plain values and objects are in the
    report's `state`. After an error during reading, for example of the disk, tensors may be partly overwritten; the
    message then says so.

    Args:
        state: what to load, in the form that `save` takes. Plain values select which of the stored ones to return.
        path: a checkpoint of opt-checkpoint, in a directory or at the URL of an object store (`ObjectPath` for a store
            with options); a stock DCP directory, or a `torch_dist` directory of Megatron-Core.
        process_group: the ranks that load.
        strict: what to do about keys on one side only: a `StrictHandling` or its name.
        dtype: whether a different stored dtype is an error or is converted.
        verify: `"sizes"`: check before any memory is written that every file exists, has its size, and belongs to this
            save; compare values with their checksums while reading. `"chunks"`: also compare every chunk that a rank
            needs with its checksums before any memory is written, which reads it twice. `"none"`: neither. Stock and
            Megatron-Core directories have no checksums to compare.
        aliases: alternative prefixes, for keys that are not stored under their own name.
        safe_globals: classes and functions that stored objects and plain values may use, as for
            `torch.serialization.safe_globals`; `NUMPY_GLOBALS` for numpy arrays. Values that need others are not
            loaded, and requesting one is an error.
        threads: number of concurrent reads of a rank.

    Returns:
        A report of what was loaded and what was not.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointCorruptError: it is damaged.
        CheckpointKeyError: keys do not fit, under `strict`.
        CheckpointMismatchError: shapes, dtypes or coverage do not fit.
        CheckpointingException: ranks were given different paths, `strict`, `dtype` or `verify`.
        CheckpointFailedError: a rank failed for another reason.
    """
    ranks = ranks_of(process_group)
    source = same_location(ranks, "loading", path, strict=strict, dtype=dtype, verify=verify)
    what = f"loading {source}"
    opened = with_client(agreed(ranks, lambda: open_checked(source, verify, safe_globals), what), source)
    planner = ShardedLoadPlanner(
        state,
        opened.index,
        opened.common,
        strict=StrictHandling.parse(strict),
        dtype=DtypeRule.parse(dtype),
        aliases=aliases,
        safe_globals=safe_globals,
    )
    return carry_out_load(ranks, planner, reader_of(opened, verify, threads=threads))


def reader_of(opened: Opened, verify: Verify, *, threads: int = 4) -> CheckpointReader:
    """The reader of an open checkpoint; arguments as for `load`."""
    return CheckpointReader(opened.index, threads=threads, check=_CHECKS[verify])


def carry_out_load(ranks: Ranks, planner: ShardedLoadPlanner, reader: CheckpointReader) -> LoadReport:
    """Plan a load, check it, and read. All ranks call this together, with the same index.

    Raises:
        CheckpointingException: as `load`.
    """
    what = f"loading {reader.index.path}"

    def plan() -> bytes:
        asked = planner.create_local_plan()
        reader.verify(planner)
        return asked

    unexpected = through_first(ranks, plan, lambda asked: [planner.unexpected_of(asked)] * ranks.size, what)
    return read_planned(ranks, planner, reader, unexpected)


def read_planned(
    ranks: Ranks, planner: ShardedLoadPlanner, reader: CheckpointReader, unexpected: tuple[str, ...]
) -> LoadReport:
    """Read what all ranks have planned; all ranks call this together.

    Raises:
        CheckpointingException: as `load`.
    """

    def read() -> None:
        planner.finish_plan(unexpected)
        reader.read_data(planner)
        planner.assemble()

    what = f"loading {reader.index.path} (while reading: tensors may be partly overwritten, load again before use)"
    everyone(ranks, error_of(read), what)
    return LoadReport.of(planner, reader)


def with_client(opened: Opened, source: Location) -> Opened:
    """Replace the client of a checkpoint that rank 0 opened by this rank's own client of the object store."""
    return replace(opened, index=replace(opened.index, path=reached_from(source, opened.index.path)))


def open_checked(path: Location, verify: Verify, safe_globals: SafeGlobals = ()) -> Opened:
    """Open a checkpoint, and check its files as `verify` of `load` requires."""
    opened = open_checkpoint(path, safe_globals=safe_globals)
    if verify not in _CHECKS:
        raise CheckpointValueError(f"verify={verify!r}; allowed: {', '.join(_CHECKS)}")
    if verify != "none":
        check_sizes(opened.index)
    return opened


def error_of(compute: Callable[[], object]) -> BaseException | None:
    """Return the exception that a call raises, or None. `everyone` raises KeyboardInterrupt as itself."""
    try:
        compute()
    except BaseException as error:
        return error
    return None
