"""The layout of a DTensor as plain values. No other module of this package refers to DTensors."""

import sys
from typing import Any, NamedTuple

from torch import Tensor

from opt_config import ConfigError

__all__ = ["TENSOR_PARALLEL_AXES", "DTensorLayout", "MeshPlacement", "dtensor_layout"]

TENSOR_PARALLEL_AXES = ("tp",)
"""The names of mesh axes that mean tensor parallelism."""


class MeshPlacement(NamedTuple):
    """How a tensor is placed along one axis of the device mesh."""

    axis: str  # the mesh's name for it, or its number
    size: int
    shard_dim: int | None  # the dim it shards; None: replicated
    cuts_last: bool = False  # applied after the inner axes: FSDP2 shards the tensor-parallel shard of a dim


class DTensorLayout(NamedTuple):
    """The placement of a DTensor parameter on its mesh."""

    local_shape: tuple[int, ...]
    placements: tuple[MeshPlacement, ...]  # one for each axis of the mesh, outermost first


def dtensor_layout(tensor: Tensor) -> DTensorLayout | None:
    """The layout of a DTensor; None for any other tensor.

    Raises `ConfigError` for partial placements: a pending sum cannot be updated.
    """
    # DTensors exist only if their module was imported. Importing it here would cost every user most of a second and
    # fail on builds of torch without distributed.
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    dtensor: Any = tensor
    names = dtensor.device_mesh.mesh_dim_names or tuple(str(axis) for axis in range(dtensor.device_mesh.ndim))
    placements = tuple(
        MeshPlacement(axis, dtensor.device_mesh.size(index), _shard_dim(placement), hasattr(placement, "split_factor"))
        for index, (axis, placement) in enumerate(zip(names, dtensor.placements, strict=True))
    )
    return DTensorLayout(tuple(dtensor.to_local().shape), placements)


def _shard_dim(placement: Any) -> int | None:
    if placement.is_partial():
        raise ConfigError(
            f"a parameter has the placement {placement}; allowed are Shard and Replicate; redistribute it first"
        )
    return None if placement.is_replicate() else int(placement.dim)  # is_shard() is False for strided shards since 2.13
