"""Gradient sources, and units with their pieces: main values and the rule's state, before the first step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchWrapper

from opt_config import ConfigError, OnHost
from opt_distributed.buffers import PRE_SHARDED, BufferPlan, ParamAndGradBuffer
from opt_distributed.comm import Alone, Axes, Comm, group_of, is_outside, members, mesh_of, replicas_outside
from opt_distributed.comm import device as devices
from opt_distributed.pieces import (
    BufferedGrads,
    DTensorGrads,
    HostMain,
    HostSide,
    OwnedPiece,
    ParamGrads,
    PeerSums,
    Publisher,
    QuantizedSource,
    ReducedMainGrads,
    Source,
    Streamed,
    check_marks,
    init_state,
    is_first_replica,
    local,
    marked_ids,
    mesh_comms,
)
from opt_distributed.step import CutParams, CutRows, Unit
from opt_kernels.backends import is_dense
from opt_kernels.hooks import HookedUpdate, Hyperball, SpannedRows, hooks_of
from opt_kernels.params import Main, make_main
from opt_kernels.quantized import FP8, quantized
from opt_kernels.rules import Needs
from opt_kernels.works import NOT_SPLIT
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.design import Design, is_megatron_wrapper
from opt_stack.planning.matrices import PlacedMatrix, place_matrices
from opt_stack.planning.plan import UnitPlan
from opt_stack.wording import logger

PART_NUMEL = 1 << 24
"""Minimum number of elements of a part of a unit. One part is copied while the host updates another: at 1 << 24
elements, an update takes about 10 ms and a copy 2 ms."""


class Sources(NamedTuple):
    """The gradient sources of a plan, by the names of its buffers."""

    of_buffers: Mapping[str, Source]
    fp8: Mapping[str, QuantizedSource]  # publish the buffers whose parameters are quantised after the update
    peer_sums: PeerSums


def build_sources(design: Design, device: torch.device) -> Sources:
    """Build the sources: those of wrapped chunks are their buffers."""
    model = design.model
    reducing = [chunk for chunk in design.request.chunks if model.shards_reduced or is_megatron_wrapper(chunk)]
    reduced = {id(param) for chunk in reducing for param in chunk.parameters()}
    averaged = _averaged_by_torch(design)
    of_buffers: dict[str, Source] = {buffer.plan.name: buffer for buffer in design.wrapped_buffers}
    plain = []
    fp8 = {}
    for buffer in design.plan.buffers:
        if buffer.name not in of_buffers:
            source = _source(buffer, design, device, reduced, averaged)
            of_buffers[buffer.name] = source
            plain.append(source)
        if buffer.dtype is FP8:
            stored = ((shape.id, quantized(model.params[shape.id])) for shape in buffer.params)
            codes = {id: tensor for id, tensor in stored if tensor is not None}
            sharing = design.axes_of(buffer).dp if buffer.layout.num_shards > 1 else Alone()
            fp8[buffer.name] = QuantizedSource(of_buffers[buffer.name], codes, sharing)
    peer_sums = PeerSums(plain, model.metas, design.roles, qk_layernorm=model.qk_layernorm)
    return Sources(of_buffers, fp8, peer_sums)


def _source(
    buffer: BufferPlan,
    design: Design,
    device: torch.device,
    reduced: set[int],  # `id` of parameters whose main_grad a wrapper reduces on every rank
    averaged: set[int],  # `id` of parameters whose gradients torch's DistributedDataParallel averages
) -> Source:
    """Return the gradient source of a buffer: `param.grad` if no other rank contributes, else a reduced buffer."""
    params = {shape.id: design.params[shape.id] for shape in buffer.params}
    axes = design.axes_of(buffer)
    replicas = design.roles.dense.num_replicas
    identities = set(map(id, params.values()))
    is_reduced = identities <= reduced
    if not is_reduced:  # Megatron-Core's schedule completes the gradients of its wrapper
        check_marks(params, design.metas, design.roles, qk_layernorm=design.model.qk_layernorm)
    if buffer.kind is PRE_SHARDED:
        outside = {name: replicas_outside(p, (axes.dp, axes.inter), name=str(name)) for name, p in params.items()}
        return DTensorGrads(params, outside, dtype=buffer.grad_dtype)
    if is_reduced and not buffer.kind.is_sharded:
        return ReducedMainGrads(params)
    marked = marked_ids(design.metas, design.roles, qk_layernorm=design.model.qk_layernorm)
    is_marked = not marked.isdisjoint(params)  # then gradients are summed in a buffer
    if axes.num_replicas == 1 and not is_marked and not is_reduced:
        return ParamGrads(params, num_replicas=replicas)
    memory = ParamAndGradBuffer(
        buffer.layout,
        params,
        param_dtype=buffer.dtype,
        grad_dtype=buffer.grad_dtype,
        device=device,
        sharded=buffer.kind.is_sharded,
        holds_grads=False,
        allocate=axes.dp.allocate,
    )
    if is_reduced:
        finishes = [chunk.finish_grad_sync for chunk in design.model.wrapped.values()]
        return ReducedMainGrads(params, finishes=finishes, memory=memory, comm=axes.dp)
    if identities <= averaged and not is_marked:
        return ParamGrads(params, num_replicas=1, memory=memory if buffer.kind.is_sharded else None, comm=axes.dp)
    return BufferedGrads(memory, axes, num_replicas=replicas)


def _averaged_by_torch(design: Design) -> set[int]:
    """Return the `id` of parameters whose gradients torch's wrapper averages over exactly the data-parallel ranks.

    The step reduces all others: those of wrappers over other ranks, and those that a wrapper ignores. A wrapper
    averages the parameters that required gradients when the model was wrapped. If today's trainable parameters are
    others, some were frozen or unfrozen since: the step reduces all of these, which leaves averaged gradients as they
    are.
    """
    axes = design.roles.dense
    averaged = set[int]()
    for wrapper in (module for chunk in design.request.chunks for module in chunk.modules()):
        if not isinstance(wrapper, TorchWrapper) or axes.inter.size > 1:
            continue
        if members(axes.dp) != dist.get_process_group_ranks(wrapper.process_group):
            continue
        trainable = {
            param: None
            for prefix, module in wrapper.module.named_modules()
            for name, param in module.named_parameters(recurse=False)
            if param.requires_grad and f"{prefix}.{name}" not in wrapper.parameters_to_ignore
        }
        if _reduced_by(wrapper, len(trainable)) == set(map(id, trainable)):
            averaged.update(map(id, trainable))
        else:
            logger.info(
                "parameters were frozen or unfrozen since DistributedDataParallel was built; the step reduces all"
            )
    if averaged:
        logger.info("gradients are averaged by torch's DistributedDataParallel; the step does not reduce them again")
    return averaged


def _reduced_by(wrapper: TorchWrapper, num_trainable: int) -> set[int]:
    """Return the `id` of the parameters that a wrapper of torch averages; empty if these are not `num_trainable`."""
    recorded = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if recorded["num_parameter_tensors"] != num_trainable:
        return set()
    given = {id(param) for param in wrapper._module_parameters}
    if len(given) == num_trainable:  # all that it was given
        return given
    buckets = wrapper.reducer._get_zeros_like_grad_buckets()  # takes the memory of these gradients for a moment
    return {id(param) for bucket in buckets for param in bucket.parameters()}


# --- units ------------------------------------------------------------------------------------------------------------


def build_units(design: Design, queue: devices.Device, sources: Sources, slots: Sequence[str]) -> Iterator[Unit]:
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
        away = queue if on_host and queue.is_asynchronous else None  # on a CPU, host and device are the same place
        computes_there = isinstance(placement, OnHost) and placement.compute == "host"
        placed = place_matrices(
            planned.compute,
            {id: planned.splits.get(id, NOT_SPLIT) for id in planned.ids},
            design.params,
            design.metas,
            design.axes_of(planned).tp,
            copies=away if computes_there else None,
        )
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
            with main.device.on_host() if isinstance(main, HostMain) else nullcontext():
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
