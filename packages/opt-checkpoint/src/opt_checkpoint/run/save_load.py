"""Saving and loading a nested state of sharded types, all ranks together."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.dcp.layout import LocalContents
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner, whole_tensor
from opt_checkpoint.dcp.names import StrictHandling
from opt_checkpoint.dcp.plan import AssignedParts, CachedPlan, Offer, PlanCache
from opt_checkpoint.dcp.reader import CheckpointReader, Verify
from opt_checkpoint.dcp.saving import (
    Assigned,
    Held,
    Taken,
    agree,
    assign,
    contents_for,
    describe,
    offer_of,
    take,
    to_cache,
)
from opt_checkpoint.dcp.writing import CheckpointWriter
from opt_checkpoint.disk.archives import SafeGlobals
from opt_checkpoint.disk.checkpoint import Opened, check_sizes, open_checkpoint, removed, was_removed
from opt_checkpoint.disk.index import COPIES, PADDED, PATHS, Kind
from opt_checkpoint.disk.main_weights import Moments, refuse_shifted, with_moments
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointValueError, check_choice
from opt_checkpoint.run.ranks import (
    Ranks,
    check_equal,
    from_rank_0,
    on_all,
    own_and_all,
    ranks_of,
    same_location,
    texts_of,
    through_rank_0,
)
from opt_checkpoint.state.sharded import EMPTY, ShardedStateDict
from opt_checkpoint.store import AnyPath, Location, Target, location_of, target_at
from opt_checkpoint.store.paths import reached_from

PathLike: TypeAlias = str | os.PathLike[str]  # of files that are converted


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


def save(
    state: ShardedStateDict,
    path: AnyPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    common: Literal["equal", "first_rank"] = "equal",
    details: Mapping[str, Any] = EMPTY,
    plans: PlanCache | None = None,
) -> None:
    """Save a state as a new checkpoint; all ranks of the group call this together.

    Every element of a tensor, plain ones included, is written once, by a rank that holds it; the other plain values by
    rank 0, as a whole and, for stock readers, each under its key. When this returns on any rank, the checkpoint is
    complete and survives a power loss. An error is raised on every rank and leaves no checkpoint. One exception: if
    only the last sync fails, the checkpoint exists, and the message says so.

    Args:
        state: nested dicts of `ShardedTensor`, `ShardedTensorFactory`, `ShardedObject`, `LocalNonpersistentObject` and
            plain values (what `torch.load(weights_only=True)` accepts). Plain tensors must be equal and on all ranks;
            `sharded_like(key, tensor)` describes one that only some ranks have.
        path: the checkpoint's directory, on a file system that all ranks share, or its place in an object store: a URL,
            or an `ObjectPath` for a store with options. It must not exist. The same on all ranks.
        process_group: the ranks that save; None for all, or for this process alone without torch.distributed.
        common: what to do if a plain value differs between ranks: refuse, or store rank 0's, which must have each that
            another rank has; of a plain tensor, that of the first rank that has it.
        details: recorded in the manifest for people, as JSON.
        plans: caches the plan of this save for the next one by the same ranks. It is reused only if keys, dtypes,
            shapes and placements are unchanged on all ranks.

    Raises:
        CheckpointExistsError: something is at `path`.
        CheckpointingException: the states do not fit together (a hole, an overlap, other shapes), or cannot be stored;
            ranks were given different paths or `common`; or rank 0 lacks a plain value.
        CheckpointFailedError: a rank failed for another reason; `.causes` has an exception for each such rank. It is an
            OSError too, with its errno, if a file system or store failed (`CheckpointStorageError`).
    """
    save_as(state, path, process_group=process_group, common=common, details=details, plans=plans)


def save_as(
    state: ShardedStateDict,
    path: AnyPath,
    *,
    process_group: dist.ProcessGroup | Ranks | None = None,
    common: str = "equal",
    details: Mapping[str, Any] = EMPTY,
    plans: PlanCache | None = None,
    target: Target | None = None,
    save_id: str | None = None,
    begin: Callable[[], bool] = lambda: False,
    committed: Callable[[], object] = lambda: None,
    lists_values: bool = True,
    **arguments: object,
) -> None:
    """`save`, with work of rank 0 in its exchanges; other arguments and errors are as there.

    Args:
        state, path, process_group, common, details, plans: as there.
        target: the store and name of `path`, if it is not the usual one.
        save_id: 32 hexadecimal digits that name the save; rank 0's counts.
        begin: called on rank 0 before anything is written; returns whether the commit replaces an existing checkpoint.
        committed: called on rank 0 after the commit, before other ranks return.
        lists_values: whether each plain value is also stored under its key, and each plain tensor as a tensor, for
            stock readers.
        arguments: must be the same on all ranks too.
    """
    ranks = ranks_of(process_group)

    def new_writer() -> CheckpointWriter:
        for name, value in details.items():  # before anything is written
            if name in (PATHS, COPIES, PADDED):
                raise CheckpointValueError(f"details[{name!r}]: the manifest has an entry of this name; choose another")
            try:
                json.dumps({name: value}, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise CheckpointValueError(
                    f"details[{name!r}] is {value!r:.80} ({type(value).__name__}), which JSON cannot represent: "
                    f"{error}; pass numbers, text, lists and dicts of Python, such as int(step)"
                ) from error
        place = location_of(path)
        replaces = ranks.rank == 0 and begin()
        recorded = {"ranks": ranks.size, **details}
        store, name = target or target_at(place)
        return CheckpointWriter(
            place, store, name, save_id or uuid.uuid4().hex, recorded, replace=replaces, committed=committed
        )

    carry_out_save(
        ranks,
        state,
        new_writer,
        f"saving {path}",
        {"common": common, **arguments},
        policy=common,
        cache=plans,
        lists_values=lists_values,
    )


class Writer(Protocol):
    """Writes one save to a temporary directory."""

    path: Any  # the target, which must be the same on all ranks

    def begin(self, assigned: Assigned) -> Sequence[Any]:
        """Create the directory, on rank 0; return a message for each rank."""

    def write(self, message: Any, taken: Taken) -> Any:
        """Write what this rank has taken; return what rank 0 must know of it."""

    def finish(self, assigned: Assigned, written: Sequence[Any]) -> None:
        """Complete the save, on rank 0, with what `write` has returned on each rank."""

    def abandon(self) -> None:
        """Remove the directory."""


def carry_out_save(
    ranks: Ranks,
    state: ShardedStateDict,
    new_writer: Callable[[], Writer],
    what: str,
    arguments: Mapping[str, object],
    *,
    policy: str = "equal",
    cache: PlanCache | None = None,
    lists_values: bool = True,
    then: Callable[[Any, Held], object] = lambda writer, held: None,
) -> None:
    """Save a state; all ranks call this together. `dcp.saving` has the phases; these are the exchanges between them:

    | collective | what is sent                                  | what rank 0 does before it answers                 |
    |------------|-----------------------------------------------|----------------------------------------------------|
    | -          |                                               | first: `begin` of `save_as`, unless it was called  |
    | all-gather | arguments, fingerprints, cached plan's name   | nothing: each rank compares them                   |
    | gather     | what the rank holds, unless it is cached      | validate, assign, `Writer.begin`                   |
    | scatter    | the parts and objects that the rank writes    | -                                                  |
    | gather     | what the rank has written, after it is synced | `Writer.finish`: check it, write the index, commit |
    | broadcast  | nothing: the save is complete                 | -                                                  |

    Every message may be a failure instead, which all ranks raise. The files of a failed save are removed.

    Args:
        ranks: those that save.
        state: of this rank.
        new_writer: makes the writer of this rank.
        what: named in errors.
        arguments: must be the same on all ranks.
        policy: what to do if plain values differ between ranks, as `common` of `save`.
        cache: the plan of an earlier save, which is replaced.
        lists_values: as `save_as`.
        then: called on every rank after the writer has finished on rank 0, with its writer and what it holds.

    Raises:
        CheckpointingException: as `save`.
    """
    cached = CachedPlan() if cache is None else cache.plan
    of_all: list[Assigned] = []  # on rank 0

    def begin() -> tuple[Writer, Held]:
        writer = new_writer()
        return writer, describe(state, ranks.rank, policy=policy, cached=cached, lists_values=lists_values)

    def offer(own: tuple[Writer, Held]) -> Offer:
        writer, held = own
        return offer_of(held, texts_of({"path": writer.path, **arguments}))

    def plan(contents: list[LocalContents]) -> list[tuple[AssignedParts | None, Any]]:
        assigned = assign(held, agreed, contents, lists_values=lists_values)
        of_all.append(assigned)
        return list(zip(assigned.to_ranks, writer.begin(assigned), strict=True))

    def write() -> Any:
        assigned = of_all[0] if of_all else None
        taken = take(held, parts, assigned)
        if cache is not None:
            cache.plan = to_cache(agreed, taken, assigned)
        return writer.write(message, taken)

    (writer, held), offers = own_and_all(ranks, begin, offer, what)
    check_equal(what.partition(" ")[0], [offer.arguments for offer in offers])
    agreed = agree(policy, offers)
    try:
        parts, message = through_rank_0(ranks, lambda: contents_for(held, agreed), plan, what, each=True)
        through_rank_0(ranks, write, lambda written: writer.finish(of_all[0], written), what)
        then(writer, held)
    except BaseException:
        if ranks.rank == 0:
            try:
                writer.abandon()
            except OSError as error:
                what = f"could not remove the files of the failed save to {writer.path}: {error}"
                warnings.warn(f"{what}; the next save will try again", stacklevel=3)
        raise


def load(
    state: ShardedStateDict,
    path: AnyPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: str | StrictHandling = StrictHandling.RAISE_UNEXPECTED,
    dtype: Literal["exact", "cast"] = "exact",
    verify: Verify = "sizes",
    aliases: Mapping[str, str] = EMPTY,
    safe_globals: SafeGlobals = (),
    moments: Moments = "saved",
    threads: int = 4,
) -> LoadReport:
    """Load a checkpoint into the memory of a state, however it was sharded when saved; all ranks call this together.

    Keys, shapes, dtypes, coverage, and what `verify` requires are checked on all ranks before any memory is written.
    Only the tensors of `state` are written (tensors without data get memory). Plain values and objects are in the
    report's `state`. After an error during reading, for example of the disk, tensors may be partly overwritten; the
    message then says so.

    Args:
        state: what to load, in the form that `save` takes. Plain values select which of the stored ones to return. A
            number and a tensor of one element stand for each other; None stands for any plain value.
        path: a checkpoint of opt-checkpoint, in a directory or at the URL of an object store (`ObjectPath` for a store
            with options); a stock DCP directory, or a `torch_dist` directory of Megatron-Core.
        process_group: the ranks that load.
        strict: what to do about keys on one side only: a `StrictHandling` or its name.
        dtype: whether a different stored dtype is an error or is converted.
        verify: `"sizes"`: check before any memory is written that every file exists, has its size, and belongs to this
            save; compare values with their checksums while reading. `"chunks"`: also compare every chunk that a rank
            needs with its checksums before any memory is written, which reads it twice. `"none"`: neither. Objects and
            plain values are always compared. Stock and Megatron-Core directories have no checksums to compare.
        aliases: alternative prefixes, for keys that are not stored under their own name.
        safe_globals: classes and functions that stored objects and plain values may use, as for
            `torch.serialization.safe_globals`; `NUMPY_GLOBALS` for numpy arrays. Values that need others are not
            loaded, and requesting one is an error.
        moments: `"new"` reads no state of optimizers, as if only weights were stored: main weights are the weights, and
            moments and steps are missing. For directories of Megatron-Core whose states are damaged, which are refused.
        threads: number of concurrent reads of a rank.

    Returns:
        A report of what was loaded and what was not.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or it was removed during the load.
        CheckpointCorruptError: it is damaged.
        CheckpointKeyError: keys do not fit, under `strict`.
        CheckpointMismatchError: shapes, dtypes, coverage or forms of plain values do not fit.
        CheckpointingException: ranks were given different paths, `strict`, `dtype` or `verify`.
        CheckpointFailedError: a rank failed for another reason.
    """
    ranks = ranks_of(process_group)
    source = same_location(ranks, "loading", path, strict=strict, dtype=dtype, verify=verify, moments=moments)
    with opened_everywhere(ranks, source, verify, safe_globals) as opened:
        kept = replace(opened, index=with_moments(opened.index, moments))
        planner = ShardedLoadPlanner(
            state, kept, strict=strict, dtype=dtype, aliases=aliases, safe_globals=safe_globals
        )
        return carry_out_load(ranks, planner, threads=threads, verify=verify, checks_states=True)


@contextmanager
def opened_everywhere(
    ranks: Ranks, source: Location, verify: Verify, safe_globals: SafeGlobals = ()
) -> Iterator[Opened]:
    """Open a checkpoint on rank 0, check its files as `verify` of `load` requires, and send its index to all ranks.

    Raises:
        CheckpointNotFoundError: the block failed because the checkpoint was removed in the meantime; on every rank.
    """

    def open_first() -> Opened:
        check_choice("verify", verify, get_args(Verify))
        opened = open_checkpoint(source, safe_globals=safe_globals)
        if verify != "none":
            check_sizes(opened.index)
        return opened

    save_id: str | None = None
    try:
        opened = from_rank_0(ranks, open_first, f"loading {source}")
        save_id = opened.index.save_id
        # Each rank reads by its own client of the store.
        yield replace(opened, index=replace(opened.index, path=reached_from(source, opened.index.path)))
    except CheckpointCorruptError as error:  # the same on every rank
        if from_rank_0(ranks, lambda: was_removed(source, save_id), f"loading {source}"):
            raise removed(source) from error
        raise


def carry_out_load(
    ranks: Ranks,
    planner: ShardedLoadPlanner,
    *,
    threads: int = 4,
    verify: Verify = "sizes",
    checks_states: bool = False,
) -> LoadReport:
    """Plan a load, check it, and read, in three exchanges. All ranks call this together, with the same index.

    With `checks_states`, rank 0 looks for shifted states in directories of Megatron-Core, if any rank asks for states.

    Raises:
        CheckpointingException: as `load`.
    """
    reader = CheckpointReader(planner, threads=threads, verify=verify)

    def plan() -> bytes:
        asked = planner.plan()
        reader.verify()
        return asked

    def unexpected_of(per_rank: list[bytes]) -> tuple[str, ...]:
        unexpected = planner.unexpected_of(per_rank)
        if checks_states:
            refuse_shifted(planner.index, unexpected)
        return unexpected

    unexpected = through_rank_0(ranks, plan, unexpected_of, f"loading {planner.index.path}")
    return read_planned(ranks, reader, unexpected)


def load_alone(wanted: Any, opened: Opened, *, strict: str = "raise_missing") -> Any:
    """Load a state by this process alone, raises like `load`."""
    return carry_out_load(Ranks(), ShardedLoadPlanner(wanted, opened, strict=strict)).state


def read_tensors(opened: Opened, keys: Iterable[str]) -> dict[str, Tensor]:
    """Read whole stored tensors to the CPU, by this process alone, by key; raises like `load`."""
    tensors: dict[str, Tensor] = load_alone({key: whole_tensor(key, opened.index.tensors[key]) for key in keys}, opened)
    return tensors


def read_planned(ranks: Ranks, reader: CheckpointReader, unexpected: tuple[str, ...]) -> LoadReport:
    """Read what all ranks have planned; all ranks call this together.

    Raises:
        CheckpointingException: as `load`.
    """
    planner = reader.planner

    def read() -> Any:
        planner.begin_writing()
        reader.read(planner.items)
        return planner.assemble()

    what = f"loading {planner.index.path} (while reading: tensors may be partly overwritten, load again before use)"
    state = on_all(ranks, read, what)
    bytes_wanted = sum(item.target.numel() * item.dtype.itemsize for item in planner.items)
    return LoadReport(
        state=state,
        missing=tuple(planner.missing),
        unexpected=unexpected,
        cast=tuple(planner.cast),
        kind=planner.index.kind,
        bytes_wanted=bytes_wanted,
        bytes_read=planner.files.bytes_read,
    )
