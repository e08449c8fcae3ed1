"""Sharded tensors that are built from one local tensor, for fused weights that are several tensors on disk.

A `ShardedTensorFactory` is either *declared* by row segments (gate and value of a SwiGLU, the parts of a fused QKV),
which works for whole blocks and for flat ranges without a copy, or *built* by two functions, as in Megatron-Core, for
whole blocks only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.sharded import ReplicaId, Shape, ShardedBase, ShardedTensor, Source, flat_bounds, items_of
from opt_checkpoint.state.tensors import is_dtensor

BuildFn: TypeAlias = Callable[[str, Tensor, ReplicaId, slice | None], Any]
MergeFn: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows `[row_start, row_stop)` of the local block's axis 0, as a block of a separate global tensor.

    Args:
        row_start: first row.
        row_stop: one past the last row.
        global_shape: shape of the global tensor, with prepended axes.
        global_offset: offset of these rows in it, with prepended axes.
        suffix: appended to the factory's key; empty when all segments are parts of one global tensor.
    """

    row_start: int
    row_stop: int
    global_shape: Shape
    global_offset: Shape
    suffix: str = ""


@dataclass(slots=True, eq=False)
class ShardedTensorFactory(ShardedBase):
    """One local tensor that is stored as several sharded tensors.

    Give either `build_fn` and `merge_fn`, or `segments` with `local_shape`. Optimizer state reuses its parameter's
    factory with another key and data, so the built tensors may depend only on the arguments of `build_fn`.

    Args:
        key: name of the fused tensor; segments append their suffix to it.
        data: the local tensor; 1-D of the range's length with `flattened_range`. None for the description alone.
        build_fn: `(key, data, replica_id, flattened_range)` to nested dicts and lists of `ShardedTensor`.
        merge_fn: the inverse: from the same nested structure of loaded tensors to one tensor of `data`'s shape.
        replica_id: see `ShardedTensor`.
        flattened_range: `[start, stop)` of the flattened local block that `data` holds; segments only.
        segments: rows of the local block and the global position of each; they must tile axis 0 in order.
        local_shape: shape of the whole local block; segments only.
        has_mains: see `ShardedTensor`.
        optional: see `ShardedTensor`; of the tensors that it builds.
        source: see `ShardedTensor`.

    Raises:
        CheckpointingException: both forms, neither, segments with holes, or a flat range with `build_fn`.
    """

    key: str
    data: Tensor | None = field(repr=False)
    build_fn: BuildFn | None = None
    merge_fn: MergeFn | None = None
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None
    segments: tuple[Segment, ...] = ()
    local_shape: Shape = ()
    _: KW_ONLY
    has_mains: bool = False
    optional: bool = False
    source: Source | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointingException` when the two forms are mixed or the segments do not tile the rows."""
        declared = bool(self.segments)
        if declared == (self.build_fn is not None) or (self.build_fn is None) != (self.merge_fn is None):
            raise CheckpointValueError(
                f"factory {self.key} needs either build_fn and merge_fn, or segments; pass exactly one of the two forms"
            )
        if not declared and self.flattened_range is not None:
            raise CheckpointValueError(
                f"factory {self.key} is built by a function, which cannot be applied to a slice of the fused tensor; "
                f"declare it by segments, or keep this parameter whole on one rank"
            )
        row = 0
        for segment in self.segments:
            if segment.row_start != row or segment.row_stop <= row:
                raise CheckpointValueError(
                    f"segments of {self.key} must tile axis 0 in order: expected a start at row {row}, got {segment}"
                )
            row = segment.row_stop
        if declared and (not self.local_shape or row != self.local_shape[0]):
            raise CheckpointValueError(f"segments of {self.key} cover {row} rows of the local {self.local_shape}")

    @torch.no_grad()
    def build(self) -> Any:
        """Build the sharded tensors of this factory: a list for segments, otherwise what `build_fn` returns.

        Raises:
            CheckpointingException: there is a `build_fn`, but no data.
        """
        data = self.data
        if data is None:
            raise CheckpointValueError(f"factory {self.key} has no data to build from")
        if is_quantized(data):  # its views cannot be loaded into
            data = data.dequantize()
        if self.build_fn is not None:
            return self.build_fn(self.key, data, self.replica_id, self.flattened_range)
        built = []
        for segment in self.segments:
            local_shape = (segment.row_stop - segment.row_start, *self.local_shape[1:])
            if self.flattened_range is None:
                part = data[segment.row_start : segment.row_stop]
                flat = None
            else:
                row_numel = math.prod(self.local_shape[1:])
                low, high = flat_bounds(self.flattened_range)
                first = segment.row_start * row_numel
                start = max(low, first)
                stop = min(high, segment.row_stop * row_numel)
                part = data[:0]
                flat = slice(0, 0)
                if start < stop:
                    part = data[start - low : stop - low]
                    flat = slice(start - first, stop - first)
            piece = ShardedTensor(
                key=self.key + segment.suffix,
                data=part,  # a view
                dtype=data.dtype,
                local_shape=local_shape,
                global_shape=segment.global_shape,
                global_offset=segment.global_offset,
                axis_fragmentations=None,
                replica_id=self.replica_id,
                prepend_axis_num=len(segment.global_shape) - len(local_shape),
                flattened_range=flat,
            )
            built.append(piece)
        return built

    def declared(self) -> ShardedTensorFactory:
        """Return the same factory declared by segments, if `build_fn` cuts the local tensor into runs of rows; else
        itself.

        To find the segments, the function is applied to the indices of elements. Unlike functions, segments work on
        flat ranges.
        """
        data = self.data
        if self.build_fn is None or data is None or data.dim() == 0 or not data.numel():
            return self
        numbers = torch.arange(data.numel(), dtype=torch.int64, device="cpu").view(data.shape)
        built = list(tensors_in(self.build_fn(self.key, numbers, self.replica_id, None)))
        found = [_segment_of(self, piece, row_numel=numbers[0].numel()) for piece in built]
        segments = sorted((s for s in found if s is not None), key=lambda segment: segment.row_start)
        starts = [segment.row_start for segment in segments]
        stops = [segment.row_stop for segment in segments]
        if None in found or [*starts, len(numbers)] != [0, *stops]:
            return self
        shape = tuple(data.shape)
        return dataclasses.replace(self, build_fn=None, merge_fn=None, segments=tuple(segments), local_shape=shape)

    @torch.no_grad()
    def merge(self, loaded: Any) -> Tensor:
        """Merge the loaded pieces into one tensor. For segments, which are views of `data`, returns `data`."""
        if self.merge_fn is not None:
            merged = self.merge_fn(loaded)
            return merged if self.data is None else self.data.copy_(merged)
        if self.data is None:
            raise CheckpointValueError(f"factory {self.key} has no data to merge into")
        if is_quantized(self.data):  # its segments are copies
            self.data.copy_(torch.cat(list(loaded)))
        return self.data


def tensors_in(built: Any) -> Iterator[ShardedTensor]:
    """Yield the tensors in what a factory builds."""
    if isinstance(built, ShardedTensor):
        yield built
    elif isinstance(built, dict | list | tuple):
        for _, value in items_of(built):
            yield from tensors_in(value)


def _segment_of(factory: ShardedTensorFactory, piece: ShardedTensor, *, row_numel: int) -> Segment | None:
    """The rows of the local tensor in a piece that was built from element indices; None if it is not a run of rows."""
    numbers = piece.data
    if numbers is None or not numbers.numel() or row_numel == 0:
        return None
    flat = numbers.reshape(-1)
    start = int(flat[0])
    count = len(flat)
    run = torch.arange(start, start + count, dtype=torch.int64, device="cpu")
    is_run = numbers.is_contiguous() and torch.equal(flat, run)
    is_plain = (
        piece.key.startswith(factory.key)
        and piece.replica_id == factory.replica_id
        and piece.flattened_range is None
        and not piece.allow_shape_mismatch
    )
    if not (is_run and is_plain) or start % row_numel or count % row_numel:
        return None
    first_row = start // row_numel
    return Segment(
        row_start=first_row,
        row_stop=first_row + count // row_numel,
        global_shape=piece.global_shape,
        global_offset=piece.global_offset,
        suffix=piece.key.removeprefix(factory.key),
    )


def is_quantized(tensor: Tensor | None) -> bool:
    """Return whether a tensor is quantised, such as an fp8 parameter; it is saved and loaded dequantised.

    The classes of all libraries have in common that they override `dequantize`, and that `copy_` quantises. A view of
    such a tensor is a copy, which may be read-only, so a file cannot be read directly into it.
    """
    if tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) or is_dtensor(tensor):
        return False
    return type(tensor).dequantize is not Tensor.dequantize
