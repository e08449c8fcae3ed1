"""Whether all ranks together hold every element exactly once: checked before anything is written."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.boxes.reshard import first_overlap
from opt_checkpoint.dcp.local_contents import LocalContents, LocalTensor
from opt_checkpoint.errors import CheckpointingException
from opt_checkpoint.state.tree import path_text

_SHOWN = 8


class Holding(NamedTuple):
    """A box that a rank holds."""

    rank: int
    box: Box


def validate_sharding_integrity(per_rank: Sequence[LocalContents]) -> None:
    """Check that the main replicas of all ranks tile every tensor, and that every object is there once.

    Args:
        per_rank: what each rank could write, by rank.

    Raises:
        CheckpointingException: tensors of one key differ in dtype or global shape, overlap or leave a hole, objects
            are missing or double. All problems are reported at once, with keys and ranks.
    """
    problems = [*_tensor_problems(per_rank), *_object_problems(per_rank)]
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointingException("the ranks' states do not fit together:\n" + "\n".join(problems[:_SHOWN]) + more)


def _tensor_problems(per_rank: Sequence[LocalContents]) -> list[str]:
    by_key: dict[str, list[tuple[int, LocalTensor]]] = defaultdict(list)
    for rank, own in enumerate(per_rank):
        for item in own.tensors:
            by_key[item.key].append((rank, item))
    problems = []
    for key, held in by_key.items():
        problem = _description_problem(key, held) or _coverage_problem(key, held)
        if problem:
            problems.append(problem)
    return problems


def _description_problem(key: str, held: Sequence[tuple[int, LocalTensor]]) -> str | None:
    """All ranks must mean the same tensor."""
    first_rank, first = held[0]
    for rank, item in held:
        if (item.dtype, item.shape) != (first.dtype, first.shape):
            return (
                f"{key}: rank {first_rank} has {first.dtype} {list(first.shape)}, "
                f"rank {rank} has {item.dtype} {list(item.shape)}"
            )
    return None


def _coverage_problem(key: str, held: Sequence[tuple[int, LocalTensor]]) -> str | None:
    """Disjoint boxes whose volumes add up to the tensor's cover it."""
    parts = [Holding(rank, box) for rank, item in held if item.main for box in item.boxes]
    shape = held[0][1].shape
    covered, total = sum(part.box.numel for part in parts), math.prod(shape)
    pair = first_overlap([part.box for part in parts])
    if pair is not None:
        a, b = (parts[i] for i in pair)
        copies = "" if a.rank == b.rank or a.box != b.box else "; of equal copies, only one may have replica_id 0"
        return (
            f"{key}: Invalid access pattern: rank {a.rank} holds {_span(a.box)} and rank {b.rank} {_span(b.box)}, "
            f"both as main replica, and their values differ or are not known to be equal. Different tensors need "
            f"different keys, as add_prefix_for_sharding gives them{copies}"
        )
    if covered != total:
        ranks = sorted({part.rank for part in parts})
        return (
            f"{key}: Invalid access pattern: main replicas hold {covered} of the {total} elements of {list(shape)} "
            f"(ranks {ranks}); a shard is missing"
        )
    return None


def _span(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.sizes)) + "]"


def _object_problems(per_rank: Sequence[LocalContents]) -> list[str]:
    ranks: dict[str, list[int]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, set[str]] = defaultdict(set)
    for rank, own in enumerate(per_rank):
        for item in own.objects:
            shapes[item.key] = item.shape
            mains = found[item.key]  # a key that only replicas hold stays empty, and is missed below
            if item.main:
                ranks[item.unique_key].append(rank)
                mains.add(item.unique_key)
    problems = [f"Duplicate ShardedObject keys: {k} on ranks {r}" for k, r in ranks.items() if len(r) > 1]
    for key, unique in found.items():
        if len(unique) != math.prod(shapes[key]):
            problems.append(f"{key}: {len(unique)} of {math.prod(shapes[key])} ShardedObject are missing or too many")
    return problems


def common_differences(per_rank: Sequence[LocalContents]) -> list[str]:
    """Values that some rank holds otherwise than the first: `path (ranks ...)`.

    A rank need not have every value; what it has must be equal. Plain values must be on rank 0, which writes them;
    plain tensors are written by the ranks that have them.
    """
    first: dict[str, int] = dict(per_rank[0].common)
    for own in per_rank:
        for path in own.plain.values():
            first.setdefault(path_text(path), own.common[path_text(path)])
    differing: dict[str, list[int]] = defaultdict(list)
    for rank, own in enumerate(per_rank):
        for name, value in own.common.items():
            if first.get(name) != value:
                differing[name].append(rank)
    return [f"{name} (ranks {ranks})" for name, ranks in sorted(differing.items())]
