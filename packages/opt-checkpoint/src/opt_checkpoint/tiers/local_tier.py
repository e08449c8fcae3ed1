"""The local tier: each rank's part of a step, stored on its own node and sent to another node.

Which step a run resumes from, and who keeps whose copy, are functions of what all ranks see, with the same result on
each.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from opt_checkpoint.disk.checkpoint import check_sizes, verify_checkpoint
from opt_checkpoint.disk.data_file import bytes_view, crc32
from opt_checkpoint.disk.index import ByteRange
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointFailedError,
    CheckpointingException,
    CheckpointNotFoundError,
)
from opt_checkpoint.run.ranks import Ranks, from_all
from opt_checkpoint.run.series import named_steps, steady_steps, step_name
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.store import Store, Target
from opt_checkpoint.store.directory import Directory, is_leftover
from opt_checkpoint.store.store import named_in
from opt_checkpoint.tiers.parts import PartName, raise_first, read_part_name, save_part

logger = logging.getLogger(__name__)
_PART = re.compile(r"rank-\d{5,}")
_CHUNK_BYTES = 16 << 20
RUN = "run.json"
_NUM_NAMES = 8  # of a run that are kept in it


class LocalChoice(NamedTuple):
    """A complete step of the local tier.

    Args:
        step: the step.
        save: the save of its parts.
        holders: for each rank, the rank that provides its part; the rank itself if it has it.
    """

    step: int
    save: str
    holders: tuple[int, ...]


class Verdict(NamedTuple):
    """The decision about the local tier."""

    local: LocalChoice | None  # its newest complete step; None if it has none for this number of ranks
    skipped_reasons: tuple[str, ...]  # why newer steps were skipped
    unusable: str | None = None  # why the newest one that is complete for other worlds, or ambiguous, was skipped


NOTHING = Verdict(None, ())


def newest_whole(inventories: Sequence[Collection[PartName]], *, run: str, not_before: int) -> Verdict:
    """Return the newest step with the parts of all ranks, on any nodes.

    Args:
        inventories: for each rank, the parts on its node.
        run: parts of other runs are ignored.
        not_before: steps below this are ignored.
    """
    world = len(inventories)
    reasons = list[str]()
    unusable: str | None = None
    saves: dict[int, dict[str, set[PartName]]] = defaultdict(lambda: defaultdict(set))
    for part in set[PartName]().union(*inventories):
        if part.run == run and part.step >= not_before:
            saves[part.step][part.save].add(part)
    for step in sorted(saves, reverse=True):
        where = f"step {step} of the local tier"
        whole = []
        for save, parts in sorted(saves[step].items()):
            saved = {part.rank for part in parts}
            worlds = {part.world for part in parts}
            missing = sorted(set(range(world)) - saved)
            if worlds != {world}:
                by = ", ".join(map(str, sorted(worlds)))
                reasons.append(f"{where}: it was saved by {by} ranks, and this world has {world}")
                if all(saved == set(range(size)) for size in worlds):
                    unusable = unusable or reasons[-1]
            elif missing:
                reasons.append(f"{where}: the parts of ranks {missing} are on no node")
            else:
                holders = []
                for part in sorted(parts):  # by rank
                    on_nodes = [rank for rank in range(world) if part in inventories[rank]]
                    holders.append(part.rank if part.rank in on_nodes else on_nodes[0])
                whole.append(LocalChoice(step, save, tuple(holders)))
        if len(whole) == 1:
            return Verdict(whole[0], tuple(reasons), unusable)
        if whole:
            reasons.append(f"{where}: it was saved {len(whole)} times, and all of them are whole")
            unusable = unusable or reasons[-1]
    return Verdict(None, tuple(reasons), unusable)


def this_node() -> str:
    """Return a name for this rank's node: its host name, and its index if `torchrun` sets the number of ranks per
    node."""
    host = socket.gethostname()
    rank = os.environ.get("RANK")
    local = os.environ.get("LOCAL_WORLD_SIZE")
    return host if rank is None or local is None else f"{host}/{int(rank) // int(local)}"


def keepers(nodes: Sequence[str]) -> list[int] | None:
    """For each rank, the rank that keeps its copy: the one at the same position on the next node. None with one node.

    Args:
        nodes: the node of each rank.
    """
    on_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        on_node.setdefault(node, []).append(rank)
    groups = list(on_node.values())
    if len(groups) == 1:
        return None
    chosen = [0] * len(nodes)
    for here, there in zip(groups, [*groups[1:], groups[0]], strict=True):
        for position, rank in enumerate(here):
            chosen[rank] = there[position % len(there)]
    return chosen


class LocalTier:
    """The parts of a run that are on this rank's node.

    `directory/run/step-000000100/rank-00003` is rank 3's part of step 100. Rank 3 wrote it there, or sent it to a rank
    of this node that keeps its copy, or fetched it from a copy when it resumed. Nothing is synced: the tier must
    survive the loss of processes, not of power. Files that are incomplete then fail their checksums, and the copy on
    another node is used.

    Args:
        directory: on this node: a tmpfs or a local disk. Ranks of a node may share it.
        names: of the run, and those that it had before.
        place: stands for its durable directory. A copy of that is another run.
        keep: how many of the newest steps to keep.
        keeper_of: for each rank the rank that keeps its copy; None for no copies.
    """

    def __init__(
        self, directory: Path, names: Sequence[str], place: str, *, keep: int, keeper_of: Sequence[int] | None
    ) -> None:
        self.name, *former = names
        self._run = f"{self.name}-{place}"
        self.path = directory / self._run
        self._former = [f"{name}-{place}" for name in former]
        self._keep = keep
        self._keeper_of = list(enumerate(keeper_of or ()))
        self._store = Directory(self.path, sync=False)

    def place(self, step: int, rank: int) -> Path:
        """Return path of a rank's part of a step on this node."""
        return self._store.path(_part(step, rank))

    def write(self, ranks: Ranks, state: ShardedStateDict, step: int, save: str) -> None:
        """Write this rank's part and send its copy, then remove older steps; all ranks call this together.

        Args:
            ranks: all ranks, with a separate process group if this runs in the background.
            state: what to save.
            step: number of the step. Later local steps are removed, because the run has gone back to an earlier step.
            save: identifies this save; the same on all ranks.

        Raises:
            CheckpointingException: a rank failed; the previous step still exists.
        """
        what = f"saving step {step} to {self.path}"

        def write_own() -> None:
            # Removals that were interrupted are finished first, because a tmpfs has limited space.
            self._remove(name for name in self._store.children() if is_leftover(name))
            self._remove(step_name(later) for later in named_steps(self._store) if later > step)
            owners = [ranks.rank, *(rank for rank, keeper in self._keeper_of if keeper == ranks.rank)]
            self._remove(_part(step, owner) for owner in owners)
            name = PartName(self._run, step, save, ranks.rank, ranks.size)
            save_part(state, Target(self._store, _part(step, ranks.rank)), name)

        from_all(ranks, write_own, what)
        if self._keeper_of:
            copies = [Parcel(rank, keeper, _part(step, rank)) for rank, keeper in self._keeper_of]
            exchange(ranks, copies, self._store, what)
        steps = [found for found in named_steps(self._store) if found <= step]
        for old in steps[: -self._keep]:
            try:
                self._remove([step_name(old)])
            except OSError as error:
                logger.warning("could not remove step %d of %s: %s", old, self.path, error)

    def remove_former(self) -> None:
        """Remove what is on this node under former names of the run."""
        while self._former:
            shutil.rmtree(self.path.with_name(self._former.pop()), ignore_errors=True)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):  # never there, or removed by another rank of this node
                self._store.discard(name)

    def inventory(self) -> set[PartName]:
        """Return the parts on this node whose manifest and file sizes are correct.

        Raises:
            OSError: a part cannot be read, so that it is unknown whether it is complete.
        """
        for listed in steady_steps(self._store):
            found = set()
            for step in listed:
                for part in filter(_PART.fullmatch, self._store.children(step_name(step))):
                    path = self._store.path(f"{step_name(step)}/{part}")
                    try:
                        index = read_manifest(path)
                        check_sizes(index)
                        name = read_part_name(index)
                    except FileNotFoundError:
                        continue
                    except CheckpointingException as error:
                        if path.is_dir():  # else its trainer has removed it
                            logger.warning("skipping %s: %s", path, error)
                        continue
                    if path == self.place(name.step, name.rank):
                        found.add(name)
        return found

    def settle(self, ranks: Ranks, *, not_before: int) -> Verdict:
        """Find the newest complete step, fetch this rank's part, and compare all parts with their checksums.

        All ranks call this together. A damaged part is removed and replaced by its copy; without a copy, an older step
        is used.

        Args:
            ranks: all ranks.
            not_before: steps below this are ignored.

        Raises:
            CheckpointingException: a rank cannot read its parts.
        """
        reasons: list[str] = []
        while True:
            inventories = from_all(ranks, self.inventory, f"looking at {self.path}")
            verdict = newest_whole(inventories, run=self._run, not_before=not_before)
            damaged = [] if verdict.local is None else self._fetch(ranks, verdict.local)
            if not damaged:
                return verdict._replace(skipped_reasons=tuple(dict.fromkeys((*reasons, *verdict.skipped_reasons))))
            reasons += damaged

    def _fetch(self, ranks: Ranks, choice: LocalChoice) -> list[str]:
        """Check the parts on their nodes, and fetch this rank's; return the damaged ones, which are removed."""
        step = choice.step
        where = f"step {step} of the local tier"
        holders = list(enumerate(choice.holders))

        def check() -> list[str]:
            damaged = []
            for owner, holder in holders:
                if holder != ranks.rank:
                    continue
                path = self.place(step, owner)
                try:
                    findings = verify_checkpoint(path)
                except CheckpointNotFoundError:  # its trainer has a newer step
                    damaged.append(f"{where}: rank {owner}'s part at {path} was removed")
                    continue
                if findings:
                    logger.warning("%s is damaged and was removed: %s", path, findings[0])
                    self._remove([_part(step, owner)])
                    damaged.append(f"{where}: rank {owner}'s part at {path} is damaged: {findings[0]}")
            if choice.holders[ranks.rank] != ranks.rank:
                self._remove([_part(step, ranks.rank)])  # one that cannot be read as a part
            return damaged

        problems = [text for own in from_all(ranks, check, f"checking step {step} in {self.path}") for text in own]
        if not problems:
            parcels = [Parcel(holder, owner, _part(step, owner)) for owner, holder in holders if holder != owner]
            exchange(ranks, parcels, self._store, f"fetching step {step} from other nodes")
        return problems


class Parcel(NamedTuple):
    """A directory to send from a rank of the group to another, to the same name, where nothing may be."""

    sender: int
    receiver: int
    name: str


def exchange(ranks: Ranks, parcels: Sequence[Parcel], store: Directory, what: str) -> None:
    """Send directories; all ranks call this together. A directory becomes visible once it is complete.

    A rank has one chunk of each of its parcels in memory at a time. A rank that cannot read or write still sends and
    receives its messages, whose bytes are then arbitrary, and all ranks raise its error at the end.

    Args:
        ranks: the process group.
        parcels: those of all ranks; a rank sends to another at most one.
        store: what the directories are in, on each rank.
        what: named in errors.

    Raises:
        CheckpointingException: a rank failed.
    """
    sources = {parcel: Directory(store.path(parcel.name)) for parcel in parcels if parcel.sender == ranks.rank}
    arrivals = {p: store.folder(p.name, uuid.uuid4().hex) for p in parcels if p.receiver == ranks.rank}
    listings = from_all(ranks, lambda: {parcel: list(_chunks_of(source)) for parcel, source in sources.items()}, what)
    chunks = {parcel: listings[parcel.sender][parcel] for parcel in (*sources, *arrivals)}
    crcs: dict[Parcel, dict[str, int]] = {parcel: {} for parcel in arrivals}
    errors: list[BaseException] = []

    def attempt(act: Callable[..., object], *arguments: object) -> None:
        try:
            if not errors:
                act(*arguments)
        except BaseException as error:  # raised at the end: messages still go
            errors.append(error)

    def write(parcel: Parcel, chunk: ByteRange, view: memoryview) -> None:
        with store.shared_file(f"{arrivals[parcel]}/{chunk.file}", is_new=not chunk.start) as put:
            put(view, chunk.start)
        crcs[parcel][chunk.file] = crc32(view, crcs[parcel].get(chunk.file, 0))

    try:
        for parcel, folder in arrivals.items():
            attempt(store.make_parents, store.path(parcel.name))
            attempt(store.make_dir, store.path(folder))
        for number in range(max(map(len, chunks.values()), default=0)):
            works = []
            now = [(parcel, own[number]) for parcel, own in chunks.items() if number < len(own)]
            messages = [torch.empty(chunk.nbytes, dtype=torch.uint8, device="cpu") for _, chunk in now]
            for (parcel, chunk), message in zip(now, messages):
                if parcel in sources:
                    attempt(sources[parcel].read_into, chunk.file, chunk.start, bytes_view(message))
                    works.append(dist.isend(message, group=ranks.group, group_dst=parcel.receiver))
                else:
                    works.append(dist.irecv(message, group=ranks.group, group_src=parcel.sender))
            for work in filter(None, works):
                work.wait()
            for (parcel, chunk), message in zip(now, messages):
                if parcel in arrivals:
                    attempt(write, parcel, chunk, bytes_view(message))
        for parcel, folder in arrivals.items():
            attempt(_complete, store, parcel, folder, crcs[parcel])
    except RuntimeError as error:  # gloo's timeouts and lost connections
        raise CheckpointFailedError(f"{what} failed: a rank did not answer: {error}") from error
    finally:
        for folder in arrivals.values():
            if store.path(folder).is_dir():
                with suppress(OSError):
                    store.discard(folder)

    from_all(ranks, lambda: raise_first(errors), what)


def _chunks_of(source: Directory) -> Iterator[ByteRange]:
    """The files of a directory in chunks."""
    for file, size in sorted(source.sizes().items()):
        for start in range(0, size, _CHUNK_BYTES):
            yield ByteRange(file=file, start=start, nbytes=min(_CHUNK_BYTES, size - start))


def _complete(store: Directory, parcel: Parcel, folder: str, crcs: Mapping[str, int]) -> None:
    """Rename a received directory to its name, if the checksums of all its files match."""
    for name, file in read_manifest(store.path(folder)).files.items():
        if crcs.get(name) != file.crc:
            raise CheckpointCorruptError(f"{name} of {parcel.name} on rank {parcel.sender} is damaged: wrong checksum")
    store.rename(store.path(folder), store.path(parcel.name))


def _part(step: int, rank: int) -> str:
    return f"{step_name(step)}/rank-{rank:05d}"


def run_names(store: Store) -> list[str]:
    """Return the names of the run that saves to a durable directory, the present one first; none if it has not saved.

    Raises:
        CheckpointCorruptError: the file does not hold a name.
        OSError: raised by the file system or store.
    """
    known = named_in(store, RUN, "run", r"[0-9A-Za-z]+( [0-9A-Za-z]+)*")
    return [] if known is None else known.split()


def name_run(store: Store, name: str) -> None:
    """Let `name` be the name of the run that saves to a durable directory. Raises like `run_names`."""
    names = [name, *run_names(store)][:_NUM_NAMES]
    store.put(RUN, json.dumps({"run": " ".join(names)}).encode())
