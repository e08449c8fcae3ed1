"""Build the stepper of a plan: gradient sources, main values and states, units. Decides nothing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from opt_config import ConfigError, OnHost, Placement
from opt_distributed.buffers import FP8, BufferPlan, ParamAndGradBuffer, ReducedGrads
from opt_distributed.comm import Alone, Axes, Comm, HostComm, is_outside, mesh_of, replicas_outside
from opt_distributed.comm import device as devices
from opt_distributed.layout import AS_IT_CAME, Computes
from opt_distributed.pieces import (
    BufferedGrads,
    CodedMain,
    HostMain,
    HostSide,
    LaidOutGrads,
    Main,
    Numbers,
    OwnedPiece,
    OwnGrads,
    QuantizedMain,
    QuantizedSource,
    ReducedMainGrads,
    Source,
    StepNumbers,
    init_state,
    is_first_replica,
    local,
    make_main,
)
from opt_distributed.step import (
    Family,
    Limits,
    PeerSums,
    Stepper,
    Unit,
    check_marks,
    marked_ids,
    profiler_spans,
    scaler_of,
    timer_spans,
)
from opt_kernels.backends import is_dense
from opt_kernels.hooks import HookedUpdate
from opt_kernels.quantized import quantized
from opt_kernels.rules import Needs, Rule
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.building.matrices import PlacedMatrix, place_matrices, stages_of
from opt_stack.planning.checks import SEPARATE_NORMS, check_graphs
from opt_stack.planning.draft import Draft
from opt_stack.planning.hooks import check_start, cut_params, cut_rows
from opt_stack.planning.plan import Plan, UnitPlan
from opt_stack.planning.wrapped import averaged_by_torch, reduced_by_megatron

PART_NUMEL = 1 << 24
"""Minimum number of elements of a part of a unit. One part is copied while the host updates another: at 1 << 24
elements, an update takes about 10 ms and a copy 2 ms."""


class HostBuilder:
    """Allocates main values and state on the device or the host. On a CPU these are the same place."""

    def __init__(self, placement: Placement, device: torch.device):
        self.placement = placement
        self.device = devices.device_of(device)
        self._numbers = StepNumbers(self.device)

    def comm(self, comm: Comm) -> Comm:
        """Return the same group for tensors on the host."""
        return HostComm(comm, self.device) if self.device.is_asynchronous and comm.size > 1 else comm

    def kept(
        self, numbers: Numbers, target: Tensor, rule: Rule, id: ParamId, placed: PlacedMatrix, *, on_host: bool
    ) -> tuple[Main | CodedMain | HostMain, dict[str, Tensor]]:
        """Return the main values of `target`, and the rule's state before the first step."""
        if not on_host or not self.device.is_asynchronous:
            near = _make(numbers, target)
            return near, init_state(rule, near.value(), id=id, matrix=placed.spec, stage=placed.stage)
        main = HostMain.of(numbers, target, self.device, _make)
        with self.device.on_host():
            return main, init_state(rule, main.moved.value(), id=id, matrix=placed.spec, stage=placed.stage)

    def parts(self, unit: Unit) -> Iterator[Unit]:
        """Split `unit` into parts with separate copies: while one part is updated, the next is copied.

        Yields one part if the unit's update is collective, if copies do not overlap, or if this rank has no pieces.
        """
        assert isinstance(self.placement, OnHost)
        placement = self.placement
        if not self.device.is_asynchronous:
            yield unit
            return
        meets = isinstance(unit.rule, HookedUpdate) or unit.rule.needs is Needs.MATRICES
        cuts = list(_cuts(unit, PART_NUMEL)) if placement.overlap and not meets else [unit.pieces]
        for number, pieces in enumerate(cuts):
            side = HostSide(
                pieces,
                self.device,
                self._numbers,
                overlap=placement.overlap,
                pin_grads=placement.pin_grads,
                pin_params=placement.pin_params,
            )
            is_last = number == len(cuts) - 1
            yield replace(unit, pieces=pieces, host=side, completes=unit.completes if is_last else ())


def _make(numbers: Numbers, target: Tensor) -> Main | CodedMain:
    return CodedMain.of(target) if numbers is Numbers.FP16_SCALED else make_main(numbers, target)


def _cuts(unit: Unit, part_numel: int) -> Iterator[list[OwnedPiece]]:
    pieces: list[OwnedPiece] = []
    for piece in unit.pieces:
        pieces.append(piece)
        if sum(one.main.shape.numel() for one in pieces) >= part_numel:
            yield pieces
            pieces = []
    if pieces or not unit.pieces:
        yield pieces


NORM_SLOTS = ("", *SEPARATE_NORMS)  # the model's own gradient norm, and the separate ones


def build_stepper(draft: Draft, device: torch.device) -> Stepper:
    """Build the stepper of the plan of `draft`, with tensors on `device`."""
    plan, roles, config = draft.plan, draft.roles, draft.config
    check_graphs(draft, device)
    reduced = reduced_by_megatron(draft.chunks, draft.params)
    averaged = averaged_by_torch(draft.chunks, draft.params, roles.dense)
    wrapped = {buffer.plan.name: buffer for buffer in draft.wrapped_buffers}
    plain = {b.name: _source(b, draft, device, reduced, averaged) for b in plan.buffers if b.name not in wrapped}
    own = {b.name: wrapped.get(b.name) or plain[b.name] for b in plan.buffers}
    fp8 = {b.name: _quantizing(own[b.name], b, draft) for b in plan.buffers if b.dtype is FP8}
    units = list(_units(draft, device, own, fp8))
    for param in draft.params.values():
        if (found := quantized(param)) is not None:
            found.forget_initial()
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
        limits=_limits(plan),
        spans=profiler_spans
        if config.timers is None
        else timer_spans(config.timers, barrier=config.barrier_with_L1_time),
        graphs=config.optimizer_cuda_graph,
        peer_sums=PeerSums(plain.values(), draft.metas, roles, qk_layernorm=draft.qk_layernorm),
    )


class _Side(NamedTuple):
    """The part of a unit of the plan that is updated on the device, or the part on the host."""

    unit: UnitPlan
    on_host: bool


def _sides(plan: Plan) -> list[_Side]:
    """Return the sides in the order of the step. The device's come first, so that it works while the host, which has to
    wait for the verdict, updates its own."""
    on_host = (False, True) if plan.hosted else (False,)
    return [_Side(unit, side) for side in on_host for unit in plan.units]


def _completed(plan: Plan) -> list[list[str]]:
    """Return, for each side of a unit, the buffers that no later side writes to; the same on all ranks."""
    sides = _sides(plan)
    last = {
        buffer.name: max(
            number
            for number, side in enumerate(sides)
            if any(param.id in side.unit.ids for param in buffer.params)
            and (not side.on_host or any(plan.hosted[buffer.name]))
        )
        for buffer in plan.buffers
    }
    return [[name for name, at in last.items() if at == number] for number in range(len(sides))]


def _units(
    draft: Draft, device: torch.device, sources: Mapping[str, Source], fp8: Mapping[str, QuantizedSource]
) -> Iterator[Unit]:
    plan, roles = draft.plan, draft.roles
    # Shared by both sides: hooks sum over all parts of a parameter that is cut.
    cut = {unit.name: cut_params(unit, draft) for unit in plan.units}
    rows = {unit.name: cut_rows(unit, draft) for unit in plan.units}
    host = HostBuilder(plan.config.placement, device)
    for side, completed in zip(_sides(plan), _completed(plan), strict=True):
        planned, on_host = side
        axes = roles.expert if planned.is_expert else roles.dense
        over: Callable[[Comm], Comm] = host.comm if on_host else lambda comm: comm
        placed = place_matrices(planned, draft.params, draft.metas, axes.tp, over=over)
        unit = Unit(
            name=f"{planned.name}/host" if on_host else planned.name,
            rule=planned.rule_of(on_host=on_host),
            pieces=list(_pieces(side, draft, sources, fp8, placed, host)),
            completes=[fp8.get(name, sources[name]) for name in completed],
            stages=stages_of(placed.values()),
        )
        unit.cut, unit.cut_rows = cut[planned.name], rows[planned.name]
        yield from host.parts(unit) if on_host else (unit,)


def _source(
    buffer: BufferPlan,
    draft: Draft,
    device: torch.device,
    reduced: frozenset[ParamId],  # parameters whose main_grad Megatron-Core's wrapper reduces
    averaged: frozenset[ParamId],  # parameters whose gradients torch's DistributedDataParallel averages
) -> Source:
    """Return the gradient source of a buffer: `param.grad` if no other rank contributes, else a reduced buffer."""
    params = {shape.id: draft.params[shape.id] for shape in buffer.params}
    axes, replicas = draft.axes_of(buffer), draft.roles.dense.num_replicas
    is_reduced = params.keys() <= reduced
    if not is_reduced:  # Megatron-Core's schedule completes the gradients of its wrapper
        check_marks(params, draft.metas, draft.roles, qk_layernorm=draft.qk_layernorm)
    if buffer.kind is AS_IT_CAME:
        outside = {id: _replicas_outside(id, params[id], axes) for id in params}
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
    if params.keys() <= averaged and not is_marked:
        return OwnGrads(params, num_replicas=1, memory=memory if buffer.kind.is_sharded else None, comm=axes.dp)
    sums = ReducedGrads(buffer.layout, params, axes, dtype=buffer.grad_dtype, device=device)
    return BufferedGrads(sums, memory, axes, num_replicas=replicas)


def _quantizing(source: Source, buffer: BufferPlan, draft: Draft) -> QuantizedSource:
    """Return the publisher of a buffer of fp8 parameters, which quantises them after the update."""
    found = {shape.id: q for shape in buffer.params if (q := quantized(draft.params[shape.id])) is not None}
    return QuantizedSource(source, found, draft.axes_of(buffer).dp if buffer.layout.num_shards > 1 else Alone())


def _replicas_outside(id: ParamId, param: nn.Parameter, axes: Axes) -> tuple[Comm, ...]:
    return replicas_outside(param, (axes.dp, axes.inter), name=str(id))


def _pieces(
    side: _Side,
    draft: Draft,
    sources: Mapping[str, Source],
    fp8: Mapping[str, QuantizedSource],
    placed: Mapping[ParamId, PlacedMatrix],
    host: HostBuilder,
) -> Iterator[OwnedPiece]:
    plan, roles = draft.plan, draft.roles
    slots, (unit, on_host) = norm_slots(plan), side
    main: Main | CodedMain | HostMain | QuantizedMain
    rule = unit.rule_of(on_host=on_host)
    for buffer in plan.buffers:
        axes = draft.axes_of(buffer)
        rank = axes.dp.rank if buffer.layout.num_shards > 1 else 0
        for number, (id, of_param) in enumerate(buffer.runs(rank)):
            if id not in unit.ids or plan.is_on_host(buffer, rank, id) is not on_host:
                continue
            param, meta, group = draft.params[id], draft.metas[id], plan.groups[draft.group_of[id]]
            stored = local(param) if meta.is_dtensor else param
            whole = of_param == slice(0, stored.numel())
            if buffer.name in fp8:
                main, at = fp8[buffer.name].main(id, of_param), placed[id]
                state = init_state(rule, main.value(), id=id, matrix=at.spec, stage=at.stage)
            else:
                _check_dense(id, stored)
                target, numbers = stored if whole else stored.detach().view(-1)[of_param], unit.numbers[buffer.dtype]
                main, state = host.kept(numbers, target, rule, id, placed[id], on_host=on_host)
            if whole:
                check_start(unit.rule, id, stored)
            inspected = _inspected(buffer, axes, number)
            yield OwnedPiece(
                id=id,
                param=param,
                of_param=of_param,
                group=draft.group_of[id],
                source=sources[buffer.name],
                main=main,
                state=state,
                norm_slot=slots.index((meta.grad_norm_group or "") if group.clips else group.optimizer),
                counted=inspected and _counted(buffer, meta, axes, param, spans_instances=roles.instance is None),
                inspected=inspected,
                replica=axes.inter.rank if buffer.layout.num_shards > 1 else None,
                part=_part(meta, axes),
                matrix=placed[id].spec,
                stage=placed[id].stage,
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


def _part(meta: ParamMeta, axes: Axes) -> str:
    """Return the suffix that names this tensor-parallel part of a plain parameter; empty if it is whole."""
    is_part = meta.tensor_parallel and not meta.is_dtensor and axes.tp.size > 1
    return f"@{axes.tp.rank}of{axes.tp.size}" if is_part else ""


def holds_parts(draft: Draft) -> bool:
    """Return whether this rank holds plain state tensors that other ranks of the same model do not hold."""
    plan, metas, roles = draft.plan, draft.metas, draft.roles
    families = ((id, roles.expert if unit.is_expert else roles.dense) for unit in plan.units for id in unit.ids)
    sharded = any(buffer.layout.num_shards > 1 for buffer in plan.buffers)
    return sharded or any(_part(metas[id], axes) for id, axes in families) or any(map(_deals_state, plan.units))


def _deals_state(unit: UnitPlan) -> bool:
    """Return whether state of whole matrices is distributed over the ranks that store their parts."""
    if not any(spec.whole for spec in unit.rule.state_specs):
        return False
    layouts = [compute.layout for compute in unit.compute]
    return any(layout.computes is Computes.OWNER or layout.kept for layout in layouts)


def norm_slots(plan: Plan) -> tuple[str, ...]:
    """Return the names of the step's gradient norms, the same on every rank: the model's own, Megatron-Core's separate
    norm groups, and one for each rule with groups that are not clipped, under its name."""
    return (*NORM_SLOTS, *dict.fromkeys(group.optimizer for group in plan.groups if not group.clips))


def _inspected(buffer: BufferPlan, axes: Axes, number: int) -> bool:
    """Return whether this rank reads the piece's gradient for the step's statistics.

    Data-parallel replicas hold the same reduced gradient and share that work. All other copies, over tensor-parallel
    ranks or over axes of a DTensor's mesh, were computed separately and are inspected by each holder.
    """
    shared_out = buffer.kind is not AS_IT_CAME and buffer.layout.num_shards == 1
    return not shared_out or number % axes.dp.size == axes.dp.rank


def _counted(buffer: BufferPlan, meta: ParamMeta, axes: Axes, param: nn.Parameter, *, spans_instances: bool) -> bool:
    """Return whether norms and zero counts include this rank's copy of a gradient that it inspects."""
    if meta.shared or (axes.inter.rank > 0 and spans_instances):
        return False
    if buffer.kind is AS_IT_CAME:
        tensor_peers = [axes.tp] if is_outside(axes.tp, mesh_of(param)) else []
        outside = [*_replicas_outside(meta.id, param, axes), *tensor_peers]
        return is_first_replica(param) and all(comm.rank == 0 for comm in outside)
    return axes.tp.rank == 0 or meta.tensor_parallel


def _limits(plan: Plan) -> Limits:
    slots, config = norm_slots(plan), plan.config
    return Limits(
        slots=slots,
        clips=tuple(slot in NORM_SLOTS for slot in slots),
        max_norm=config.clip_grad,
        skip_above=config.grad_norm_skip_threshold,
        count_zeros=config.log_num_zeros_in_grad,
    )
