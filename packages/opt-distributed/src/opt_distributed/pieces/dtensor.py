"""DTensor parameters, which are laid out already: their local parts, and the groups of their meshes.

`fully_shard` creates such parameters (Shard(0) over the data-parallel mesh), and so do torch's tensor-parallel plans.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from opt_checkpoint import sharded_like
from opt_distributed.comm.collectives import TorchComm
from opt_distributed.comm.groups import root_of
from opt_paramgroups import TENSOR_PARALLEL_AXES


class PlacementError(ValueError):
    """A tensor that cannot be laid out like a parameter. The message continues a sentence about the tensor."""


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory; the tensor itself if it is not a DTensor."""
    found: Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def laid_out_like(part: Tensor, param: Tensor) -> Tensor:
    """Wrap `part` as the local part of a DTensor with `param`'s mesh and placements, sharing memory.

    Returns `part` itself if `param` is not a DTensor, or has a local part of another shape.
    """
    if not isinstance(param, DTensor) or part.shape != local(param).shape or part.dim() == 0:
        return part
    return DTensor.from_local(
        part.detach(), param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def local_part(tensor: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, with the placements of `param`.

    `tensor` is a whole tensor or a DTensor on the mesh of `param`. If its placements differ, the call is collective.

    Raises:
        PlacementError: `tensor` is a DTensor and `param` is not, or on another mesh; or its shape is not that of
            `param`.
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
    """A name of this rank's part of a DTensor, equal on replicas of the part; empty if the part is the whole."""
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
    """The address of this rank's part. Creates no tensor, because it is called in every step."""
    assert isinstance(param, DTensor)
    return param._local_tensor.data_ptr()


def local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of a DTensor parameter's gradient, with the placements of the parameter; None without one.

    A gradient with other placements, such as Partial, is redistributed first.
    """
    grad = param.grad
    if grad is None:
        return None
    assert isinstance(param, DTensor)
    assert isinstance(grad, DTensor)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def is_first_replica(tensor: Tensor) -> bool:
    """Whether this rank counts its part in norms: it is the first along every mesh axis that replicates the tensor.

    Tensor-parallel axes of the root mesh that the tensor's own mesh lacks replicate it, too: a parameter that
    `fully_shard` cuts over the `"dp"` of a mesh `("dp", "tp")` is the same on all ranks of `"tp"`.
    """
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or ()
    first = all(at == 0 for at, placed in zip(coordinate, tensor.placements) if placed.is_replicate())
    root = root_of(mesh)
    other_axes = set(root.mesh_dim_names or ()).difference(mesh.mesh_dim_names or ())
    return first and all(root.get_local_rank(axis) == 0 for axis in other_axes.intersection(TENSOR_PARALLEL_AXES))


def mesh_comms(tensor: Tensor, axes: Sequence[int]) -> tuple[TorchComm, ...]:
    """The groups of ranks along these axes of a DTensor's mesh."""
    assert isinstance(tensor, DTensor)
    return tuple(TorchComm(tensor.device_mesh.get_group(axis)) for axis in axes)
