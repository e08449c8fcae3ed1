"""DTensor parameters, which are laid out already: their local parts, gradients, and the groups of their meshes.

`fully_shard` creates such parameters (Shard(0) over the data-parallel mesh), and so do torch's tensor-parallel plans.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.wires import naming
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm, TorchComm
from opt_distributed.comm.groups import names_of, root_of
from opt_distributed.pieces.sources import OwnMemory, ReadGrads, Run, check_unfused
from opt_kernels.dtensor import local as kernels_local
from opt_paramgroups import TENSOR_PARALLEL_AXES, ParamId, Params, is_dtensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory; the tensor itself if it is not a DTensor."""
    return kernels_local(tensor.detach())


class FullySharded:
    """The modules of a model that `fully_shard` shards, which may hold gathered copies of their parameters. Does not
    keep them alive."""

    def __init__(self, chunks: Iterable[nn.Module]):
        modules = dict.fromkeys(module for chunk in chunks for module in chunk.modules())
        self._modules = [ref(module) for module in modules if hasattr(type(module), "set_reshard_after_backward")]

    def reshard_(self) -> None:
        """Free gathered copies, so that the next forward gathers the present shards; local."""
        for found in self._modules:
            module: Any = found()
            if module is not None:
                module.reshard()


def part_of_mesh(param: Any) -> str:
    """A name of this rank's part of a DTensor, equal on replicas of the part; empty if the part is the whole."""
    if local(param).shape == param.shape:
        return ""
    coordinate = param.device_mesh.get_coordinate() or ()
    at = []
    for axis, (index, placement) in enumerate(zip(coordinate, param.placements)):
        if not placement.is_replicate():
            at.append(f"{index}of{param.device_mesh.size(axis)}")
    return "@" + ".".join(at)


def is_first_replica(tensor: Tensor) -> bool:
    """Whether this rank counts its part in norms: it is the first along every mesh axis that replicates the tensor.

    Tensor-parallel axes of the root mesh that the tensor's own mesh lacks replicate it, too: a parameter that
    `fully_shard` cuts over the `"dp"` of a mesh `("dp", "tp")` is the same on all ranks of `"tp"`.
    """
    if not is_dtensor(tensor):
        return True
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or ()
    first = all(at == 0 for at, placed in zip(coordinate, tensor.placements) if placed.is_replicate())
    root = root_of(mesh)
    other_axes = set(names_of(root)).difference(names_of(mesh))
    return first and all(root.get_local_rank(axis) == 0 for axis in other_axes.intersection(TENSOR_PARALLEL_AXES))


def mesh_comms(tensor: Any, axes: Sequence[int]) -> tuple[TorchComm, ...]:
    """The groups of ranks along these axes of a DTensor's mesh."""
    return tuple(TorchComm(tensor.device_mesh.get_group(axis)) for axis in axes)


# --- gradients --------------------------------------------------------------------------------------------------------


ELSEWHERE = -1  # the address of a part that updates cannot write to


class LocalParts(OwnMemory):
    """The local parts of DTensor parameters."""

    def __init__(self, params: Params):
        super().__init__(params, _address)
        self._forms = [_form(param) for param in params.values()]

    def follow_(self, *, frees: bool = False) -> Collection[ParamId]:
        found = []
        for at, (id, param) in enumerate(self.params.items()):
            is_as_before = _form(param) == self._forms[at]
            if _address(param) != self.before[at] and (frees or is_as_before):
                found.append(id)
                self.before[at] = _address(param) if is_as_before else ELSEWHERE
        return found


class DTensorGrads:
    """Gradients of DTensor parameters: sharded like the parameters, and reduced along the axes of their meshes.

    If a parameter has replicas outside of its mesh, as with a tensor-parallel plan on one axis of a larger mesh, its
    gradient is averaged over them in the step. `replicas` maps parameters to these groups. A parameter that it
    maps to () has no such replicas.
    """

    grad_scale = 1.0

    def __init__(
        self,
        params: Params,
        replicas: Mapping[ParamId, tuple[Comm, ...]],
        *,
        dtype: torch.dtype,  # of the sums
    ):
        self.params = params
        self.place = LocalParts(params)
        by_groups: dict[tuple[Comm, ...], dict[ParamId, nn.Parameter]] = {}
        for id, comms in replicas.items():
            if comms:
                by_groups.setdefault(comms, {})[id] = params[id]
        # Over replicas outside of their meshes.
        self.averages = [_AveragedReplicas(same, comms, dtype=dtype) for comms, same in by_groups.items()]

    def reduce_(self) -> None:
        for average in self.averages:
            average.reduce_()

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        averages = {id: average for average in self.averages for id in average.params}
        found = [(id, self.params[id], averages.get(id)) for id, _ in runs]

        def read() -> list[Tensor | None]:
            return [_local_grad(param) if average is None else average.grad(id) for id, param, average in found]

        return read


class _AveragedReplicas:
    """Means of the local gradients of DTensor parameters over replicas outside of their meshes.

    All gradients are reduced as one tensor, with a flag for each parameter that says whether this rank has a gradient:
    a parameter that no replica used has none. The host reads the flags only if this rank lacks a gradient.
    """

    def __init__(self, params: Params, comms: Sequence[Comm], *, dtype: torch.dtype):
        self.params = params
        self.comms = comms
        shapes = [local(param).shape for param in params.values()]
        numels = [math.prod(shape) for shape in shapes]
        device = local(next(iter(params.values()))).device
        self._accelerator = devices.device_of(device)
        self._all = torch.zeros(sum(numels) + len(params), dtype=dtype, device=device)
        *parts, self._flags = torch.split(self._all, [*numels, len(params)])
        self._places = {id: part.view(shape) for id, part, shape in zip(params, parts, shapes, strict=True)}
        self._used: Collection[ParamId] = ()

    @torch.no_grad()
    def reduce_(self) -> None:
        """Average this step's gradients.

        Raises:
            CollectiveError: a collective failed, or exceeded the timeout of its group.
            UnusableGradientError: a gradient could not be read. The reduction is complete, with zeros in its place.
        """
        unreadable: Exception | None = None
        self._all.zero_()
        for id, param in self.params.items():
            try:
                if (grad := _local_grad(param)) is not None:
                    self._places[id].copy_(grad)
                else:
                    check_unfused(id, param)
            except Exception as error:  # of any kind, because the other ranks wait
                unreadable = error
        has_gradient = [param.grad is not None for param in self.params.values()]
        flags = torch.tensor(has_gradient, dtype=self._flags.dtype, device="cpu")
        self._flags.copy_(self._accelerator.upload(flags))
        for comm in self.comms:
            with naming("sum of DTensor gradients over replicas"):
                comm.all_reduce_(self._all)
        counts = has_gradient if all(has_gradient) else self._flags.tolist()
        self._used = {id for id, count in zip(self.params, counts, strict=True) if count}
        self._all.div_(math.prod(comm.size for comm in self.comms))
        if unreadable is not None:
            raise UnusableGradientError(f"a gradient could not be read: {unreadable}") from unreadable

    def grad(self, id: ParamId) -> Tensor | None:
        """The mean, in the local part's shape; None if no replica has a gradient."""
        return self._places[id] if id in self._used else None


def _address(param: Any) -> int:
    """The address of this rank's part of a DTensor. Creates no tensor, because it is called in every step."""
    address: int = param._local_tensor.data_ptr()
    return address


def _form(param: Any) -> tuple[object, ...]:
    """What must be the same in this rank's part of a DTensor after a move away and back."""
    part = local(param)
    return part.dtype, part.device, part.shape, part.stride(), param.placements


def _local_grad(param: Any) -> Tensor | None:
    """This rank's part of a DTensor parameter's gradient, with the placements of the parameter; None without one.

    A gradient with other placements, such as Partial, is redistributed first.
    """
    grad = param.grad
    if grad is None:
        return None
    assert is_dtensor(grad)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)
