"""The local step that a run resumes from: a function of what all ranks see, with the same result on each."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from opt_checkpoint.tiers.rank_part import PartName

Inventory: TypeAlias = Mapping[PartName, str]
"""For one rank: the parts on its node, with the node's path of each."""


class LocalChoice(NamedTuple):
    """A complete step of the local tier.

    Args:
        step: the step.
        parts: the part of each rank.
        holders: for each rank, the rank that provides its part; the rank itself if it has it.
    """

    step: int
    parts: tuple[PartName, ...]
    holders: tuple[int, ...]


class Verdict(NamedTuple):
    """The decision about the local tier.

    Args:
        local: its newest complete step; None if it has none for this number of ranks.
        passed_over: why newer steps were skipped.
        unusable: those of `passed_over` that are complete, but cannot be loaded by this world.
    """

    local: LocalChoice | None
    passed_over: tuple[str, ...]
    unusable: tuple[str, ...] = ()


NOTHING = Verdict(None, ())


def newest_whole(inventories: Sequence[Inventory], *, run: str, not_before: int) -> Verdict:
    """The newest step with the parts of all ranks, on any nodes.

    Args:
        inventories: by rank.
        run: parts of other runs are ignored.
        not_before: steps below this are ignored.
    """
    world, reasons, unusable = len(inventories), list[str](), list[str]()
    of_run = {part for seen in inventories for part in seen if part.run == run}
    for step in sorted({part.step for part in of_run if part.step >= not_before}, reverse=True):
        whole = []
        for save in sorted({part.save for part in of_run if part.step == step}):
            parts = {part for part in of_run if (part.step, part.save) == (step, save)}
            problem = _problem(parts, world)
            if problem:
                reasons.append(f"step {step} of the local tier: {problem}")
                if _is_whole(parts):
                    unusable.append(reasons[-1])
            else:
                whole.append(_chosen(parts, inventories))
        if len(whole) == 1:
            return Verdict(whole[0], tuple(reasons), tuple(unusable))
        if whole:
            reasons.append(f"step {step} of the local tier: it was saved {len(whole)} times, and all of them are whole")
            unusable.append(reasons[-1])
    return Verdict(None, tuple(reasons), tuple(unusable))


def _is_whole(parts: set[PartName]) -> bool:
    """Whether the parts of all ranks that saved exist."""
    return all({part.rank for part in parts} == set(range(part.world)) for part in parts)


def _problem(parts: set[PartName], world: int) -> str | None:
    saved_by = {part.world for part in parts}
    if saved_by != {world}:
        return f"it was saved by {', '.join(map(str, sorted(saved_by)))} ranks, and this world has {world}"
    missing = sorted(set(range(world)) - {part.rank for part in parts})
    if missing:
        return f"the parts of ranks {missing} are on no node"
    return None


def _chosen(parts: set[PartName], inventories: Sequence[Inventory]) -> LocalChoice:
    by_rank = sorted(parts, key=lambda part: part.rank)
    holders = tuple(next(_holders(part, inventories)) for part in by_rank)
    return LocalChoice(by_rank[0].step, tuple(by_rank), holders)


def _holders(part: PartName, inventories: Sequence[Inventory]) -> Iterator[int]:
    """The ranks whose node has a part, with its owner first."""
    if part in inventories[part.rank]:
        yield part.rank
    yield from (rank for rank, seen in enumerate(inventories) if part in seen and rank != part.rank)


def this_node(environ: Mapping[str, str] = os.environ) -> str:
    """A name for this rank's node: its host name, and its index if `torchrun` sets the number of ranks per node."""
    host, local = socket.gethostname(), environ.get("LOCAL_WORLD_SIZE")
    if local is None or "RANK" not in environ:
        return host
    return f"{host}/{int(environ['RANK']) // int(local)}"


def keepers(nodes: Sequence[str]) -> list[int] | None:
    """For each rank, the rank that keeps its copy: the one at the same position on the next node. None with one node.

    Args:
        nodes: the node of each rank.
    """
    on_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        on_node.setdefault(node, []).append(rank)
    order = list(on_node)
    if len(order) == 1:
        return None
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    chosen = []
    for rank, node in enumerate(nodes):
        there = on_node[following[node]]
        chosen.append(there[on_node[node].index(rank) % len(there)])
    return chosen
