"""Reads Megatron-Core's `dp_reshardable` directories: cuts the optimizer's memory buckets into parameters.

Such a directory holds one 1-D tensor per bucket and state, under the key
`optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(P, Q).bucket_idx_K.{param,exp_avg,exp_avg_sq}`. It does not
record the position of each parameter or the number of steps; the caller must provide both.
`opt_distributed.layout.flat_layout(..., shard_multiple=1)` makes Megatron-Core's buckets from a model's shapes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.convert.file_backed import mapped_apart, read_into, select
from opt_checkpoint.convert.foreign_files import read_rows
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.save_load import PathLike
from opt_checkpoint.run.saved_optimizer import PREFIX
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.sharded import Shape, ShardedTensor, ShardIdentity

START_MULTIPLE = 64  # of elements, on which Megatron-Core's parameters start: longer gaps are not padding
_KEY = re.compile(r"(?:.*\.)?dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSlot:
    """Position of a parameter, or of a tensor-parallel rank's block of it, in a `dp_reshardable` directory.

    Args:
        name: the parameter's key.
        shape: the block's.
        start: its first element in its bucket.
        bucket: number of the bucket.
        buffer: number of the buffer.
        group: number of the data-parallel group: which model-parallel rank saved it.
        global_shape: the parameter's; None if the block is the whole parameter.
        global_offset: where the block begins in the parameter.
    """

    name: str
    shape: Shape
    start: int
    bucket: int = 0
    buffer: int = 0
    group: int = 0
    global_shape: Shape | None = None
    global_offset: Shape | None = None

    @property
    def stop(self) -> int:
        """End of its elements in the bucket, exclusive."""
        return self.start + math.prod(self.shape)

    @property
    def bucket_id(self) -> BucketId:
        """The bucket it is in."""
        return BucketId(self.group, self.buffer, self.bucket)

    def sharded(self, key: str, values: Tensor) -> ShardedTensor:
        """The block's `values` under `key`."""
        whole = whole_tensor(key, values)
        if self.global_shape is None:
            return whole
        offset = self.global_offset or (0,) * len(self.shape)
        return dataclasses.replace(
            whole, global_shape=self.global_shape, global_offset=offset, axis_fragmentations=None
        )


class BucketId(NamedTuple):
    """A bucket, without its dtypes."""

    group: int
    buffer: int
    bucket: int


def read_bucket_slots(file: PathLike) -> list[BucketSlot]:
    """Slots from a JSON list of objects with `BucketSlot`'s fields."""
    return read_rows(file, BucketSlot)


def buckets_to_states(index: CheckpointIndex, slots: Sequence[BucketSlot], scratch: Path) -> list[ShardedTensor]:
    """The states of every parameter, cut from the buckets: main weights as `optimizer.state.fp32_param.<name>`.

    Args:
        index: the directory.
        slots: where each parameter is; together they must fill every bucket except for padding.
        scratch: an empty folder for the buckets; the states are views of files in it.

    Raises:
        CheckpointingException: the directory holds no buckets, or remainders in place of main weights; slots do
            not fit its buckets, or blocks their parameters.
    """
    buckets = _buckets(index)
    by_bucket: dict[BucketId, list[BucketSlot]] = defaultdict(list)
    for slot in slots:
        by_bucket[slot.bucket_id].append(slot)
    _check_slots(index, buckets, by_bucket)
    keys = [key for states in buckets.values() for key in states.values()]
    folder = scratch / "buckets"
    folder.mkdir()
    flat = mapped_apart(folder, select(index, keys))
    read_into(index, flat)
    return list(_states(buckets, by_bucket, flat))


def _buckets(index: CheckpointIndex) -> dict[BucketId, dict[str, str]]:
    """The key of each state, by bucket.

    Raises:
        CheckpointingException: no bucket is stored, a buffer has two pairs of dtypes, or main weights are missing.
    """
    found: dict[BucketId, dict[str, str]] = defaultdict(dict)
    for key in sorted(index.tensors):
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        group, buffer, _, bucket, state = match.groups()
        states = found[BucketId(int(group), int(buffer), int(bucket))]
        if state in states:
            raise CheckpointValueError(f"{states[state]} and {key} are both bucket {bucket} of buffer {buffer}")
        states[state] = key
    if not found:
        raise CheckpointValueError(
            f"{index.path} holds no buckets (keys ...dp_group_idx_0.gbuf_idx_0.dtype_....bucket_idx_0.param): it is "
            f"not dp_reshardable; fully_reshardable directories load as they are"
        )
    for key in (key for states in found.values() for key in states.values()):
        if not index.tensors[key].dtype.is_floating_point:
            raise CheckpointValueError(
                f"{key} is stored as {index.tensors[key].dtype}: 16-bit remainders, which are main weights only "
                f"together with the model's weights of that run; save it without store_param_remainders"
            )
    return found


def _check_slots(
    index: CheckpointIndex,
    buckets: Mapping[BucketId, Mapping[str, str]],
    by_bucket: Mapping[BucketId, list[BucketSlot]],
) -> None:
    """Raise unless every slot is in a stored bucket, and slots fill every bucket except for padding."""
    for bucket_id, own in by_bucket.items():
        if bucket_id not in buckets:
            stored = ", ".join(str(tuple(p)) for p in sorted(buckets))
            raise CheckpointValueError(
                f"{own[0].name}: no bucket has (group, buffer, bucket) {tuple(bucket_id)}; there are {stored}"
            )
    for bucket_id, states in buckets.items():
        for key in states.values():
            _check_bucket(key, math.prod(index.tensors[key].shape), by_bucket.get(bucket_id, []))


def _check_bucket(key: str, numel: int, slots: Sequence[BucketSlot]) -> None:
    end = 0
    for slot in sorted(slots, key=lambda slot: slot.start):
        if not end <= slot.start < end + START_MULTIPLE or slot.stop > numel:
            raise CheckpointValueError(
                f"{slot.name}: elements [{slot.start}, {slot.stop}) of {key} must begin less than "
                f"{START_MULTIPLE} after element {end} and end within its {numel} elements; pass the slots of the run "
                f"that saved it"
            )
        end = slot.stop
    if end != numel:
        raise CheckpointValueError(f"elements [{end}, {numel}) of {key} belong to no slot: it has another layout")


def _states(
    buckets: Mapping[BucketId, Mapping[str, str]],
    by_bucket: Mapping[BucketId, list[BucketSlot]],
    flat: Mapping[str, Tensor],
) -> Iterator[ShardedTensor]:
    """Every block of every state, once. Model-parallel ranks that hold the same block must have the same values.

    Raises:
        CheckpointingException: two groups hold different values of one block.
    """
    first: dict[ShardIdentity, Tensor] = {}
    for place, states in buckets.items():
        for state, key in states.items():
            name = "fp32_param" if state == "param" else state
            for slot in by_bucket[place]:
                values = flat[key][slot.start : slot.stop].view(slot.shape)
                block = slot.sharded(f"{PREFIX}{name}.{slot.name}", values)
                if block.identity not in first:
                    first[block.identity] = values
                    yield block
                elif not torch.equal(first[block.identity], values):
                    raise CheckpointValueError(
                        f"{block.key} at {block.global_offset} has other values in group {place.group} than in an "
                        f"earlier one: give slots of different parameters different names or offsets"
                    )
