"""Checks before a save that all ranks together hold every element exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.boxes.overlaps import overlapping_pairs
from opt_checkpoint.dcp.local_contents import LocalObject
from opt_checkpoint.dcp.tensors_of_ranks import TensorsOfRanks
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.tree import Path, path_text

_SHOWN = 8
_EXACT = 1 << 62  # above, products of sizes are computed by Python


def validate_sharding_integrity(tensors: TensorsOfRanks, objects: Sequence[Sequence[LocalObject]]) -> None:
    """Check that the main replicas of all ranks tile every tensor, and that every object exists once.

    Args:
        tensors: the tensors that the ranks could write.
        objects: the objects of each rank, by rank.

    Raises:
        CheckpointingException: tensors of one key differ in dtype or global shape, overlap or leave a hole, objects
            are missing or double. All problems are reported at once, with keys and ranks.
    """
    problems: dict[int, str] = {}
    for check in (_description_problems, _overlap_problems, _hole_problems):
        for key, text in check(tensors):
            problems.setdefault(key, text)
    texts = [*(f"{tensors.keys[key]}: {text}" for key, text in sorted(problems.items())), *_object_problems(objects)]
    if texts:
        more = f"\n... and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        raise CheckpointValueError("the ranks' states do not fit together:\n" + "\n".join(texts[:_SHOWN]) + more)


def _description_problems(tensors: TensorsOfRanks) -> Iterator[tuple[int, str]]:
    """Index and problem of each key whose dtype or shape differs between ranks."""
    first = tensors.first_of_key[tensors.key]
    same = (tensors.dtype == tensors.dtype[first]) & (tensors.ndim == tensors.ndim[first])
    same &= (tensors.shape == tensors.shape[first]).all(axis=1)
    for number in np.flatnonzero(~same).tolist():
        a, b = (
            f"rank {tensors.rank[n]} has {tensors.dtype_names[tensors.dtype[n]]} {list(tensors.shape_of(n))}"
            for n in (first[number], number)
        )
        yield int(tensors.key[number]), f"{a}, {b}"


def _overlap_problems(tensors: TensorsOfRanks) -> Iterator[tuple[int, str]]:
    """Index and problem of each key whose main replicas overlap."""
    mains = np.flatnonzero(tensors.main[tensors.owner] & tensors.usable)
    owner = tensors.owner[mains]
    for pairs in overlapping_pairs(tensors.key[owner], tensors.offsets[mains], tensors.sizes[mains]):
        for pair in zip(mains[pairs.first].tolist(), mains[pairs.second].tolist()):
            numbers = sorted(pair)
            a, b = map(tensors.box, numbers)
            rank, other = (int(tensors.rank[tensors.owner[number]]) for number in numbers)
            copies = "" if rank == other or a != b else "; of equal copies, only one may have replica_id 0"
            yield (
                int(tensors.key[tensors.owner[numbers[0]]]),
                f"Invalid access pattern: rank {rank} holds {_span(a)} and rank {other} {_span(b)}, "
                f"both as main replica, and their values differ or are not known to be equal. Different tensors need "
                f"different keys, as add_prefix_for_sharding gives them, or for parts of one model "
                f"sharded_model(model, groups=...){copies}",
            )


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes)) + "]"


def _hole_problems(tensors: TensorsOfRanks) -> Iterator[tuple[int, str]]:
    """Index and problem of each key that boxes do not cover. Disjoint boxes do if their volumes add up."""
    mains = np.flatnonzero(tensors.main[tensors.owner] & tensors.usable)
    key_of_main, shape = tensors.key[tensors.owner[mains]], tensors.shape[tensors.first_of_key]
    covered = np.zeros(len(tensors.keys), np.int64)
    np.add.at(covered, key_of_main, np.prod(tensors.sizes[mains], axis=1))
    huge = np.prod(shape.astype(np.float64), axis=1) >= _EXACT
    for key in np.flatnonzero(huge | (covered != np.prod(shape, axis=1))).tolist():
        total = math.prod(shape[key].tolist())
        if covered[key] != total:
            ranks = set(tensors.rank[tensors.owner[mains]][key_of_main == key].tolist())
            yield (
                key,
                f"Invalid access pattern: main replicas hold {covered[key]} of the {total} elements of "
                f"{list(tensors.shape_of(int(tensors.first_of_key[key])))} (ranks {sorted(ranks)}); a shard is missing",
            )


def _object_problems(per_rank: Sequence[Sequence[LocalObject]]) -> list[str]:
    ranks: dict[str, list[int]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, set[str]] = defaultdict(set)
    for rank, own in enumerate(per_rank):
        for item in own:
            shapes[item.key] = item.shape
            mains = found[item.key]  # a key that only replicas hold stays empty, which is reported below
            if item.main:
                ranks[item.unique_key].append(rank)
                mains.add(item.unique_key)
    problems = [f"Duplicate ShardedObject keys: {k} on ranks {r}" for k, r in ranks.items() if len(r) > 1]
    for key, unique in found.items():
        if len(unique) != math.prod(shapes[key]):
            problems.append(f"{key}: {len(unique)} of {math.prod(shapes[key])} ShardedObject are missing or too many")
    return problems


def common_differences(per_rank: Sequence[Mapping[Path, int]], plain: Sequence[Mapping[str, Path]]) -> list[str]:
    """Values that differ between ranks, as `path (ranks ...)` with the ranks that differ from the first.

    A rank need not have every plain value, but those that it has must be equal, and on rank 0, which writes them. Plain
    tensors must be on all ranks: one that a rank lacks may have been forgotten there.

    Args:
        per_rank: fingerprints of plain values and plain tensors by path, for each rank.
        plain: paths of the plain tensors by key, for each rank.
    """
    first: dict[Path, int] = dict(per_rank[0])
    holders: dict[Path, list[int]] = defaultdict(list)
    for rank, (own, paths) in enumerate(zip(per_rank, plain, strict=True)):
        for path in paths.values():
            if path in own:
                first.setdefault(path, own[path])
                holders[path].append(rank)
    differing: dict[Path, list[int]] = defaultdict(list)
    for rank, own in enumerate(per_rank):
        for path, value in own.items():
            if first.get(path) != value:
                differing[path].append(rank)
    partial = {path: ranks for path, ranks in holders.items() if len(ranks) < len(per_rank)}
    texts = [f"{path_text(path)} (ranks {ranks})" for path, ranks in differing.items()]
    return sorted([*texts, *(f"{path_text(path)} (a tensor on ranks {r} only)" for path, r in partial.items())])
