"""Build the stepper of a plan: gradient sources, main values and states, units. Decides nothing."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchWrapper

from opt_config import ConfigError, OnHost
from opt_distributed.buffers import BufferPlan, ParamAndGradBuffer, ReducedGrads
from opt_distributed.comm import Alone, Axes, Comm, HostComm, is_outside, mesh_of, replicas_outside
from opt_distributed.comm import device as devices
from opt_distributed.layout import AS_IT_CAME, Computes
from opt_distributed.pieces import (
    BufferedGrads,
    HostMain,
    HostSide,
    LaidOutGrads,
    Main,
    OwnedPiece,
    OwnGrads,
    PeerSums,
    QuantizedSource,
    ReducedMainGrads,
    Source,
    StepNumbers,
    check_marks,
    init_state,
    is_first_replica,
    local,
    make_main,
    marked_ids,
)
from opt_distributed.step import (
    Family,
    Limits,
    Stepper,
    Unit,
    profiler_spans,
    scaler_of,
    timer_spans,
)
from opt_kernels.backends import is_dense
from opt_kernels.hooks import HookedUpdate, Hyperball, hooks_of
from opt_kernels.quantized import FP8, quantized
from opt_kernels.rules import Needs, Rule
from opt_kernels.works import NOT_SPLIT
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.building.matrices import PlacedMatrix, cut_params, place_matrices, stages_of
from opt_stack.planning.checks import SEPARATE_NORMS, check_graphs, is_megatron_wrapper, members, refuse
from opt_stack.planning.plan import Plan, UnitPlan
from opt_stack.planning.planner import Draft

logger = logging.getLogger("opt_stack")
PART_NUMEL = 1 << 24
"""Minimum number of elements of a part of a unit. One part is copied while the host updates another: at 1 << 24
elements, an update takes about 10 ms and a copy 2 ms."""
NORM_SLOTS = ("", *SEPARATE_NORMS)  # the model's own gradient norm, and the separate ones


def build_stepper(draft: Draft, device: torch.device) -> Stepper:
    """Build the stepper of the plan of `draft`, with tensors on `device`."""
    plan, roles, config = draft.plan, draft.roles, draft.config
    refuse(check_graphs(draft, device))
    reduced = {id(param) for chunk in draft.chunks if is_megatron_wrapper(chunk) for param in chunk.parameters()}
    averaged = _averaged_by_torch(draft)
    wrapped = {buffer.plan.name: buffer for buffer in draft.wrapped_buffers}
    plain = {b.name: _source(b, draft, device, reduced, averaged) for b in plan.buffers if b.name not in wrapped}
    own = {b.name: wrapped.get(b.name) or plain[b.name] for b in plan.buffers}
    fp8 = {b.name: _quantizing(own[b.name], b, draft) for b in plan.buffers if b.dtype is FP8}
    units = list(_units(draft, device, own, fp8))
    for param in draft.params.values():
        if (found := quantized(param)) is not None:
            found.forget_initial()
    slots, timers = norm_slots(plan), config.timers
    return Stepper(
        units=units,
        families=[
            Family(sources=[own[buffer.name] for buffer in plan.buffers if buffer.is_expert == is_expert], axes=axes)
            for is_expert, axes in ((False, roles.dense), (True, roles.expert))
        ],
        everyone=roles.totals,
        instances=roles.dense.inter,
        device=device,
        scaler=scaler_of(config.loss_scaling),
        limits=Limits(
            slots=slots,
            clips=tuple(slot in NORM_SLOTS for slot in slots),
            max_norm=config.clip_grad,
            skip_above=config.grad_norm_skip_threshold,
            count_zeros=config.log_num_zeros_in_grad,
        ),
        spans=profiler_spans if timers is None else timer_spans(timers, barrier=config.barrier_with_L1_time),
        graphs=config.optimizer_cuda_graph,
        peer_sums=PeerSums(plain.values(), draft.metas, roles, qk_layernorm=draft.qk_layernorm),
    )


def norm_slots(plan: Plan) -> tuple[str, ...]:
    """Return the names of the step's gradient norms, the same on every rank: the model's own, Megatron-Core's separate
    norm groups, and one for each rule with groups that are not clipped, under its name."""
    return (*NORM_SLOTS, *dict.fromkeys(group.optimizer for group in plan.groups if not group.clips))


def _units(
    draft: Draft, device: torch.device, sources: Mapping[str, Source], fp8: Mapping[str, QuantizedSource]
) -> Iterator[Unit]:
    """Build the units in the order of the step.

    Units on the device come first, so that it works while the host, which has to wait for the verdict, updates its own.
    """
    plan, roles, placement = draft.plan, draft.roles, draft.config.placement
    sides = [(unit, side) for side in ((False, True) if plan.hosted else (False,)) for unit in plan.units]
    # By buffer, the last unit that writes to it; the same on all ranks.
    last = {
        buffer.name: max(
            number
            for number, (unit, on_host) in enumerate(sides)
            if any(param.id in unit.ids for param in buffer.params) and (not on_host or any(plan.hosted[buffer.name]))
        )
        for buffer in plan.buffers
    }
    # Shared by both sides: hooks sum over all parts of a parameter that is cut.
    cut = {unit.name: cut_params(unit, draft) for unit in plan.units if isinstance(unit.rule, HookedUpdate)}
    queue = devices.device_of(device)
    numbers = StepNumbers(queue) if isinstance(placement, OnHost) else None
    for number, (planned, on_host) in enumerate(sides):
        away = queue if on_host and queue.is_asynchronous else None  # on a CPU, host and device are the same place
        placed = dict.fromkeys(planned.ids, PlacedMatrix(NOT_SPLIT))
        if planned.rule.needs is Needs.MATRICES:
            tensor_parallel = (roles.expert if planned.is_expert else roles.dense).tp
            over = partial(_on_host, device=away)
            placed = place_matrices(planned, draft.params, draft.metas, tensor_parallel, over=over)
        unit = Unit(
            name=f"{planned.name}/host" if on_host else planned.name,
            rule=planned.rule_of(on_host=on_host),
            pieces=list(_pieces(planned, draft, sources, fp8, placed, on_host=on_host, away=away)),
            completes=[fp8.get(name, sources[name]) for name, at in last.items() if at == number],
            stages=stages_of(placed.values()) if planned.compute else (),
        )
        unit.cut, unit.cut_rows = cut.get(planned.name, ((), ()))
        if away is None:
            yield unit
        else:
            assert isinstance(placement, OnHost)
            assert numbers is not None
            yield from _host_parts(unit, placement, away, numbers)


def _on_host(comm: Comm, *, device: devices.Device | None) -> Comm:
    """Return a group for tensors on the host, if these are copied to and from `device`."""
    return comm if device is None or comm.size == 1 else HostComm(comm, device)


def _host_parts(unit: Unit, placement: OnHost, device: devices.Device, numbers: StepNumbers) -> Iterator[Unit]:
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
        side = HostSide(pieces, device, numbers, placement)
        yield replace(unit, pieces=pieces, host=side, completes=unit.completes if pieces is parts[-1] else ())


# --- gradients --------------------------------------------------------------------------------------------------------


def _source(
    buffer: BufferPlan,
    draft: Draft,
    device: torch.device,
    reduced: set[int],  # `id` of parameters whose main_grad Megatron-Core's wrapper reduces
    averaged: set[int],  # `id` of parameters whose gradients torch's DistributedDataParallel averages
) -> Source:
    """Return the gradient source of a buffer: `param.grad` if no other rank contributes, else a reduced buffer."""
    params = {shape.id: draft.params[shape.id] for shape in buffer.params}
    axes, replicas, identities = draft.axes_of(buffer), draft.roles.dense.num_replicas, set(map(id, params.values()))
    is_reduced = identities <= reduced
    if not is_reduced:  # Megatron-Core's schedule completes the gradients of its wrapper
        check_marks(params, draft.metas, draft.roles, qk_layernorm=draft.qk_layernorm)
    if buffer.kind is AS_IT_CAME:
        outside = {name: replicas_outside(p, (axes.dp, axes.inter), name=str(name)) for name, p in params.items()}
        return LaidOutGrads(params, outside, dtype=buffer.grad_dtype)
    if is_reduced:
        return ReducedMainGrads(params)
    marked = marked_ids(draft.metas, draft.roles, qk_layernorm=draft.qk_layernorm)
    is_marked = not marked.isdisjoint(params)  # then gradients are summed in a buffer
    if axes.num_replicas == 1 and not is_marked:
        return OwnGrads(params, num_replicas=replicas)
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
    if identities <= averaged and not is_marked:
        return OwnGrads(params, num_replicas=1, memory=memory if buffer.kind.is_sharded else None, comm=axes.dp)
    sums = ReducedGrads(buffer.layout, params, axes, dtype=buffer.grad_dtype, device=device)
    return BufferedGrads(sums, memory, axes, num_replicas=replicas)


def _averaged_by_torch(draft: Draft) -> set[int]:
    """Return the `id` of parameters whose gradients torch's wrapper averages over exactly the data-parallel ranks.

    The step reduces all others: those of wrappers over other ranks, those that a wrapper ignores, and all of a wrapper
    whose parameters were frozen or unfrozen since it was built.
    """
    axes, averaged = draft.roles.dense, set[int]()
    for wrapper in (module for chunk in draft.chunks for module in chunk.modules()):
        if not isinstance(wrapper, TorchWrapper) or axes.inter.size > 1:
            continue
        if members(axes.dp) == dist.get_process_group_ranks(wrapper.process_group):
            averaged.update(map(id, _averaged(wrapper)))
    if averaged:
        logger.info("gradients are averaged by torch's DistributedDataParallel; the step does not reduce them again")
    return averaged


def _averaged(wrapper: TorchWrapper) -> list[nn.Parameter]:
    """The parameters that `wrapper` averages: those that required gradients when the model was wrapped.

    The wrapper does not list them, but records their number and bytes. If these are not those of today's trainable
    parameters, some were frozen or unfrozen since. Then none is returned, and the step reduces all, which leaves
    averaged gradients as they are.
    """
    ignored = set(wrapper.parameters_to_ignore)
    trainable = {
        param: None
        for prefix, module in wrapper.module.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if param.requires_grad and f"{prefix}.{name}" not in ignored
    }
    recorded = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    num_bytes = sum(param.numel() * param.element_size() for param in trainable)
    if (recorded["num_parameter_tensors"], recorded["total_parameter_size_bytes"]) != (len(trainable), num_bytes):
        logger.info("parameters were frozen or unfrozen since DistributedDataParallel was built; the step reduces all")
        return []
    return list(trainable)


def _quantizing(source: Source, buffer: BufferPlan, draft: Draft) -> QuantizedSource:
    """Return the publisher of a buffer of fp8 parameters, which quantises them after the update."""
    found = {shape.id: q for shape in buffer.params if (q := quantized(draft.params[shape.id])) is not None}
    return QuantizedSource(source, found, draft.axes_of(buffer).dp if buffer.layout.num_shards > 1 else Alone())


# --- pieces -----------------------------------------------------------------------------------------------------------


def _pieces(
    unit: UnitPlan,
    draft: Draft,
    sources: Mapping[str, Source],
    fp8: Mapping[str, QuantizedSource],
    placed: Mapping[ParamId, PlacedMatrix],
    *,
    on_host: bool,
    away: devices.Device | None,  # if main values and states are copied to the host from there
) -> Iterator[OwnedPiece]:
    """Yield the pieces of a unit on this rank, with main values and the rule's state before the first step."""
    plan, slots, rule = draft.plan, norm_slots(draft.plan), unit.rule_of(on_host=on_host)
    for buffer in plan.buffers:
        axes, is_sharded = draft.axes_of(buffer), buffer.layout.num_shards > 1
        rank = axes.dp.rank if is_sharded else 0
        for number, (id, of_param) in enumerate(buffer.runs(rank)):
            if id not in unit.ids or plan.is_on_host(buffer, rank, id) is not on_host:
                continue
            param, meta, group, at = draft.params[id], draft.metas[id], plan.groups[draft.group_of[id]], placed[id]
            stored = local(param) if meta.is_dtensor else param
            whole = of_param == slice(0, stored.numel())
            main: Main
            if buffer.name in fp8:
                main = fp8[buffer.name].main(id, of_param)
            else:
                _check_dense(id, stored)
                target = stored if whole else stored.detach().view(-1)[of_param]
                numbers = unit.numbers[buffer.dtype]
                main = make_main(numbers, target) if away is None else HostMain.of(numbers, target, away)
            if isinstance(main, HostMain):
                with main.device.on_host():
                    state = init_state(rule, main.on_host.value(), id=id, matrix=at.spec, stage=at.stage)
            else:
                state = init_state(rule, main.value(), id=id, matrix=at.spec, stage=at.stage)
            if whole:
                _check_start(unit.rule, id, stored)
            # Data-parallel replicas hold the same reduced gradient and share its inspection. All other copies, over
            # tensor-parallel ranks or over axes of a DTensor's mesh, are computed and inspected separately.
            is_shared = buffer.kind is not AS_IT_CAME and not is_sharded
            inspected = not is_shared or number % axes.dp.size == axes.dp.rank
            yield OwnedPiece(
                id=id,
                param=param,
                of_param=of_param,
                group=draft.group_of[id],
                source=sources[buffer.name],
                main=main,
                state=state,
                norm_slot=slots.index((meta.grad_norm_group or "") if group.clips else group.optimizer),
                counted=inspected and _is_counted(draft, buffer, id),
                inspected=inspected,
                replica=axes.inter.rank if is_sharded else None,
                part=_part(meta, axes),
                matrix=at.spec,
                stage=at.stage,
            )


def _check_dense(id: ParamId, stored: Tensor) -> None:
    """Raise ConfigError if no update could write the parameter, because its memory has holes or overlaps."""
    if stored.is_neg() or not is_dense(stored):
        raise ConfigError(
            f"parameter {str(id)!r} of shape {tuple(stored.shape)} and strides {stored.stride()} has holes, "
            "overlapping elements or its negative bit set; allowed are elements that fill their memory, in any order "
            "of dimensions; make it contiguous: "
            "nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))"
        )


def _check_start(rule: Rule, id: ParamId, value: Tensor) -> None:
    """Raise ConfigError for weights of norm 0, which Hyperball would keep at 0."""
    stuck = any(isinstance(hook, Hyperball) and hook.radius is None for hook in hooks_of(rule))
    if stuck and value.numel() and not value.any():
        raise ConfigError(
            f"hooks: Hyperball() keeps the initial norm of weights, but {str(id)!r} is all zeros; use "
            "Hyperball(radius=...), or initialise the parameter first"
        )


def _is_counted(draft: Draft, buffer: BufferPlan, id: ParamId) -> bool:
    """Return whether norms and zero counts include this rank's copy of a gradient that it inspects."""
    meta, param, axes = draft.metas[id], draft.params[id], draft.axes_of(buffer)
    if meta.shared or (axes.inter.rank > 0 and draft.roles.instance is None):
        return False
    if buffer.kind is AS_IT_CAME:
        outside = list(replicas_outside(param, (axes.dp, axes.inter), name=str(id)))
        outside += [axes.tp] if is_outside(axes.tp, mesh_of(param)) else []
        return is_first_replica(param) and all(comm.rank == 0 for comm in outside)
    return axes.tp.rank == 0 or meta.tensor_parallel


def _part(meta: ParamMeta, axes: Axes) -> str:
    """Return the suffix that names this tensor-parallel part of a plain parameter; empty if it is whole."""
    is_part = meta.tensor_parallel and not meta.is_dtensor and axes.tp.size > 1
    return f"@{axes.tp.rank}of{axes.tp.size}" if is_part else ""


def holds_parts(draft: Draft) -> bool:
    """Return whether this rank holds plain state tensors that other ranks of the same model do not hold."""
    if any(buffer.layout.num_shards > 1 for buffer in draft.plan.buffers):
        return True
    for unit in draft.plan.units:
        axes = draft.roles.expert if unit.is_expert else draft.roles.dense
        if any(_part(draft.metas[id], axes) for id in unit.ids):
            return True
        # State of whole matrices may be distributed over the ranks that store their parts.
        layouts = [compute.layout for compute in unit.compute if any(spec.whole for spec in unit.rule.state_specs)]
        if any(layout.computes is Computes.OWNER or layout.kept for layout in layouts):
            return True
    return False
