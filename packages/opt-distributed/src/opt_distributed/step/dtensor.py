"""DTensor parameters, which come laid out already: their local part, and the groups of their mesh. The one file for it.

`fully_shard` makes such parameters (Shard(0) over the data-parallel mesh); so do torch's tensor-parallel plans.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from opt_distributed.comm.collectives import TorchComm
from opt_paramgroups.dtensor import TENSOR_PARALLEL_AXES


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
    """Whether this rank is the one that counts its part: the first along every mesh axis that only replicates.

    Axes that mean tensor parallelism replicate, too, what is laid out without them: what `fully_shard` cuts over the
    `"dp"` of a mesh `("dp", "tp")` is the same on all ranks of `"tp"`.
    """
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or ()
    first = all(at == 0 for at, placed in zip(coordinate, tensor.placements) if placed.is_replicate())
    root = _root_of(mesh)
    beside = set(root.mesh_dim_names or ()).difference(mesh.mesh_dim_names or ())
    return first and all(root.get_local_rank(axis) == 0 for axis in beside.intersection(TENSOR_PARALLEL_AXES))


# torch has no public name for the mesh that a mesh was sliced from, and 2.9 renamed the other.
_root_of: Callable[[DeviceMesh], DeviceMesh] = (
    DeviceMesh._get_root_mesh if hasattr(DeviceMesh, "_get_root_mesh") else device_mesh._mesh_resources.get_root_mesh
)


def mesh_comms(tensor: Tensor, axes: Sequence[int]) -> tuple[TorchComm, ...]:
    """The ranks along each of these axes of a DTensor's mesh."""
    assert isinstance(tensor, DTensor)
    return tuple(TorchComm(tensor.device_mesh.get_group(axis)) for axis in axes)
