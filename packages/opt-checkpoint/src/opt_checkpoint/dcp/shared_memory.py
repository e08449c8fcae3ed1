"""Finds tensors of a state that share memory, such as a tied head and embedding: they can only be loaded if equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from opt_checkpoint.errors import CheckpointMismatchError
from opt_checkpoint.state.factory import is_quantized
from opt_checkpoint.state.sharded import ShardedTensor
from opt_checkpoint.state.tensors import check_dense

Asked = tuple[str, ShardedTensor]  # a stored key, and what it is read into


def sharing_pairs(asked: Sequence[Asked]) -> Iterator[tuple[Asked, Asked]]:
    """Yield pairs of descriptions under different stored keys whose data is the same tensor, or equal views of one
    memory."""
    first: dict[tuple[object, ...], Asked] = {}
    for key, shard in asked:
        data = shard.data
        if data is None or not data.numel() or is_quantized(data):
            continue
        strides = data.is_contiguous() or data.stride()
        layout = (data.device, data.data_ptr(), data.dtype, data.numel(), strides)
        other = first.setdefault(layout, (key, shard))
        if other[0] != key:
            yield other, (key, shard)


def check_own_memory(key: str, data: Tensor) -> None:
    """Raise unless every element of a target has memory of its own."""
    check_dense(key, data)
    is_expanded = any(n > 1 and stride == 0 for n, stride in zip(data.shape, data.stride()))
    if is_expanded and not is_quantized(data):
        raise CheckpointMismatchError(
            f"{key}: the target of shape {list(data.shape)} is expanded (strides {list(data.stride())}), so that "
            f"several elements share memory; pass target.contiguous()"
        )
