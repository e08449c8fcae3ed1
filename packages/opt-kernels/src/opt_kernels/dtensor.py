"""The one place of this package that recognises DTensors: to their local shards and back."""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether `tensor` is a DTensor. Does not import them: where nobody has, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that is here, sharing its memory; any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    shard: Tensor = tensor.to_local()
    return shard


def distributed_like(shard: Tensor, like: Tensor) -> Tensor:
    """`shard` as the local part of a DTensor laid out as `like`; as it is where `like` is no DTensor."""
    if not is_dtensor(like) or shard.shape != like.to_local().shape:
        return shard
    return type(like).from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
