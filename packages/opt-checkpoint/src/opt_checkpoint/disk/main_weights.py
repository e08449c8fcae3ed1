"""Finds optimizer states that Megatron-Core stored at shifted places.

Its releases up to 0.19.2 damage a `fully_reshardable` directory if a buffer has several buckets with padding at their
ends (`overlap_grad_reduce`). They concatenate the buckets without the padding, and cut the parameters out as if it were
there: parameters after the first bucket get states of elements further on, the last ones get zeros, and some elements
are in no file. The model's weights are right, so the main weights do not round to them.

Healthy runs have such main weights too: with fp8 weights, weights that were loaded without main weights, or stochastic
rounding. These are not refused. The proof of a shift is a main weight of zero at the end of a parameter, where the
weight is not zero, in a directory with other main weights that round exactly; or a run of weights that is found further
on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from opt_checkpoint.disk.archives import find_values, load_object
from opt_checkpoint.disk.data_file import DataFiles
from opt_checkpoint.disk.index import CheckpointIndex, Kind, StoredChunk
from opt_checkpoint.errors import CheckpointCorruptError, check_choice

Moments: TypeAlias = Literal["saved", "new"]
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_MAINS = ("param", "fp32_param")
_TAIL = 256  # elements at the end of each chunk that a load compares
_PIECE = 1 << 20
_THREADS = 8
_MIN_RUN = 8  # elements that must agree at a shifted place


def shifted_mains(index: CheckpointIndex, *, whole: bool) -> list[str]:
    """Return the keys of main weights of a directory of Megatron-Core that are shifted, with the moments beside them.

    Args:
        index: the directory.
        whole: compare all elements with the weights, not only the last ones of each chunk.

    Raises:
        CheckpointCorruptError: an archive is damaged.
    """
    files = DataFiles(index)

    def compare(pair: _Pair) -> Compared:
        tail = max(0, pair.main.box.numel - _TAIL)
        end = compare_end(pair.key, *pair.read(files, tail, pair.main.box.numel))
        if end.differs or not whole:
            return end
        pieces = (pair.read(files, start, min(start + _PIECE, tail)) for start in range(0, tail, _PIECE))
        is_exact = all(torch.equal(_rounded(*piece), piece[1]) for piece in pieces)
        return Compared(pair.key, is_exact and end.is_exact, differs=not is_exact)

    with ThreadPoolExecutor(_THREADS) as pool:
        compared = list(pool.map(compare, _pairs(index)))
    return shifted_of(compared)


def compare_end(key: str, main: Tensor, weight: Tensor) -> Compared:
    """Compare the last elements of main weights, 1-D, with the weights."""
    main = main[-_TAIL:]
    weight = weight[-_TAIL:]
    if torch.equal(_rounded(main, weight), weight):
        return Compared(key, bool(weight.any()))
    # Main weights at the end are zero where weights are not, nor so small that main weights underflow.
    nonzero = main.nonzero()
    end = 0
    if len(nonzero):
        end = int(nonzero[-1]) + 1
    zeros = bool((weight[end:].abs() > weight.abs().max() / 512).any())
    return Compared(key, is_exact=False, has_zeros=zeros, is_moved=_is_moved(main, weight), differs=True)


def shifted_of(compared: Collection[Compared]) -> list[str]:
    """Return the keys of those that differ, if some prove that they are shifted."""
    has_exact = any(one.is_exact for one in compared)
    if any(one.is_moved or (one.has_zeros and has_exact) for one in compared):
        return sorted({one.key for one in compared if one.differs})
    return []


def refuse_shifted(index: CheckpointIndex, unused: Collection[str] = ()) -> None:
    """Raise CheckpointCorruptError if states of a directory of Megatron-Core are shifted.

    Args:
        index: the directory.
        unused: stored keys that nobody reads; if all states are among them, nothing is checked.
    """
    if index.kind is not Kind.MEGATRON:
        return
    if set(filter(_STATE.fullmatch, index.tensors)) <= set(unused):
        return
    if shifted := shifted_mains(index, whole=False):
        raise CheckpointCorruptError(f"{index.path} holds {shifted_text(shifted)}")


def shifted_text(keys: Collection[str]) -> str:
    """Return what is wrong with these main weights and the moments beside them, and how to go on."""
    listed = ", ".join(sorted(keys)[:4])
    return (
        f"states of {len(keys)} parameters at shifted places ({listed}{', ...' if len(keys) > 4 else ''}): these main "
        f"weights do not round to the weights beside them. Megatron-Core up to 0.19.2 writes such fully_reshardable "
        f"directories if a buffer has several buckets, and a part of the states is lost. The weights are right: load "
        f"with moments='new' (optckpt convert --moments new), which takes main weights from them and no moments; or "
        f"save again as dp_reshardable or with one bucket"
    )


def with_moments(index: CheckpointIndex, moments: str) -> CheckpointIndex:
    """Return the index; without the states of optimizers if `moments` is `"new"`."""
    check_choice("moments", moments, get_args(Moments))
    if moments == "saved":
        return index
    weights = {key: stored for key, stored in index.tensors.items() if not _STATE.fullmatch(key)}
    return replace(index, tensors=weights)


def unchecked(index: CheckpointIndex) -> list[str]:
    """Parameters of a directory of Megatron-Core whose states cannot be compared with 16-bit weights."""
    if index.kind is not Kind.MEGATRON:
        return []
    names = {match[2] for match in map(_STATE.fullmatch, index.tensors) if match is not None}
    checked = {pair.name for pair in _pairs(index) if pair.dtypes[1].itemsize == 2}
    return sorted(names - checked)


class _Pair(NamedTuple):
    """A chunk of main weights under `key`, and the weights of the same box under `name`."""

    key: str
    main: StoredChunk
    name: str
    weight: StoredChunk
    dtypes: tuple[torch.dtype, torch.dtype]

    def read(self, files: DataFiles, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return elements of both in row-major order."""
        main, weight = self.dtypes
        return _values(files, self.main, main, start, stop), _values(files, self.weight, weight, start, stop)


class Compared(NamedTuple):
    """How a chunk of main weights differs from the weights: its last elements, and `differs` for all that were read."""

    key: str
    is_exact: bool  # and not zero
    has_zeros: bool = False
    is_moved: bool = False
    differs: bool = False


def _pairs(index: CheckpointIndex) -> Iterator[_Pair]:
    for key in index.tensors:
        match = _STATE.fullmatch(key)
        if match is None or match[1] not in _MAINS or match[2] not in index.tensors:
            continue
        main = index.tensors[key]
        weight = index.tensors[match[2]]
        by_box = {chunk.box: chunk for chunk in weight.chunks}
        for chunk in main.chunks:
            is_plain = chunk.archived is None and weight.dtype.is_floating_point and weight.dtype.itemsize > 1
            if is_plain and chunk.box in by_box:
                yield _Pair(key, chunk, match[2], by_box[chunk.box], (main.dtype, weight.dtype))


def _values(files: DataFiles, chunk: StoredChunk, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    values = find_values(files, chunk.place, dtype, chunk.box.sizes)
    if values is None:  # not contiguous
        whole: Tensor = load_object(files.read(chunk.place))
        return whole.reshape(-1)[start:stop]
    raw = files.read(values.part(start * dtype.itemsize, (stop - start) * dtype.itemsize))
    return torch.frombuffer(bytearray(raw), dtype=dtype)


def _rounded(main: Tensor, weight: Tensor) -> Tensor:
    """Main weights in the dtype of the weights; where both are NaN, the weight."""
    rounded = main.to(weight.dtype)
    return torch.where(rounded.isnan() & weight.isnan(), weight, rounded)


def _is_moved(main: Tensor, weight: Tensor) -> bool:
    """Whether main weights are those of elements further on. A run of few distinct values proves nothing."""
    rounded = main.to(weight.dtype)
    starts = (weight[:-_MIN_RUN] == rounded[:1]).nonzero().flatten()
    for shift in starts[starts > 0].tolist():
        run = weight[shift:]
        is_equal = torch.equal(rounded[: len(run)], run)
        if is_equal and len(set(run.tolist())) >= _MIN_RUN // 2:
            return True
    return False
