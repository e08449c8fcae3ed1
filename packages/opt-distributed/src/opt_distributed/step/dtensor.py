"""DTensor parameters, which come laid out already: their local part, and the groups of their mesh. The one file for it.

`fully_shard` makes such parameters (Shard(0) over the data-parallel mesh); so do torch's tensor-parallel plans.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from opt_checkpoint import sharded_like
from opt_distributed.comm.collectives import TorchComm
from opt_distributed.comm.mesh import root_of
from opt_paramgroups.dtensor import TENSOR_PARALLEL_AXES


class PlacementError(ValueError):
    """A tensor that cannot be laid out as a parameter is. The message continues a sentence about the tensor."""


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the tensor's own memory; the tensor itself where it is not a DTensor."""
    found: Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def local_numel(tensor: Tensor) -> int:
    """Elements of this rank's part."""
    return local(tensor).numel()


def laid_out_like(part: Tensor, param: Tensor) -> Tensor:
    """`part` as the local part of a DTensor with `param`'s mesh and placements, sharing memory.

    `part` itself where `param` is not a DTensor, or has a local part of another shape.
    """
    if not isinstance(param, DTensor) or part.shape != local(param).shape or part.dim() == 0:
        return part
    return DTensor.from_local(
        part.detach(), param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def local_part(tensor: Tensor, param: Tensor) -> Tensor:
    """This rank's part of `tensor`, placed as `param` is.

    `tensor` is laid out as `param`, on the same mesh in any other way, or whole. Redistributing is collective.

    Raises:
        PlacementError: a DTensor for a plain parameter or on another mesh, or a part of unknown position.
    """
    if not isinstance(param, DTensor):
        if isinstance(tensor, DTensor):
            raise PlacementError("is a DTensor, but the parameter is a plain tensor; pass tensor.full_tensor()")
        return tensor
    if tensor.shape != param.shape:
        raise PlacementError(
            f"has shape {tuple(tensor.shape)}, but the parameter is a DTensor of shape {tuple(param.shape)}; pass a "
            "DTensor or the whole tensor, of that shape"
        )
    if not isinstance(tensor, DTensor):
        return _block_of(tensor.detach(), param)
    if tensor.device_mesh != param.device_mesh:
        raise PlacementError(
            f"is on the mesh {tensor.device_mesh}, the parameter on {param.device_mesh}; pass tensor.full_tensor()"
        )
    if tensor.placements != param.placements:
        tensor = tensor.redistribute(placements=param.placements)
    return local(tensor)


def _block_of(whole: Tensor, param: DTensor) -> Tensor:
    shape = local(param).shape
    if shape == whole.shape:
        return whole
    if not shape.numel():
        return whole.new_empty(shape)
    block = sharded_like("", param.detach())
    for dim, (start, length) in enumerate(zip(block.global_offset, shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def part_of_mesh(param: Tensor) -> str:
    """A name for this rank's part of a DTensor, equal on its replicas; empty where the part is the whole."""
    if not isinstance(param, DTensor) or local(param).shape == param.shape:
        return ""
    coordinate = param.device_mesh.get_coordinate() or ()
    at = [
        f"{index}of{param.device_mesh.size(axis)}"
        for axis, (index, placement) in enumerate(zip(coordinate, param.placements))
        if not placement.is_replicate()
    ]
    return "@" + ".".join(at)


def local_address(param: Tensor) -> int:
    """Where this rank's part lies; found without making a tensor, since every step asks."""
    assert isinstance(param, DTensor)
    return param._local_tensor.data_ptr()


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
    root = root_of(mesh)
    beside = set(root.mesh_dim_names or ()).difference(mesh.mesh_dim_names or ())
    return first and all(root.get_local_rank(axis) == 0 for axis in beside.intersection(TENSOR_PARALLEL_AXES))


def mesh_comms(tensor: Tensor, axes: Sequence[int]) -> tuple[TorchComm, ...]:
    """The ranks along each of these axes of a DTensor's mesh."""
    assert isinstance(tensor, DTensor)
    return tuple(TorchComm(tensor.device_mesh.get_group(axis)) for axis in axes)
