"""Units with their pieces: main values and the rule's state, before the first step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from opt_config import ConfigError, OnHost
from opt_distributed.buffers import PRE_SHARDED, BufferPlan, Metas
from opt_distributed.comm import Axes, Comm, HostComm, TorchComm, group_of, is_outside, mesh_of, replicas_outside
from opt_distributed.comm import device as devices
from opt_distributed.layout import Computes, LayoutError, SplitMatrix
from opt_distributed.pieces import (
    ComputeStage,
    HostMain,
    HostSide,
    OwnedPiece,
    Publisher,
    QuantizedSource,
    Streamed,
    init_state,
    is_first_replica,
    local,
    mesh_comms,
)
from opt_distributed.step import CutParams, CutRows, Unit
from opt_kernels.backends import is_dense
from opt_kernels.hooks import HookedUpdate, Hyperball, SpannedRows, hooks_of
from opt_kernels.params import Main, make_main
from opt_kernels.rules import Needs
from opt_kernels.works import NOT_SPLIT, MatrixPart, MatrixSpec, TensorParallel
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.building.sources import Sources
from opt_stack.planning.design import Design
from opt_stack.planning.matrices import ComputePlan, Splits
from opt_stack.planning.plan import UnitPlan

PART_NUMEL = 1 << 24
"""Minimum number of elements of a part of a unit. One part is copied while the host updates another: at 1 << 24
elements, an update takes about 10 ms and a copy 2 ms."""


class PlacedMatrix(NamedTuple):
    """The description of the local part of a matrix for the rule, and the stage that gathers the whole matrix."""

    spec: MatrixSpec
    stage: ComputeStage | None = None


def build_units(design: Design, device: devices.Device, sources: Sources, slots: Sequence[str]) -> Iterator[Unit]:
    """Build the units, in the order of the step.

    Units on the device come first, so that it works while the host, which has to wait for the verdict, updates its own.
    """
    plan = design.plan
    placement = design.config.placement
    sides = [(unit, side) for side in ((False, True) if plan.hosted else (False,)) for unit in plan.units]
    last = {}  # the number of the last unit that writes to each buffer; the same on all ranks
    for number, (planned, on_host) in enumerate(sides):
        for buffer, _ in planned.placed(plan.buffers):
            if not on_host or any(plan.hosted.get(buffer.name, ())):
                last[buffer.name] = number
    # Shared by both sides: hooks sum over all parts of a parameter that is cut.
    cut = {unit.name: _cut_params(unit, design) for unit in plan.units if isinstance(unit.rule, HookedUpdate)}
    for number, (planned, on_host) in enumerate(sides):
        away = device if on_host and device.is_asynchronous else None  # on a CPU, host and device are the same place
        computes_there = isinstance(placement, OnHost) and placement.compute == "host"
        placed = _place_matrices(planned, design, copies=away if computes_there else None)
        written = [buffer.name for buffer in plan.buffers if last[buffer.name] == number]
        completes: list[Publisher] = [sources.fp8.get(name) or sources.of_buffers[name].place for name in written]
        completes.sort(key=lambda source: isinstance(source, QuantizedSource))  # the others may send early
        norms, rows = cut.get(planned.name, ((), ()))
        unit = Unit(
            name=f"{planned.name}/host" if on_host else planned.name,
            rule=planned.side_rule(on_host=on_host),
            pieces=list(_pieces(planned, design, sources, placed, slots, on_host=on_host, away=away)),
            completes=completes,
            averages=planned.averages,
            stages=list(dict.fromkeys(matrix.stage for matrix in placed.values() if matrix.stage is not None)),
            cut=norms,
            cut_rows=rows,
        )
        if away is None or not isinstance(placement, OnHost):
            yield unit
        elif computes_there:
            yield from _host_parts(unit, placement, away)
        else:
            yield replace(unit, host=Streamed(unit.pieces, away, placement))


def _host_parts(unit: Unit, placement: OnHost, device: devices.Device) -> Iterator[Unit]:
    """Split `unit` into parts with separate copies: while one part is updated, the next is copied.

    Yields one part if the unit's update is collective, if copies do not overlap, or if this rank has no pieces.
    """
    parts: list[list[OwnedPiece]] = [[]]
    meets = isinstance(unit.rule, HookedUpdate) or unit.rule.needs is Needs.MATRICES
    for piece in unit.pieces:
        if placement.overlap and not meets and sum(p.main.shape.numel() for p in parts[-1]) >= PART_NUMEL:
            parts.append([])
        parts[-1].append(piece)
    for pieces in parts:
        side = HostSide(pieces, device, placement)
        yield replace(unit, pieces=pieces, host=side, completes=unit.completes if pieces is parts[-1] else ())


def _pieces(
    unit: UnitPlan,
    design: Design,
    sources: Sources,
    placed: Mapping[ParamId, PlacedMatrix],
    slots: Sequence[str],  # the names of the step's norms
    *,
    on_host: bool,
    away: devices.Device | None,  # if main values and states are copied to the host from there
) -> Iterator[OwnedPiece]:
    """Yield the pieces of a unit on this rank, with main values and the rule's state before the first step."""
    plan = design.plan
    rule = unit.side_rule(on_host=on_host)
    keeps_norm = any(isinstance(hook, Hyperball) and hook.radius is None for hook in hooks_of(unit.rule))
    for buffer in plan.buffers:
        axes = design.axes_of(buffer)
        is_sharded = buffer.layout.num_shards > 1
        rank = axes.dp.rank if is_sharded else 0
        has_buckets = buffer.kind.is_sharded and rule.needs is Needs.MATRICES and not unit.compute
        for number, (bucket, (id, of_param, _)) in enumerate(buffer.owned(rank)):
            if id not in unit.ids or plan.is_on_host(buffer, rank, id) is not on_host:
                continue
            param = design.params[id]
            meta = design.metas[id]
            group = design.groups.index_of[id]
            at = placed[id]
            stored = local(param) if meta.is_dtensor else param
            is_whole = of_param == slice(0, stored.numel())
            if buffer.name in sources.fp8:
                main: Main = sources.fp8[buffer.name].main(id, of_param)
            else:
                _check_fills_memory(id, stored)
                target = stored if is_whole else stored.detach().view(-1)[of_param]
                numbers = unit.numbers[buffer.dtype]
                main = make_main(numbers, target) if away is None else HostMain.of(numbers, target, away)
            with main.memory():
                value = main.updated.value()
                state = init_state(rule, value, id=id, matrix=at.spec, stage=at.stage)
            if keeps_norm and is_whole and stored.numel() and not stored.any():
                raise ConfigError(
                    f"hooks: Hyperball() keeps the initial norm of weights, but {str(id)!r} is all zeros; use "
                    "Hyperball(radius=...), or initialise the parameter first"
                )
            # Data-parallel replicas hold the same reduced gradient and share its inspection. All other copies, over
            # tensor-parallel ranks or over axes of a DTensor's mesh, are computed and inspected separately.
            is_shared = buffer.kind is not PRE_SHARDED and not is_sharded
            inspected = not is_shared or number % axes.dp.size == axes.dp.rank
            piece = OwnedPiece(
                id=id,
                param=param,
                of_param=of_param,
                group=group,
                source=sources.of_buffers[buffer.name],
                main=main,
                state=state,
                norm_slot=slots.index(plan.norms[group] or meta.grad_norm_group or ""),
                counted=inspected and _is_counted(design, buffer, id),
                inspected=inspected,
                replica=axes.inter.rank if is_sharded else None,
                part=part_name(meta, axes),
                matrix=at.spec,
                stage=at.stage,
                bucket=bucket if has_buckets else 0,
            )
            if unit.averages.specs:
                unit.averages.init_(piece, value)
            yield piece


def _check_fills_memory(id: ParamId, stored: Tensor) -> None:
    """Raise ConfigError if no update could write this rank's part of a parameter."""
    if stored.is_neg() or not is_dense(stored):
        raise ConfigError(
            f"parameter {str(id)!r} of shape {tuple(stored.shape)} and strides {stored.stride()} has "
            "holes, overlapping elements or its negative bit set; allowed are elements that fill their "
            "memory, in any order of dimensions; make it contiguous: "
            "nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))"
        )


def _is_counted(design: Design, buffer: BufferPlan, id: ParamId) -> bool:
    """Return whether norms and zero counts include this rank's copy of a gradient that it inspects."""
    meta = design.metas[id]
    param = design.params[id]
    axes = design.axes_of(buffer)
    if meta.shared or (axes.inter.rank > 0 and design.roles.instance is None):
        return False
    if buffer.kind is PRE_SHARDED:
        outside = list(replicas_outside(param, (axes.dp, axes.inter), name=str(id)))
        outside += [axes.tp] if is_outside(axes.tp, mesh_of(param)) else []
        return is_first_replica(param) and all(comm.rank == 0 for comm in outside)
    return axes.tp.rank == 0 or meta.tensor_parallel


def part_name(meta: ParamMeta, axes: Axes) -> str:
    """Return the suffix that names this tensor-parallel part of a plain parameter; empty if it is whole."""
    is_part = meta.tensor_parallel and not meta.is_dtensor and axes.tp.size > 1
    return f"@{axes.tp.rank}of{axes.tp.size}" if is_part else ""


# --- matrices that are cut over ranks: the stage that gathers each, and with whom its rule communicates ---------------


def _place_matrices(unit: UnitPlan, design: Design, *, copies: devices.Device | None) -> dict[ParamId, PlacedMatrix]:
    """Return the `PlacedMatrix` of every parameter of a unit. If the rule computes on the host, `copies` is the device
    through which it communicates. The only collective calls are those of `Comm.part`, for axes in two hops.

    Raises:
        LayoutError: the local part of a DTensor does not match its placements.
    """
    # Sorted, because the order of a set differs between processes, but all ranks must make collectives in one order.
    placed = {id: PlacedMatrix(unit.splits.get(id, NOT_SPLIT)) for id in sorted(unit.ids)}
    known: dict[object, Comm] = {}  # one object for each group of ranks: rules batch only matrices with the same object
    peers: dict[Comm, TensorParallel] = {}
    for plan in unit.compute:
        by_comms: dict[tuple[Comm, ...], list[SplitMatrix]] = {}  # one entry, unless meshes share axis names
        for matrix in plan.layout.matrices:
            along = []
            for axis in plan.axes:
                comm = design.axes_of(unit).tp
                if axis.of_mesh is not None:
                    [comm] = mesh_comms(design.params[matrix.id], [axis.of_mesh])
                key = (comm.group if isinstance(comm, TorchComm) else comm, axis.hop)
                if key not in known:
                    ranks = next((ranks for ranks in axis.hop if comm.rank in ranks), None)
                    part = comm if ranks is None else comm.part(ranks)
                    known[key] = part if copies is None or part.size == 1 else HostComm(part, copies)
                along.append(known[key])
            by_comms.setdefault(tuple(along), []).append(matrix)
        number = plan.tensor_parallel_axis
        for comms, matrices in by_comms.items():
            group = None if number is None else peers.setdefault(comms[number], tensor_parallel(comms[number]))
            placed |= _placed(plan, comms, matrices, design.metas, unit.splits, group)
    return placed


def tensor_parallel(comm: Comm) -> TensorParallel:
    """Return the process group over which a matrix is evenly split, as the callables that rules expect."""

    def all_reduce(x: Tensor) -> Tensor:
        total = x.contiguous().clone()
        comm.all_reduce_(total)
        return total

    def all_gather(x: Tensor, dim: int) -> Tensor:
        full = x.new_empty(comm.size * x.numel())
        comm.all_gather_(full, x.contiguous().view(-1))
        return torch.cat([part.view(x.shape) for part in full.chunk(comm.size)], dim)

    return TensorParallel(rank=comm.rank, size=comm.size, all_reduce=all_reduce, all_gather=all_gather)


def _placed(
    plan: ComputePlan,
    comms: tuple[Comm, ...],
    matrices: list[SplitMatrix],
    metas: Metas,
    splits: Splits,
    group: TensorParallel | None,
) -> dict[ParamId, PlacedMatrix]:
    """Place the matrices of one plan that are cut over one grid of ranks."""
    number = plan.tensor_parallel_axis
    num_parts = 1 if group is None else group.size
    # Without the matrices of other meshes, which are exchanged in stages of their own.
    layout = replace(plan.layout, matrices=tuple(matrices))
    at = tuple(comm.rank for comm in comms)
    of_whole = {}
    of_part = {}
    for matrix in matrices:
        block = matrix.block(layout.sizes, at)
        local_shape = metas[matrix.id].local_shape
        if block.shape != local_shape:
            raise LayoutError(
                f"{matrix.id} of shape {matrix.shape}, cut along dims {matrix.dims} over {layout.sizes} ranks, "
                f"should have {block.shape} on this rank and has {local_shape}; shard it as fully_shard or "
                'parallelize_module do, or set "optimizer": "adam" for it, in an override or in its group'
            )
        dim = None if number is None else matrix.dims[number]
        spec = splits.get(matrix.id, NOT_SPLIT)
        part = MatrixPart(matrix.id, matrix.shape, block.offset[-2])
        whole = of_whole[matrix.id] = replace(spec, partition_dim=dim, tensor_parallel=group)
        if layout.computes is Computes.OWNER:
            of_part[matrix.id] = replace(spec, part=part)
        else:  # the position is left out if equal parts imply it: a rule stacks only matrices of equal specs
            equal = [size * num_parts if side == dim else size for side, size in enumerate(local_shape)]
            is_implied = matrix.shape[-2:] == tuple(equal[-2:])
            of_part[matrix.id] = whole if is_implied else replace(whole, part=part)
    stage = ComputeStage(layout, comms, of_whole=of_whole) if layout.computes is Computes.OWNER else None
    return {id: PlacedMatrix(spec, stage) for id, spec in of_part.items()}


# --- what hooks sum over ranks: norms of parameters, and rows of gradients --------------------------------------------


def _cut_params(unit: UnitPlan, design: Design) -> tuple[Sequence[CutParams], Sequence[CutRows]]:
    """Return the parameters of a unit whose norms are summed over ranks, and those whose gradient rows span ranks, each
    by group of ranks; equal on all of them."""
    rule = unit.rule
    assert isinstance(rule, HookedUpdate)
    norms: dict[tuple[int, ...], CutParams] = {}
    spans: dict[tuple[int, ...], CutRows] = {}
    for buffer, id in unit.placed(design.plan.buffers):
        meta = design.metas[id]
        if rule.sums_norms and (comms := (*_cuts(buffer, id, design, 0), *_tensor_cuts(buffer, id, design, 0))):
            before = norms.get(_key(comms), CutParams((), comms))
            norms[_key(comms)] = CutParams((*before.ids, id), before.comms)
        if rule.centralizes and len(meta.shape) > 1 and meta.numel:
            dims = len(meta.shape) - 1 if unit.needs_matrices else 1
            peers = _tensor_cuts(buffer, id, design, dims)
            if comms := (*_cuts(buffer, id, design, dims), *peers):
                cut = spans.setdefault(_key(comms), CutRows({}, comms))
                cut.rows[id] = SpannedRows(
                    num=prod(meta.local_shape[:dims]),
                    dims=dims,
                    local_numel=prod(meta.local_shape[dims:]),
                    # The shape of `meta` is that of one tensor-parallel part.
                    whole_numel=prod(meta.shape[dims:]) * prod(comm.size for comm in peers),
                )
    return tuple(norms.values()), tuple(spans.values())


def _key(comms: tuple[Comm, ...]) -> tuple[int, ...]:
    return tuple(id(group_of(comm) or comm) for comm in comms)


def _cuts(buffer: BufferPlan, id: ParamId, design: Design, from_dim: int) -> Sequence[Comm]:
    """The groups of its mesh or buffer over which a parameter is cut along dim `from_dim` or later."""
    if buffer.kind is PRE_SHARDED:
        dims = [placed.shard_dim if placed.size > 1 else None for placed in design.metas[id].placements]
        return mesh_comms(
            design.params[id], [axis for axis, dim in enumerate(dims) if dim is not None and dim >= from_dim]
        )
    return (design.axes_of(buffer).dp,) if buffer.kind.cuts and buffer.layout.num_shards > 1 else ()


def _tensor_cuts(buffer: BufferPlan, id: ParamId, design: Design, from_dim: int) -> tuple[Comm, ...]:
    """The tensor-parallel group if it is outside the parameter's mesh and cuts dim `from_dim` or later."""
    meta = design.metas[id]
    peers = design.axes_of(buffer).tp
    cuts = meta.tensor_parallel and (meta.partition_dim is None or meta.partition_dim >= from_dim)
    outside = buffer.kind is not PRE_SHARDED or is_outside(peers, mesh_of(design.params[id]))
    return (peers,) if cuts and peers.size > 1 and outside else ()
