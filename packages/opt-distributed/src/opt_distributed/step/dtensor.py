"""DTensor parameters, which come laid out already: their local part, and the groups of their mesh. The one file for it.

`fully_shard` makes such parameters (Shard(0) over the data-parallel mesh); so do torch's tensor-parallel plans.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from opt_distributed.comm.collectives import TorchComm


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
    return all(at == 0 for at, placed in zip(coordinate, tensor.placements) if placed.is_replicate())


def mesh_comms(tensor: Tensor, axes: Sequence[int]) -> tuple[TorchComm, ...]:
    """The ranks along each of these axes of a DTensor's mesh."""
    assert isinstance(tensor, DTensor)
    return tuple(TorchComm(tensor.device_mesh.get_group(axis)) for axis in axes)
