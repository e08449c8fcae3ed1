"""Recognises DTensors, and describes their local values as a block of the global tensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.sharded import ReplicaId, Shape, ShardedTensor
from opt_checkpoint.state.strided import Cut, one_run


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor object that a DTensor holds; any other tensor is returned unchanged.

    `to_local()` creates a new tensor if gradients are enabled, and from torch 2.13 on for every parameter, so it cannot
    be used to compare identities.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_dtensor(tensor: object) -> bool:
    """Whether a value is a DTensor."""
    return isinstance(tensor, DTensor)


def sharded_like(key: str, tensor: Tensor, *, replica_id: ReplicaId = 0) -> ShardedTensor:
    """A tensor as a `ShardedTensor` under `key`, laid out by its DTensor placements, or whole if it is a plain tensor.

    Args:
        key: name of the global tensor.
        tensor: a DTensor (any uneven sharding), or a plain tensor held whole by this rank. Its local values are shared.
        replica_id: replica number of a plain tensor, such as the data-parallel rank under DDP; a DTensor has its own.

    Raises:
        CheckpointingException: the local values are not one block, or are partial sums. With FSDP2 and tensor
            parallelism on one axis (`_StridedShard`) they are one block, unless an uneven axis makes it ambiguous.
    """
    if not isinstance(tensor, DTensor):
        return whole_tensor(key, tensor, replica_id=replica_id)
    local = local_tensor(tensor)
    offset = _offset_of(key, tensor)
    return ShardedTensor(
        key=key,
        data=local,
        dtype=local.dtype,
        local_shape=tuple(local.shape),
        global_shape=tuple(tensor.shape),
        global_offset=offset if local.numel() else (0,) * len(offset),
        axis_fragmentations=None,
        replica_id=_replica_of(tensor),
        may_repeat=tensor.device_mesh.size() < dist.get_world_size(),
        source=tensor,
    )


def whole_tensor(key: str, tensor: Tensor, *, replica_id: ReplicaId = 0) -> ShardedTensor:
    """A tensor this rank holds whole, as a `ShardedTensor` under `key`."""
    shape = tuple(tensor.shape)
    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=shape,
        global_shape=shape,
        global_offset=(0,) * len(shape),
        axis_fragmentations=(1,) * len(shape),
        replica_id=replica_id,
    )


def like_sharded(tensor: Tensor, local: Tensor) -> Tensor:
    """`local` as a tensor with the layout of `tensor`: a DTensor if `tensor` is one."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def empty_like_sharded(param: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Memory for a state of a DTensor parameter whose shape is not the parameter's, as a DTensor on its mesh.

    An axis of the parameter that the state keeps, such as the rows of a factored second moment of shape (rows, 1) or
    (rows,), is sharded like the parameter's. All others are replicated.
    """
    if not isinstance(param, DTensor):
        raise RuntimeError("the parameter is not a DTensor")
    axes = [_kept_axis(p.dim, tuple(param.shape), shape) if type(p) is Shard else None for p in param.placements]
    placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
    return empty(shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)


def _kept_axis(axis: int, param: Shape, state: Shape) -> int | None:
    """The axis of a state that is the axis `axis` of its parameter; None if it is reduced or cannot be identified."""
    if len(state) == len(param):
        is_factor = all(n in (1, own) for n, own in zip(state, param))
        return axis if is_factor and state[axis] == param[axis] else None
    reduced = [d for d in range(len(param)) if (*param[:d], *param[d + 1 :]) == state]
    if len(reduced) != 1 or reduced[0] == axis:
        return None
    return axis - (reduced[0] < axis)


def _offset_of(key: str, tensor: DTensor) -> Shape:
    """Offset of the local values in the global tensor.

    Compares exact types, because `_StridedShard` subclasses `Shard` only in some versions of torch.
    """
    kinds = {type(placement) for placement in tensor.placements}
    if kinds <= {Shard, Replicate}:
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim()
    if not all(kind in (Shard, Replicate) or _is_strided(kind) for kind in kinds):
        raise CheckpointValueError(
            f"{key} is placed as {tuple(tensor.placements)}; only Shard and Replicate are a block of the global "
            f"tensor. Redistribute it first: tensor.redistribute(placements=[Shard(0), ...])"
        )
    runs = [one_run(length, _cuts(tensor, dim)) for dim, length in enumerate(tensor.shape)]
    sizes = tuple(local_tensor(tensor).shape)
    if any(run is None or len(run) != n for run, n in zip(runs, sizes, strict=True)):
        raise CheckpointValueError(
            f"{key} of shape {tuple(tensor.shape)} is placed as {tuple(tensor.placements)}, and its local values "
            f"{sizes} may not be one block of it. Make every cut of its axes even, or redistribute it first: "
            f"tensor.redistribute(placements=[Shard(0), ...])"
        )
    return tuple(run.start for run in runs if run is not None)


def _is_strided(kind: type) -> bool:
    return kind.__name__ == "_StridedShard"


def _cuts(tensor: DTensor, dim: int) -> list[Cut]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointValueError("this rank is not on the tensor's device mesh")
    return [
        Cut(coordinate[axis], tensor.device_mesh.size(axis), getattr(placement, "split_factor", 1))
        for axis, placement in enumerate(tensor.placements)
        if getattr(placement, "dim", None) == dim
    ]


def _replica_of(tensor: DTensor) -> ReplicaId:
    """This rank's coordinates on the mesh axes that replicate; all zeros on the main replica.

    A mesh that is a part of the world, such as `mesh["dp"]` of dp and tp, does not describe replicas outside it.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointValueError("this rank is not on the tensor's device mesh")
    return tuple(c for c, p in zip(coordinate, tensor.placements) if isinstance(p, Replicate)) or 0
