"""DTensor parameters, which come laid out already: their local part, and over whom they are cut. The one file for it.

`fully_shard` makes such parameters (Shard(0) over the data-parallel mesh); so do torch's tensor-parallel plans.
"""

import math
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from opt_distributed.comm.collectives import Alone, Comm, TorchComm
from opt_distributed.layout import LayoutError
from opt_paramgroups import ParamId


class Cut(NamedTuple):
    """How a matrix is cut over ranks: equal parts along one dim, in the order of the ranks of `comm`."""

    dim: int | None  # None: every rank has all of it
    comm: Comm


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the tensor's own memory; the tensor itself where it is not a DTensor."""
    found: Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def local_numel(tensor: Tensor) -> int:
    """Elements of this rank's part."""
    return local(tensor).numel()


def local_grad(param: Tensor) -> Tensor:
    """This rank's part of a DTensor parameter's gradient, placed as the parameter is.

    A gradient that is still a sum over ranks, or placed otherwise, is brought to the parameter's placements first.
    """
    grad = param.grad
    assert isinstance(param, DTensor)
    assert isinstance(grad, DTensor)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def is_first_replica(tensor: Tensor) -> bool:
    """Whether this rank is the one that counts its part: the first along every mesh axis that only replicates."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(at == 0 for at, placed in zip(coordinate, tensor.placements) if not isinstance(placed, Shard))


def matrix_cut(id: ParamId, tensor: Tensor) -> Cut:
    """Over which ranks a matrix must be brought together to be whole.

    Raises:
        LayoutError: it is cut along several mesh axes, or into unequal parts.
    """
    if not isinstance(tensor, DTensor):
        return Cut(None, Alone())
    axes = [axis for axis, placed in enumerate(tensor.placements) if isinstance(placed, Shard)]
    sizes = [tensor.device_mesh.size(axis) for axis in axes]
    if math.prod(sizes) == 1:
        return Cut(None, Alone())
    if len(axes) > 1:
        raise LayoutError(
            f"{id} is cut along {len(axes)} axes of its mesh, {tensor.placements}; a matrix rule takes matrices "
            "cut along one: shard it along one axis, or give it an elementwise rule through config_overrides"
        )
    placed = tensor.placements[axes[0]]
    assert isinstance(placed, Shard)
    if tensor.shape[placed.dim] % sizes[0]:
        raise LayoutError(
            f"{id} of shape {tuple(tensor.shape)} does not divide into {sizes[0]} equal parts along dim {placed.dim}; "
            "a matrix rule needs equal parts: pad that dim, or give it an elementwise rule through config_overrides"
        )
    return Cut(placed.dim, TorchComm(tensor.device_mesh.get_group(axes[0])))
