"""Matrix specs and compute stages of a unit's parameters, from the plan and the live process groups."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from opt_distributed.comm import Comm, TorchComm
from opt_distributed.layout import ComputeSlot, LayoutError
from opt_distributed.pieces import ComputeStage, mesh_comms
from opt_kernels.works import NOT_SPLIT, MatrixPart, MatrixSpec, TensorParallel
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.compute import ComputePlan
from opt_stack.planning.plan import UnitPlan


class PlacedMatrix(NamedTuple):
    """The description of the local part of a matrix for the rule, and the stage that gathers the whole matrix."""

    spec: MatrixSpec
    stage: ComputeStage | None = None


def place_matrices(
    unit: UnitPlan,
    params: Mapping[ParamId, nn.Parameter],
    metas: Mapping[ParamId, ParamMeta],
    tensor_parallel_comm: Comm,
    *,
    over: Callable[[Comm], Comm],
) -> dict[ParamId, PlacedMatrix]:
    """Return the `PlacedMatrix` of every parameter of the unit. Makes no collective calls. `over` returns the `Comm`
    with which the rule and the stages communicate in a group.

    Raises:
        LayoutError: the local part of a DTensor does not match its placements.
    """
    splits = {id: unit.splits.get(id, NOT_SPLIT) for id in unit.ids}
    # Sorted, because the order of a set differs between processes, but all ranks must make collectives in one order.
    placed = {id: PlacedMatrix(splits[id]) for id in sorted(unit.ids)}
    peers = _Peers(over)
    for plan in unit.compute:
        by_comms: dict[tuple[Comm, ...], list[ComputeSlot]] = {}  # one, unless meshes share axis names
        for slot in plan.layout.slots:
            comms = _comms(plan, params[slot.matrix.id], tensor_parallel_comm)
            by_comms.setdefault(tuple(map(peers.one, comms)), []).append(slot)
        for comms, slots in by_comms.items():
            placed |= _placed(plan, comms, slots, metas, splits, peers)
    return placed


def stages_of(placed: Iterable[PlacedMatrix]) -> list[ComputeStage]:
    """The stages of these matrices, each once, in order of appearance."""
    return list(dict.fromkeys(matrix.stage for matrix in placed if matrix.stage is not None))


def tensor_parallel(comm: Comm) -> TensorParallel:
    """The group of ranks that hold equal parts of a matrix, as the callables that a rule takes."""

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        total = x.contiguous().clone()
        comm.all_reduce_(total)
        return total

    def all_gather(x: torch.Tensor, dim: int) -> torch.Tensor:
        full = x.new_empty(comm.size * x.numel())
        comm.all_gather_(full, x.contiguous().view(-1))
        return torch.cat([part.view(x.shape) for part in full.chunk(comm.size)], dim)

    return TensorParallel(rank=comm.rank, size=comm.size, all_reduce=all_reduce, all_gather=all_gather)


class _Peers:
    """Keeps one object per group of ranks, because rules batch only matrices with the same object."""

    def __init__(self, over: Callable[[Comm], Comm]) -> None:
        self._over = over
        self._comms: dict[object, Comm] = {}
        self._peers: dict[Comm, TensorParallel] = {}

    def one(self, comm: Comm) -> Comm:
        """The one `Comm` for the group of `comm`."""
        key = comm.group if isinstance(comm, TorchComm) else comm
        if key not in self._comms:
            self._comms[key] = self._over(comm)
        return self._comms[key]

    def of(self, comm: Comm) -> TensorParallel:
        """The group as callables."""
        if comm not in self._peers:
            self._peers[comm] = tensor_parallel(comm)
        return self._peers[comm]


def _comms(plan: ComputePlan, param: nn.Parameter, tensor_parallel_comm: Comm) -> tuple[Comm, ...]:
    of_mesh = [axis.of_mesh for axis in plan.axes if axis.of_mesh is not None]
    return mesh_comms(param, of_mesh) if of_mesh else (tensor_parallel_comm,)


def _placed(
    plan: ComputePlan,
    comms: tuple[Comm, ...],
    slots: list[ComputeSlot],
    metas: Mapping[ParamId, ParamMeta],
    splits: Mapping[ParamId, MatrixSpec],
    peers: _Peers,
) -> dict[ParamId, PlacedMatrix]:
    """The matrices of one plan that are cut over one grid of ranks."""
    number, at = plan.tensor_parallel_axis, tuple(comm.rank for comm in comms)
    group = None if number is None else peers.of(comms[number])
    of_whole, of_part = {}, {}
    for slot in slots:
        matrix = slot.matrix
        block = plan.layout.block(slot, at)
        if block.shape != metas[matrix.id].local_shape:
            raise LayoutError(
                f"{matrix.id} of shape {matrix.shape}, cut along dims {matrix.dims} over {plan.layout.sizes} ranks, "
                f"should have {block.shape} on this rank and has {metas[matrix.id].local_shape}; shard it as "
                "fully_shard or parallelize_module do, or use an elementwise rule for it through config_overrides"
            )
        dim = None if number is None else matrix.dims[number]
        of_whole[matrix.id] = replace(splits[matrix.id], partition_dim=dim, tensor_parallel=group)
        of_part[matrix.id] = MatrixPart(matrix.id, matrix.shape, block.offset[-2])
    if not plan.layout.computes.gathers:
        return {id: PlacedMatrix(_in_place(spec, of_part[id], metas[id].local_shape)) for id, spec in of_whole.items()}
    stage = ComputeStage(plan.layout, comms, of_whole=of_whole)
    return {id: PlacedMatrix(replace(splits[id], part=part), stage) for id, part in of_part.items()}


def _in_place(spec: MatrixSpec, part: MatrixPart, local_shape: tuple[int, ...]) -> MatrixSpec:
    """The spec with the position of the part, unless equal parts imply it: a rule stacks only matrices of equal
    specs."""
    ranks = 1 if spec.tensor_parallel is None else spec.tensor_parallel.size
    dims = range(len(local_shape) - 2, len(local_shape))
    expected = [local_shape[dim] * (ranks if dim == spec.partition_dim else 1) for dim in dims]
    return spec if expected == list(part.whole_shape[-2:]) else replace(spec, part=part)
