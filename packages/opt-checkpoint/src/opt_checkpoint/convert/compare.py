"""Compares keys, shapes, dtypes and values of two checkpoints, with one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.boxes import Box, split_rows
from opt_checkpoint.dcp.layout import fingerprint
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.disk.checkpoint import Opened, read_object, size_problems
from opt_checkpoint.disk.index import CheckpointIndex, StoredTensor
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.run.ranks import Ranks
from opt_checkpoint.run.save_load import carry_out_load
from opt_checkpoint.state.sharded import ShardedTensor

_PIECE_BYTES = 64 << 20


class Difference(NamedTuple):
    """A key, and how the two checkpoints differ in it."""

    key: str
    text: str


def differences(first: CheckpointIndex, second: CheckpointIndex, *, rtol: float = 0.0) -> Iterator[Difference]:
    """The differences between two checkpoints, which may be sharded differently.

    Args:
        first: a checkpoint.
        second: the checkpoint to compare it with.
        rtol: allowed difference as a fraction of the value in `second`; 0 requires equal bits (NaNs included).
    """
    for which, index in (("first", first), ("second", second)):
        for file, problem in size_problems(index).items():
            yield Difference(file, f"damaged in the {which}: {problem}")
    for key in sorted(first.tensors.keys() | second.tensors.keys()):
        a, b = first.tensors.get(key), second.tensors.get(key)
        if a is None or b is None:
            yield Difference(key, f"only in the {'second' if a is None else 'first'}")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(key, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        else:
            yield from _value_differences(first, second, key, rtol)
    for key in sorted(first.objects.keys() | second.objects.keys()):
        if key not in first.objects or key not in second.objects:
            yield Difference(key, f"only in the {'first' if key in first.objects else 'second'}")
            continue
        try:
            if fingerprint(read_object(first, key)) != fingerprint(read_object(second, key)):
                yield Difference(key, "the stored objects differ")
        except CheckpointCorruptError as error:
            yield Difference(key, f"damaged: {error}")


def _value_differences(first: CheckpointIndex, second: CheckpointIndex, key: str, rtol: float) -> Iterator[Difference]:
    differing, largest = 0, 0.0
    nans = [0, 0]  # elements that are NaN in one checkpoint only
    stored = first.tensors[key]
    rows = -(-stored.nbytes // _PIECE_BYTES)
    for piece in split_rows(_whole(stored), rows) if rows else ():
        values = []
        for which, index in (("first", first), ("second", second)):
            try:
                values.append(_read(index, key, piece))
            except CheckpointCorruptError as error:
                yield Difference(key, f"damaged in the {which}: {error}")
                return
        a, b = values
        differs = ~_same(a, b, rtol).reshape(a.shape)
        differing += int(differs.sum())
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a[differs].to(wide), b[differs].to(wide)
        nans[0] += int((a.isnan() & ~b.isnan()).sum())
        nans[1] += int((b.isnan() & ~a.isnan()).sum())
        gaps = (a - b).abs()
        gaps = gaps[~gaps.isnan()]  # infinite where an infinity meets another number
        largest = max([largest, *gaps.max(dim=0, keepdim=True).values.tolist()]) if gaps.numel() else largest
    if differing:
        only = [f"; {count} NaN only in the {which}" for which, count in zip(("first", "second"), nans) if count]
        gap = f", by up to {largest:.3g}" if differing > sum(nans) else ""
        yield Difference(key, f"{differing} elements differ{gap}{''.join(only)}")


def _same(a: Tensor, b: Tensor, rtol: float) -> Tensor:
    if rtol:
        wide = torch.complex128 if a.is_complex() else torch.float64
        return torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=0.0, equal_nan=True)
    width = a.dtype.itemsize
    return (a.reshape(-1).view(torch.uint8) == b.reshape(-1).view(torch.uint8)).view(-1, width).all(dim=1)


def _read(index: CheckpointIndex, key: str, piece: Box) -> Tensor:
    stored = index.tensors[key]
    data = torch.empty(piece.sizes, dtype=stored.dtype)
    wanted = ShardedTensor(key, data, stored.dtype, piece.sizes, stored.shape, piece.offsets, None)
    opened = Opened(index=index, common={})
    planner = ShardedLoadPlanner({"": wanted}, opened, strict="ignore_all", aliases={})
    carry_out_load(Ranks(), planner, CheckpointReader(opened.index))
    return data


def read_whole(index: CheckpointIndex, key: str) -> Tensor:
    """Read one whole stored tensor to the CPU.

    Raises:
        CheckpointingException: as `load`.
    """
    return _read(index, key, _whole(index.tensors[key]))


def _whole(stored: StoredTensor) -> Box:
    return Box((0,) * len(stored.shape), stored.shape)
