"""The local tier: each rank's part of a step, stored on its own node and copied to another node."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.disk.verify import check_sizes, verify_checkpoint
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException
from opt_checkpoint.run.ranks import Ranks, from_all
from opt_checkpoint.run.series import named_steps, step_name
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.store import Store, Target
from opt_checkpoint.store.directory import Directory, is_leftover
from opt_checkpoint.tiers.exchange import Parcel, exchange
from opt_checkpoint.tiers.rank_part import PartName, read_part_name, save_part
from opt_checkpoint.tiers.tier_choice import Inventory, LocalChoice, Verdict, newest_whole

logger = logging.getLogger(__name__)
_PART = re.compile(r"rank-\d{5,}")


class LocalTier:
    """The parts of a run that are on this rank's node.

    `directory/run/step-000000100/rank-00003` is rank 3's part of step 100. Rank 3 wrote it there, or sent it to a rank
    of this node that keeps its copy, or fetched it from a copy when it resumed. Nothing is synced: the tier must
    survive the loss of processes, not of power. Files that are incomplete then fail their checksums, and the copy on
    another node is used.

    Args:
        directory: on this node: a tmpfs or a local disk. Ranks of a node may share it.
        run: names the run.
        keep: how many of the newest steps to keep.
        keeper_of: for each rank the rank that keeps its copy; None for no copies.
    """

    def __init__(self, directory: Path, run: str, *, keep: int, keeper_of: Sequence[int] | None) -> None:
        self.path, self._run, self._keep = directory / run, run, keep
        self._keeper_of, self._store = keeper_of, Directory(self.path, sync=False)

    def place(self, step: int, rank: int) -> Path:
        """Path of a rank's part of a step on this node."""
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
        name = PartName(self._run, step, save, ranks.rank, ranks.size)

        def write_own() -> None:
            self._remove_interrupted()
            self._remove_from(step, ranks.rank)
            save_part(state, Target(self._store, _part(step, ranks.rank)), name)

        from_all(ranks, write_own, what)
        if self._keeper_of is not None:
            pairs = [(rank, keeper) for rank, keeper in enumerate(self._keeper_of) if ranks.rank in (rank, keeper)]
            places = [(sender, receiver, self.place(step, sender)) for sender, receiver in pairs]
            exchange(ranks, [Parcel(a, b, place, place) for a, b, place in places], self._store, what)
        self._retire(step)

    def _remove_from(self, step: int, rank: int) -> None:
        """Remove later steps, and those parts of this step that this rank writes."""
        for later in named_steps(self._store):
            if later > step:
                self._remove(step_name(later))
        incoming = [r for r, keeper in enumerate(self._keeper_of or ()) if keeper == rank]
        for owner in (rank, *incoming):
            self._remove(_part(step, owner))

    def _remove_interrupted(self) -> None:
        """Remove the remains of steps whose removal was interrupted, because a tmpfs has limited space."""
        for name in self._store.children():
            if is_leftover(name):
                self._remove(name)

    def _retire(self, newest: int) -> None:
        steps = [step for step in named_steps(self._store) if step <= newest]
        for step in steps[: -self._keep]:
            try:
                self._remove(step_name(step))
            except OSError as error:
                logger.warning("could not remove step %d of %s: %s", step, self.path, error)

    def _remove(self, name: str) -> None:
        try:
            self._store.discard(name)
        except FileNotFoundError:  # never there, or removed by another rank of this node
            return

    def inventory(self) -> Inventory:
        """The parts on this node whose manifest and file sizes are correct.

        Raises:
            OSError: a part cannot be read, so that it is unknown whether it is complete.
        """
        found = {}
        for step in named_steps(self._store):
            for part in self._store.children(step_name(step)):
                path = self._store.path(f"{step_name(step)}/{part}")
                name = _name_of(path) if _PART.fullmatch(part) else None
                if name is not None and path == self.place(name.step, name.rank):
                    found[name] = str(path)
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
                return verdict._replace(passed_over=tuple(dict.fromkeys((*reasons, *verdict.passed_over))))
            reasons += damaged

    def _fetch(self, ranks: Ranks, choice: LocalChoice) -> list[str]:
        """Check the parts on their nodes, and fetch this rank's; return the damaged ones, which are removed."""
        held = [owner for owner, holder in enumerate(choice.holders) if holder == ranks.rank]

        def check() -> list[str]:
            damaged = [problem for owner in held if (problem := self._check(choice.step, owner))]
            if choice.holders[ranks.rank] != ranks.rank:
                self._remove(_part(choice.step, ranks.rank))  # one that cannot be read as a part
            return damaged

        per_rank = from_all(ranks, check, f"checking step {choice.step} in {self.path}")
        problems = [problem for own in per_rank for problem in own]
        if not problems:
            pairs = [(h, o) for o, h in enumerate(choice.holders) if h != o and ranks.rank in (h, o)]
            places = [(holder, owner, self.place(choice.step, owner)) for holder, owner in pairs]
            parcels = [Parcel(holder, owner, place, place) for holder, owner, place in places]
            exchange(ranks, parcels, self._store, f"fetching step {choice.step} from other nodes")
        return problems

    def _check(self, step: int, owner: int) -> str | None:
        """Read all of a part; if it is damaged, remove it and return the problem."""
        path = self.place(step, owner)
        findings = verify_checkpoint(path)
        if not findings:
            return None
        logger.warning("%s is damaged and was removed: %s", path, findings[0])
        self._remove(_part(step, owner))
        return f"step {step} of the local tier: rank {owner}'s part at {path} is damaged: {findings[0]}"


def _part(step: int, rank: int) -> str:
    return f"{step_name(step)}/rank-{rank:05d}"


def _name_of(path: Path) -> PartName | None:
    """The name of the part in a directory; None if it is incomplete."""
    try:
        index = read_manifest(path)
        check_sizes(index)
        return read_part_name(index)
    except FileNotFoundError:
        return None
    except (CheckpointCorruptError, CheckpointingException) as error:
        logger.warning("skipping %s: %s", path, error)
        return None


RUN = "run.json"


def run_name(store: Store, *, may_write: bool) -> str | None:
    """Return the name of the run that saves to a directory; None if it has no name.

    Args:
        store: the durable directory of the run.
        may_write: whether to name the run if it has no name yet.

    Raises:
        CheckpointCorruptError: the file does not hold a name.
        OSError: raised by the file system or store.
    """
    if may_write:
        store.create(RUN, json.dumps({"run": uuid.uuid4().hex}).encode())
    try:
        name = json.loads(store.read(RUN))["run"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not name.isalnum():
        raise CheckpointCorruptError(f"{store.path(RUN)} is damaged: it does not name a run")
    return name
