"""How ranks work together on parameters of a unit: matrices that are gathered, and norms and rows that are summed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from opt_distributed.buffers import BufferPlan
from opt_distributed.comm import Comm, TorchComm, group_of, is_outside, mesh_of
from opt_distributed.layout import AS_IT_CAME, ComputeSlot, LayoutError
from opt_distributed.pieces import ComputeStage, mesh_comms
from opt_distributed.step import CutParams, CutRows
from opt_kernels.hooks import HookedUpdate, SpannedRows
from opt_kernels.rules import Needs
from opt_kernels.works import NOT_SPLIT, MatrixPart, MatrixSpec, TensorParallel
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.compute import ComputePlan
from opt_stack.planning.plan import UnitPlan
from opt_stack.planning.planner import Draft


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
    known: dict[object, Comm] = {}  # one object for each group of ranks: rules batch only matrices with the same object
    peers: dict[Comm, TensorParallel] = {}
    for plan in unit.compute:
        axes = [axis.of_mesh for axis in plan.axes if axis.of_mesh is not None]
        by_comms: dict[tuple[Comm, ...], list[ComputeSlot]] = {}  # one entry, unless meshes share axis names
        for slot in plan.layout.slots:
            found = mesh_comms(params[slot.matrix.id], axes) if axes else (tensor_parallel_comm,)
            comms = tuple(known.setdefault(c.group if isinstance(c, TorchComm) else c, over(c)) for c in found)
            by_comms.setdefault(comms, []).append(slot)
        for comms, slots in by_comms.items():
            if (number := plan.tensor_parallel_axis) is not None and comms[number] not in peers:
                peers[comms[number]] = tensor_parallel(comms[number])
            group = None if number is None else peers[comms[number]]
            placed |= _placed(plan, comms, slots, metas, splits, group)
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


def _placed(
    plan: ComputePlan,
    comms: tuple[Comm, ...],
    slots: list[ComputeSlot],
    metas: Mapping[ParamId, ParamMeta],
    splits: Mapping[ParamId, MatrixSpec],
    group: TensorParallel | None,
) -> dict[ParamId, PlacedMatrix]:
    """The matrices of one plan that are cut over one grid of ranks."""
    number, at = plan.tensor_parallel_axis, tuple(comm.rank for comm in comms)
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


# --- norms and rows of gradients that hooks sum over ranks ------------------------------------------------------------


def cut_params(unit: UnitPlan, draft: Draft) -> tuple[Sequence[CutParams], Sequence[CutRows]]:
    """Return the parameters of a unit whose norms are summed over ranks, and those whose gradient rows span ranks, each
    by group of ranks; equal on all of them."""
    rule = unit.rule
    norms: dict[tuple[int, ...], CutParams] = {}
    spans: dict[tuple[int, ...], CutRows] = {}
    for buffer, id in draft.placed(unit) if isinstance(rule, HookedUpdate) else ():
        assert isinstance(rule, HookedUpdate)
        if rule.sums_norms and (comms := tuple(_comms(buffer, id, draft, from_dim=0))):
            before = norms.get(_key(comms), CutParams((), comms))
            norms[_key(comms)] = before._replace(ids=(*before.ids, id))
        meta = draft.metas[id]
        if not (rule.centralizes and len(meta.shape) > 1 and meta.numel):
            continue
        dims = len(meta.shape) - 1 if rule.needs is Needs.MATRICES else 1
        if comms := tuple(_comms(buffer, id, draft, from_dim=dims)):
            # The shape of `meta` is that of one tensor-parallel part.
            num_parts = prod(peers.size for peers in _tensor_peers(buffer, id, draft, from_dim=dims))
            rows = SpannedRows(
                num=prod(meta.local_shape[:dims]),
                dims=dims,
                local_numel=prod(meta.local_shape[dims:]),
                whole_numel=prod(meta.shape[dims:]) * num_parts,
            )
            earlier = spans.get(_key(comms), CutRows({}, comms))
            spans[_key(comms)] = earlier._replace(rows={**earlier.rows, id: rows})
    return tuple(norms.values()), tuple(spans.values())


def _key(comms: tuple[Comm, ...]) -> tuple[int, ...]:
    return tuple(id(group_of(comm) or comm) for comm in comms)


def _comms(buffer: BufferPlan, id: ParamId, draft: Draft, *, from_dim: int) -> Iterator[Comm]:
    """Yield the groups over which a parameter is cut along dim `from_dim` or later."""
    if buffer.kind is AS_IT_CAME:
        dims = [placed.shard_dim if placed.size > 1 else None for placed in draft.metas[id].placements]
        cuts = [axis for axis, dim in enumerate(dims) if dim is not None and dim >= from_dim]
        yield from mesh_comms(draft.params[id], cuts)
    elif buffer.kind.cuts and buffer.layout.num_shards > 1:
        yield draft.axes_of(buffer).dp
    yield from _tensor_peers(buffer, id, draft, from_dim=from_dim)


def _tensor_peers(buffer: BufferPlan, id: ParamId, draft: Draft, *, from_dim: int) -> tuple[Comm, ...]:
    """Return the tensor-parallel group if it is outside the parameter's mesh and cuts dim `from_dim` or later."""
    meta, peers = draft.metas[id], draft.axes_of(buffer).tp
    cuts = meta.tensor_parallel and (meta.partition_dim is None or meta.partition_dim >= from_dim)
    outside = buffer.kind is not AS_IT_CAME or is_outside(peers, mesh_of(draft.params[id]))
    return (peers,) if cuts and peers.size > 1 and outside else ()
