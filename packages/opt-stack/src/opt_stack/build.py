"""Build what steps work on: gradient sources, main values and states, units; then the stepper. Decides nothing."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchWrapper

from opt_config import ConfigError, OnHost
from opt_distributed.buffers import AS_IT_CAME, BufferPlan, ParamAndGradBuffer, ReducedGrads, copied_ids
from opt_distributed.comm import Alone, Axes, Comm, HostComm, group_of, is_outside, mesh_of, replicas_outside
from opt_distributed.comm import device as devices
from opt_distributed.layout import Computes
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
    check_marks,
    init_state,
    is_first_replica,
    local,
    make_main,
    marked_ids,
    mesh_comms,
)
from opt_distributed.step import (
    CutParams,
    CutRows,
    EqualGroups,
    Family,
    Guards,
    Limits,
    Scaler,
    Stepper,
    Unit,
    Watch,
    WrittenReplicas,
    profiler_spans,
    scaler_of,
    timer_spans,
)
from opt_kernels.backends import is_dense
from opt_kernels.hooks import HookedUpdate, Hyperball, SpannedRows, hooks_of
from opt_kernels.quantized import FP8, quantized
from opt_kernels.rules import Needs
from opt_kernels.works import NOT_SPLIT
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.checks import SEPARATE_NORMS, check_graphs, members, refuse
from opt_stack.planning.design import Design, is_megatron_wrapper
from opt_stack.planning.matrices import PlacedMatrix, place_matrices
from opt_stack.planning.plan import UnitPlan
from opt_stack.state.live import Held, SharedCopies
from opt_stack.state.weights import Evaluation, Groups, LoadedWeights, OptimizerStateGuard

logger = logging.getLogger("opt_stack")
PART_NUMEL = 1 << 24
"""Minimum number of elements of a part of a unit. One part is copied while the host updates another: at 1 << 24
elements, an update takes about 10 ms and a copy 2 ms."""
NORM_SLOTS = ("", *SEPARATE_NORMS)  # the model's own gradient norm, and Megatron-Core's separate ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What steps work on: memory is allocated."""

    device: torch.device
    units: tuple[Unit, ...]
    families: tuple[Family, ...]
    peer_sums: PeerSums
    slots: tuple[str, ...]  # names of the gradient norms, equal on all ranks
    scaler: Scaler
    held: Mapping[ParamId, Held]  # the pieces of this rank
    evaluation: Evaluation
    loaded: LoadedWeights


@torch.inference_mode(False)  # steps outside of inference mode must be able to write what is made here, too
def build_parts(design: Design, device: torch.device) -> Parts:
    """Allocate what the plan of `design` says, on `device`. Raises ConfigError."""
    plan = design.plan
    roles = design.request.roles
    config = design.request.config
    refuse(design, [partial(check_graphs, device=device)])
    if config.barrier_with_L1_time and config.timers is None:
        raise ConfigError("barrier_with_L1_time=True has no effect without timers; set timers, or leave it at False")
    reducing = [chunk for chunk in design.request.chunks if design.model.shards_reduced or is_megatron_wrapper(chunk)]
    reduced = {id(param) for chunk in reducing for param in chunk.parameters()}
    averaged = _averaged_by_torch(design)
    wrapped = {buffer.plan.name: buffer for buffer in design.wrapped_buffers}
    plain = {b.name: _source(b, design, device, reduced, averaged) for b in plan.buffers if b.name not in wrapped}
    own = {b.name: wrapped.get(b.name) or plain[b.name] for b in plan.buffers}
    fp8 = {}
    for buffer in plan.buffers:
        if buffer.dtype is FP8:  # its parameters are quantised after the update
            codes = {
                shape.id: q for shape in buffer.params if (q := quantized(design.model.params[shape.id])) is not None
            }
            sharing = design.axes_of(buffer).dp if buffer.layout.num_shards > 1 else Alone()
            fp8[buffer.name] = QuantizedSource(own[buffer.name], codes, sharing)
    slots = (*NORM_SLOTS, *dict.fromkeys(filter(None, plan.norms)))  # equal on all ranks
    units = tuple(_units(design, device, own, fp8, slots))
    for param in design.model.params.values():
        if (found := quantized(param)) is not None:
            found.forget_initial()
    families = tuple(
        Family(sources=[own[buffer.name] for buffer in plan.buffers if buffer.is_expert == is_expert], axes=axes)
        for is_expert, axes in ((False, roles.dense), (True, roles.expert))
    )
    held = {piece.id: Held(unit, piece) for unit in units for piece in unit.pieces}
    evaluation = Evaluation(units)
    loaded = LoadedWeights(
        [piece for _, piece in held.values()],
        design.groups.groups,
        design.request.chunks,
        averaged=[piece for unit, piece in held.values() if evaluation.keeps_weights_of(unit)],
        copied=copied_ids(design.model.params, design.model.metas, roles),
    )
    return Parts(
        device=device,
        units=units,
        families=families,
        peer_sums=PeerSums(plain.values(), design.model.metas, roles, qk_layernorm=design.model.qk_layernorm),
        slots=slots,
        scaler=scaler_of(config.loss_scaling),
        held=held,
        evaluation=evaluation,
        loaded=loaded,
    )


def build_stepper(design: Design, parts: Parts, groups: Groups, copies: SharedCopies, watch: Watch) -> Stepper:
    """Build the stepper of `parts`, with its guards in the order in which their errors are raised. Collective.

    `groups` are those that the optimizer will have. Raises GraphError if the device has no graphs.
    """
    config = design.request.config
    roles = design.request.roles
    everyone = roles.totals
    instances = roles.dense.inter
    used = roles.everyone.gather_objects({piece.norm_slot for _, piece in parts.held.values()})
    sources = [source for family in parts.families for source in family.sources]
    rules = {piece.group: unit.rule for unit, piece in parts.held.values()}
    equal = EqualGroups(
        groups,
        rules,
        own={name for rule in rules.values() for name in getattr(rule, "hyper_names", ())},
        everyone=everyone if everyone.size > 1 else instances,  # instances of one rank each
    )
    written = WrittenReplicas(copies, device=devices.device_of(parts.device))
    has_others = roles.everyone.size > 1
    guards = Guards(
        groups,
        sources,
        rules,
        equal,
        everyone=everyone,
        instances=instances,
        first=[OptimizerStateGuard(parts.loaded, design.model.wrapped.values(), roles)],
        last=[written] if has_others else [],
    )
    timers = config.timers
    return Stepper(
        units=parts.units,
        families=parts.families,
        guards=guards,
        everyone=everyone,
        instances=instances,
        device=parts.device,
        scaler=parts.scaler,
        limits=Limits(
            slots=parts.slots,
            clips=tuple(slot in NORM_SLOTS for slot in parts.slots),
            max_norm=config.clip_grad,
            skip_above=config.grad_norm_skip_threshold,
            count_zeros=config.log_num_zeros_in_grad,
        ),
        spans=profiler_spans if timers is None else timer_spans(timers, barrier=config.barrier_with_L1_time),
        graphs=config.optimizer_cuda_graph,
        peer_sums=parts.peer_sums,
        empty_slots=frozenset(range(len(parts.slots))).difference(*used),
        at_start=[written.at_start] if has_others else [],
        watch=watch,
    )


def _units(
    design: Design,
    device: torch.device,
    sources: Mapping[str, Source],
    fp8: Mapping[str, QuantizedSource],
    slots: Sequence[str],
) -> Iterator[Unit]:
    """Build the units in the order of the step.

    Units on the device come first, so that it works while the host, which has to wait for the verdict, updates its own.
    """
    plan = design.plan
    roles = design.request.roles
    placement = design.request.config.placement
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
    cut = {unit.name: cut_params(unit, design) for unit in plan.units if isinstance(unit.rule, HookedUpdate)}
    queue = devices.device_of(device)
    for number, (planned, on_host) in enumerate(sides):
        away = queue if on_host and queue.is_asynchronous else None  # on a CPU, host and device are the same place

        def over(comm: Comm, away: devices.Device | None = away) -> Comm:
            """The group for tensors on the host, if these are copied to and from the device."""
            return comm if away is None or comm.size == 1 else HostComm(comm, away)

        placed = {id: PlacedMatrix(planned.splits.get(id, NOT_SPLIT)) for id in planned.ids}
        if planned.compute:
            tensor_parallel = (roles.expert if planned.is_expert else roles.dense).tp
            splits = {id: at.spec for id, at in placed.items()}
            placed = place_matrices(
                planned.compute, splits, design.model.params, design.model.metas, tensor_parallel, over=over
            )
        unit = Unit(
            name=f"{planned.name}/host" if on_host else planned.name,
            rule=planned.rule_of(on_host=on_host),
            pieces=list(_pieces(planned, design, sources, fp8, placed, slots, on_host=on_host, away=away)),
            completes=[fp8.get(name, sources[name]) for name, at in last.items() if at == number],
            stages=list(dict.fromkeys(matrix.stage for matrix in placed.values() if matrix.stage is not None)),
        )
        unit.cut, unit.cut_rows = cut.get(planned.name, ((), ()))
        if away is None:
            yield unit
        else:
            assert isinstance(placement, OnHost)
            yield from _host_parts(unit, placement, away)


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


# --- gradients --------------------------------------------------------------------------------------------------------


def _source(
    buffer: BufferPlan,
    design: Design,
    device: torch.device,
    reduced: set[int],  # `id` of parameters whose main_grad a wrapper reduces on every rank
    averaged: set[int],  # `id` of parameters whose gradients torch's DistributedDataParallel averages
) -> Source:
    """Return the gradient source of a buffer: `param.grad` if no other rank contributes, else a reduced buffer."""
    params = {shape.id: design.model.params[shape.id] for shape in buffer.params}
    axes = design.axes_of(buffer)
    replicas = design.request.roles.dense.num_replicas
    identities = set(map(id, params.values()))
    is_reduced = identities <= reduced
    if not is_reduced:  # Megatron-Core's schedule completes the gradients of its wrapper
        check_marks(params, design.model.metas, design.request.roles, qk_layernorm=design.model.qk_layernorm)
    if buffer.kind is AS_IT_CAME:
        outside = {name: replicas_outside(p, (axes.dp, axes.inter), name=str(name)) for name, p in params.items()}
        return LaidOutGrads(params, outside, dtype=buffer.grad_dtype)
    if is_reduced and not buffer.kind.is_sharded:
        return ReducedMainGrads(params)
    marked = marked_ids(design.model.metas, design.request.roles, qk_layernorm=design.model.qk_layernorm)
    is_marked = not marked.isdisjoint(params)  # then gradients are summed in a buffer
    if axes.num_replicas == 1 and not is_marked and not is_reduced:
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
    if is_reduced:
        finishes = [chunk.finish_grad_sync for chunk in design.model.wrapped.values()]
        return ReducedMainGrads(params, finishes=finishes, memory=memory, comm=axes.dp)
    if identities <= averaged and not is_marked:
        return OwnGrads(params, num_replicas=1, memory=memory if buffer.kind.is_sharded else None, comm=axes.dp)
    sums = ReducedGrads(buffer.layout, params, axes, dtype=buffer.grad_dtype, device=device)
    return BufferedGrads(sums, memory, axes, num_replicas=replicas)


def _averaged_by_torch(design: Design) -> set[int]:
    """Return the `id` of parameters whose gradients torch's wrapper averages over exactly the data-parallel ranks.

    The step reduces all others: those of wrappers over other ranks, and those that a wrapper ignores. A wrapper
    averages the parameters that required gradients when the model was wrapped. If today's trainable parameters are
    others, some were frozen or unfrozen since: the step reduces all of these, which leaves averaged gradients as they
    are.
    """
    axes = design.request.roles.dense
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


# --- pieces -----------------------------------------------------------------------------------------------------------


def _pieces(
    unit: UnitPlan,
    design: Design,
    sources: Mapping[str, Source],
    fp8: Mapping[str, QuantizedSource],
    placed: Mapping[ParamId, PlacedMatrix],
    slots: Sequence[str],  # the names of the step's norms
    *,
    on_host: bool,
    away: devices.Device | None,  # if main values and states are copied to the host from there
) -> Iterator[OwnedPiece]:
    """Yield the pieces of a unit on this rank, with main values and the rule's state before the first step."""
    plan = design.plan
    rule = unit.rule_of(on_host=on_host)
    keeps_norm = any(isinstance(hook, Hyperball) and hook.radius is None for hook in hooks_of(unit.rule))
    for buffer in plan.buffers:
        axes = design.axes_of(buffer)
        is_sharded = buffer.layout.num_shards > 1
        rank = axes.dp.rank if is_sharded else 0
        for number, (id, of_param) in enumerate(buffer.runs(rank)):
            if id not in unit.ids or plan.is_on_host(buffer, rank, id) is not on_host:
                continue
            param = design.model.params[id]
            meta = design.model.metas[id]
            group = design.groups.index_of[id]
            at = placed[id]
            stored = local(param) if meta.is_dtensor else param
            whole = of_param == slice(0, stored.numel())
            main: Main
            if buffer.name in fp8:
                main = fp8[buffer.name].main(id, of_param)
            else:
                if stored.is_neg() or not is_dense(stored):  # no update could write it
                    raise ConfigError(
                        f"parameter {str(id)!r} of shape {tuple(stored.shape)} and strides {stored.stride()} has "
                        "holes, overlapping elements or its negative bit set; allowed are elements that fill their "
                        "memory, in any order of dimensions; make it contiguous: "
                        "nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))"
                    )
                target = stored if whole else stored.detach().view(-1)[of_param]
                numbers = unit.numbers[buffer.dtype]
                main = make_main(numbers, target) if away is None else HostMain.of(numbers, target, away)
            with main.device.on_host() if isinstance(main, HostMain) else nullcontext():
                value = main.on_host.value() if isinstance(main, HostMain) else main.value()
                state = init_state(rule, value, id=id, matrix=at.spec, stage=at.stage)
            if keeps_norm and whole and stored.numel() and not stored.any():
                raise ConfigError(
                    f"hooks: Hyperball() keeps the initial norm of weights, but {str(id)!r} is all zeros; use "
                    "Hyperball(radius=...), or initialise the parameter first"
                )
            # Data-parallel replicas hold the same reduced gradient and share its inspection. All other copies, over
            # tensor-parallel ranks or over axes of a DTensor's mesh, are computed and inspected separately.
            is_shared = buffer.kind is not AS_IT_CAME and not is_sharded
            inspected = not is_shared or number % axes.dp.size == axes.dp.rank
            yield OwnedPiece(
                id=id,
                param=param,
                of_param=of_param,
                group=group,
                source=sources[buffer.name],
                main=main,
                state=state,
                norm_slot=slots.index(plan.norms[group] or meta.grad_norm_group or ""),
                counted=inspected and _is_counted(design, buffer, id),
                inspected=inspected,
                replica=axes.inter.rank if is_sharded else None,
                part=_part(meta, axes),
                matrix=at.spec,
                stage=at.stage,
            )


def _is_counted(design: Design, buffer: BufferPlan, id: ParamId) -> bool:
    """Return whether norms and zero counts include this rank's copy of a gradient that it inspects."""
    meta = design.model.metas[id]
    param = design.model.params[id]
    axes = design.axes_of(buffer)
    if meta.shared or (axes.inter.rank > 0 and design.request.roles.instance is None):
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


# --- norms and rows of gradients that hooks sum over ranks ------------------------------------------------------------


def cut_params(unit: UnitPlan, design: Design) -> tuple[Sequence[CutParams], Sequence[CutRows]]:
    """Return the parameters of a unit whose norms are summed over ranks, and those whose gradient rows span ranks, each
    by group of ranks; equal on all of them."""
    rule = unit.rule
    assert isinstance(rule, HookedUpdate)
    norms: dict[tuple[int, ...], CutParams] = {}
    spans: dict[tuple[int, ...], CutRows] = {}
    for buffer, id in unit.placed(design.plan.buffers):
        meta = design.model.metas[id]
        if rule.sums_norms and (comms := (*_cuts(buffer, id, design, 0), *_tensor_cuts(buffer, id, design, 0))):
            before = norms.get(_key(comms), CutParams((), comms))
            norms[_key(comms)] = before._replace(ids=(*before.ids, id))
        if rule.centralizes and len(meta.shape) > 1 and meta.numel:
            dims = len(meta.shape) - 1 if rule.needs is Needs.MATRICES else 1
            peers = _tensor_cuts(buffer, id, design, dims)
            if comms := (*_cuts(buffer, id, design, dims), *peers):
                rows = SpannedRows(
                    num=prod(meta.local_shape[:dims]),
                    dims=dims,
                    local_numel=prod(meta.local_shape[dims:]),
                    # The shape of `meta` is that of one tensor-parallel part.
                    whole_numel=prod(meta.shape[dims:]) * prod(comm.size for comm in peers),
                )
                earlier = spans.get(_key(comms), CutRows({}, comms))
                spans[_key(comms)] = earlier._replace(rows={**earlier.rows, id: rows})
    return tuple(norms.values()), tuple(spans.values())


def _key(comms: tuple[Comm, ...]) -> tuple[int, ...]:
    return tuple(id(group_of(comm) or comm) for comm in comms)


def _cuts(buffer: BufferPlan, id: ParamId, design: Design, from_dim: int) -> Sequence[Comm]:
    """The groups of its mesh or buffer over which a parameter is cut along dim `from_dim` or later."""
    if buffer.kind is AS_IT_CAME:
        dims = [placed.shard_dim if placed.size > 1 else None for placed in design.model.metas[id].placements]
        return mesh_comms(
            design.model.params[id], [axis for axis, dim in enumerate(dims) if dim is not None and dim >= from_dim]
        )
    return (design.axes_of(buffer).dp,) if buffer.kind.cuts and buffer.layout.num_shards > 1 else ()


def _tensor_cuts(buffer: BufferPlan, id: ParamId, design: Design, from_dim: int) -> tuple[Comm, ...]:
    """The tensor-parallel group if it is outside the parameter's mesh and cuts dim `from_dim` or later."""
    meta = design.model.metas[id]
    peers = design.axes_of(buffer).tp
    cuts = meta.tensor_parallel and (meta.partition_dim is None or meta.partition_dim >= from_dim)
    outside = buffer.kind is not AS_IT_CAME or is_outside(peers, mesh_of(design.model.params[id]))
    return (peers,) if cuts and peers.size > 1 and outside else ()


# --- parts of the model that ranks hold -------------------------------------------------------------------------------


def holds_parts(design: Design) -> bool:
    """Return whether this rank holds plain state tensors that other ranks of the same model do not hold."""
    if any(buffer.layout.num_shards > 1 for buffer in design.plan.buffers):
        return True
    for unit in design.plan.units:
        axes = design.request.roles.expert if unit.is_expert else design.request.roles.dense
        if any(_part(design.model.metas[id], axes) for id in unit.ids):
            return True
        # State of whole matrices may be distributed over the ranks that store their parts.
        layouts = [compute.layout for compute in unit.compute if any(spec.whole for spec in unit.rule.state_specs)]
        if any(layout.computes is Computes.OWNER or layout.kept for layout in layouts):
            return True
    return False
