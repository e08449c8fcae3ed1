"""DTensors and their local shards. No other module of this package refers to DTensors."""

import sys
from collections.abc import Iterable
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Span", "are_dtensors", "distributed_like", "first_number", "is_dtensor", "local", "local_like", "spans"]


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor. Does not import their module: without it no DTensor exists."""
    # While another thread imports it, as a save in the background does, the module has no DTensor yet.
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def are_dtensors(tensors: Iterable[Tensor]) -> bool:
    """Whether any of many tensors is a DTensor. Compares their few classes, not each tensor."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(issubclass(kind, dtensor) for kind in set(map(type, tensors)))


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, which shares its memory; any other tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    shard: Tensor = tensor.to_local()
    return shard


def local_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `tensor`, with the placements of `like`. Redistributing a DTensor is collective.

    Raises:
        ValueError: the shapes or meshes differ, only `tensor` is a DTensor, or only `like` is one and its local part
            is not one block of the whole. The message continues a sentence about `tensor`.
    """
    if tensor.shape != like.shape:
        raise ValueError(f"has shape {tuple(tensor.shape)} where {tuple(like.shape)} is needed")
    if not is_dtensor(like):
        if is_dtensor(tensor):
            raise ValueError("is a DTensor, but its parameter is a plain tensor; pass tensor.full_tensor()")
        return tensor
    if not is_dtensor(tensor):
        if not _is_one_block(like):
            raise ValueError(f"is a whole tensor, but its parameter is placed {like.placements}; pass a DTensor")
        return _block_of(tensor, like)
    if tensor.device_mesh != like.device_mesh:
        raise ValueError(f"is on {tensor.device_mesh}, its parameter on {like.device_mesh}; pass tensor.full_tensor()")
    return local(tensor if tensor.placements == like.placements else tensor.redistribute(placements=like.placements))


def _is_one_block(tensor: "DTensor") -> bool:
    """Whether the local part is one block of the whole.

    A `_StridedShard` leaves gaps, which the shards of the same dim along later axes of the mesh fill.
    """
    axes: list[tuple[int, Any]] = list(zip(tensor.device_mesh.shape, tensor.placements, strict=True))
    for number, (_, placed) in enumerate(axes, start=1):
        if type(placed).__name__ == "_StridedShard":
            filled = prod(size for size, later in axes[number:] if later.is_shard(placed.dim))
            if placed.split_factor != filled:
                return False
    return True


def _block_of(whole: Tensor, like: "DTensor") -> Tensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


def distributed_like(shard: Tensor, like: Tensor) -> Tensor:
    """`shard` as the local part of a DTensor with the layout of `like`; unchanged if `like` is not a DTensor."""
    if not is_dtensor(like) or shard.shape != like.to_local().shape:
        return shard
    return type(like).from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def first_number(tensor: Tensor) -> int:
    """The number of the first local element in the whole tensor, row-major."""
    if not is_dtensor(tensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return sum(start * stride for start, stride in zip(offset, tensor.stride()))


class Span(NamedTuple):
    """A run of a tensor's elements that are numbered consecutively."""

    begin: int  # index in the flattened local tensor
    numel: int
    first: int  # number of its first element in the whole tensor, row-major


def spans(tensor: Tensor) -> tuple[Span, ...] | None:
    """The local elements by their numbers in the whole tensor; None if these are unknown.

    One span for a plain tensor and for rows of a DTensor; for columns, one for each row.
    """
    if not is_dtensor(tensor):
        return (Span(0, tensor.numel(), 0),)
    shard = tensor.to_local()
    if not shard.numel():
        return ()
    if not _is_one_block(tensor):
        return None
    # torch.distributed.checkpoint saves shards by these chunks.
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call, unused-ignore]
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(shard.shape) or not shard.is_contiguous():
        return None
    sizes = tuple(shard.shape)
    offsets = tuple(chunks[0].offsets)
    whole = tuple(tensor.shape)
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    # After the last sharded dim, rows are whole and consecutive.
    last_cut = max((dim for dim in range(len(whole)) if sizes[dim] != whole[dim]), default=0)
    numel = prod(sizes[last_cut:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides))
    found = []
    for number, indices in enumerate(product(*map(range, sizes[:last_cut]))):
        first = base + sum(index * stride for index, stride in zip(indices, strides))
        found.append(Span(number * numel, numel, first))
    return tuple(found)
