"""`build_parts` allocates what steps work on; `build_stepper` makes the step of it, with its guards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist

from opt_config import ConfigError
from opt_distributed.buffers import Metas, copied_ids
from opt_distributed.comm import Roles, from_all_replicas, group_of
from opt_distributed.comm import device as devices
from opt_distributed.layout import Computes
from opt_distributed.pieces import PeerSums
from opt_distributed.step import (
    EqualGroups,
    Family,
    Guards,
    Limits,
    Scaler,
    Spikes,
    Stepper,
    Unit,
    Watch,
    WrittenReplicas,
    profiler_spans,
    scaler_of,
    timer_spans,
)
from opt_kernels.hooks import bare, hooks_of
from opt_kernels.params import MainFormat
from opt_kernels.quantized import quantized
from opt_paramgroups import ParamId
from opt_stack.building.sources import build_sources
from opt_stack.building.units import build_units, part_name
from opt_stack.planning.checks import SEPARATE_NORMS
from opt_stack.planning.design import Design
from opt_stack.rules.entries import ParamGroups
from opt_stack.state.live import PieceRef, SharedCopies
from opt_stack.state.weights import Evaluation, LoadedWeights, OptimizerStateGuard

NORM_SLOTS = ("", *SEPARATE_NORMS)  # the model's own gradient norm, and Megatron-Core's separate ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What steps work on: memory is allocated."""

    device: devices.Device
    units: tuple[Unit, ...]
    families: tuple[Family, ...]
    peer_sums: PeerSums
    slots: tuple[str, ...]  # names of the gradient norms, equal on all ranks
    scaler: Scaler
    spikes: Spikes | None  # None if `skip_sigma` is infinite
    held: Mapping[ParamId, PieceRef]  # the pieces of this rank
    evaluation: Evaluation
    loaded: LoadedWeights


@torch.inference_mode(False)  # steps outside of inference mode must be able to write what is made here, too
def build_parts(design: Design, device: devices.Device) -> Parts:
    """Allocate what the plan of `design` says, on `device`. Raises ConfigError."""
    plan = design.plan
    roles = design.roles
    config = design.config
    if config.optimizer_cuda_graph and (problem := next(_graph_problems(design, device), None)):
        raise ConfigError(f"optimizer_cuda_graph=True with {problem}")
    if config.barrier_with_L1_time and config.timers is None:
        raise ConfigError("barrier_with_L1_time=True has no effect without timers; set timers, or leave it at False")
    sources = build_sources(design, device.torch_device)
    slots = (*NORM_SLOTS, *dict.fromkeys(filter(None, plan.norms)))  # equal on all ranks
    units = tuple(build_units(design, device, sources, slots))
    for param in design.params.values():
        if (found := quantized(param)) is not None:
            found.forget_initial()
    families = []
    for is_expert, axes in ((False, roles.dense), (True, roles.expert)):
        of_family = [sources.of_buffers[buffer.name] for buffer in plan.buffers if buffer.is_expert == is_expert]
        families.append(Family(sources=of_family, axes=axes))
    held = {piece.id: PieceRef(unit, piece) for unit in units for piece in unit.pieces}
    spikes = None
    if math.isfinite(config.skip_sigma):
        spikes = Spikes(config.skip_sigma, config.skip_window, device.torch_device)
    evaluation = Evaluation(units)
    loaded = LoadedWeights(
        [piece for _, piece in held.values()],
        design.groups.groups,
        design.request.chunks,
        averaged=[piece for unit, piece in held.values() if evaluation.keeps_weights_of(unit)],
        copied=copied_ids(design.params, design.metas, roles),
    )
    return Parts(
        device=device,
        units=units,
        families=tuple(families),
        peer_sums=sources.peer_sums,
        slots=slots,
        scaler=scaler_of(config.loss_scaling),
        spikes=spikes,
        held=held,
        evaluation=evaluation,
        loaded=loaded,
    )


def build_stepper(design: Design, parts: Parts, groups: ParamGroups, copies: SharedCopies, watch: Watch) -> Stepper:
    """Build the stepper of `parts`, with its guards in the order in which their errors are raised. Collective.

    `groups` are those that the optimizer will have.

    Raises:
        ConfigError: on every rank, if steps are to be skipped by a norm that no gradient is part of.
        GraphError: the device has no graphs.
    """
    config = design.config
    roles = design.roles
    totals = roles.totals
    instances = roles.dense.inter
    here = {piece.norm_slot for _, piece in parts.held.values()}
    of_ranks = roles.everyone.gather_objects((here, parts.evaluation.has_other_weights))
    parts.evaluation.has_other_weights = any(has_other_weights for _, has_other_weights in of_ranks)
    used = frozenset[int]().union(*(slots for slots, _ in of_ranks))
    if used and 0 not in used and math.isfinite(config.grad_norm_skip_threshold):
        raise ConfigError(
            f"grad_norm_skip_threshold={config.grad_norm_skip_threshold} has no effect: no parameter is part of the "
            "model's norm, as all are in groups with clip_grad=False or have a norm of their own; leave it out"
        )
    sources = [source for family in parts.families for source in family.sources]
    rules = {piece.group: unit.rule for unit, piece in parts.held.values()}
    equal = EqualGroups(
        groups,
        rules,
        own={name for rule in rules.values() for name in getattr(rule, "hyper_names", ())},
        everyone=totals if totals.size > 1 else instances,  # instances of one rank each
    )
    written = [WrittenReplicas(copies, device=parts.device)] if roles.everyone.size > 1 else []
    guards = Guards(
        groups,
        sources,
        rules,
        equal,
        everyone=totals,
        instances=instances,
        first=[OptimizerStateGuard(parts.loaded, design.model.wrapped.values(), roles)],
        last=written,
    )
    timers = config.timers
    return Stepper(
        units=parts.units,
        families=parts.families,
        guards=guards,
        everyone=totals,
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
        empty_slots=frozenset(range(len(parts.slots))) - used,
        at_start=[guard.at_start for guard in written],
        watch=watch,
        spikes=parts.spikes,
    )


def _graph_problems(design: Design, device: devices.Device) -> Iterator[str]:
    """Yield why the device, a rule or a group of ranks does not support the capture of a step."""
    plan = design.plan
    roles = design.roles
    on_gpu = device.torch_device.type == "cuda"
    if not device.has_graphs:
        yield f"device {str(device.torch_device)!r}: only cuda devices have graphs; set it to False"
    for unit in plan.units:
        rule = bare(unit.rule)
        if not getattr(rule, "capturable", False):
            yield (
                f"optimizer={rule.name!r}: its update reads values on the host, or the rule does not declare "
                "capturable=True; use another rule, or set it to False"
            )
        if rule is not unit.rule:
            yield (
                f"hooks {hooks_of(unit.rule)!r} of {rule.name!r}, which allocate memory in every step; use hooks that "
                "are part of a formula (CautiousDecay, CoupledDecay or LrDecoupledDecay of an elementwise rule), or "
                "set it to False"
            )
        if MainFormat.FP16_SCALED in unit.numbers.values():
            yield (
                f"main_params_dtype={plan.config.main_params_dtype}, whose values are decoded to new memory at every "
                "step; use remainders or fp32 main values, or set it to False"
            )
        if (backend := getattr(rule, "backend", None)) not in (None, "triton"):
            yield f"backend={backend!r} of {rule.name!r}: only 'triton' can be captured"
    if on_gpu and find_spec("triton") is None:
        yield "updates that read values on the host, without Triton kernels; install triton"
    for comm in (roles.totals, roles.dense.dp, roles.dense.tp, roles.expert.dp, roles.expert.tp):
        group = group_of(comm)
        backend = "nccl" if group is None or comm.size == 1 else dist.get_backend(group)
        if on_gpu and "nccl" not in backend:
            yield f"process groups over {backend}: only NCCL's can be captured"


# --- parts of the model that ranks hold -------------------------------------------------------------------------------


def holds_parts(design: Design) -> bool:
    """Return whether this rank holds plain state tensors that other ranks of the same model do not hold."""
    if any(buffer.layout.num_shards > 1 for buffer in design.plan.buffers):
        return True
    for unit in design.plan.units:
        axes = design.axes_of(unit)
        if any(part_name(design.metas[id], axes) for id in unit.ids):
            return True
        # State of whole matrices may be distributed over the ranks that store their parts.
        layouts = [compute.layout for compute in unit.compute if any(spec.whole for spec in unit.rule.state_specs)]
        if any(layout.computes is Computes.OWNER or layout.kept for layout in layouts):
            return True
    return False


def model_part(metas: Metas, roles: Roles) -> tuple[str, bool]:
    """Compare the parts of the model that ranks hold: tensor-parallel parts, pipeline stages, experts. Collective.

    Return which part this rank shares with its data-parallel replicas, empty if all ranks hold the same parameters; and
    whether a rank with another part has a parameter of the same name.
    """
    texts = []
    has_namesakes = False
    for axes, kind in ((roles.dense, "dense"), (roles.expert, "experts")):
        is_expert = kind == "experts"
        own = [meta for meta in metas.values() if meta.is_expert == is_expert and not meta.is_dtensor]
        first = min(from_all_replicas(axes, roles.everyone.rank))
        among_peers = min(axes.tp.gather_objects(first))
        if not any(meta.tensor_parallel for meta in own):
            first = among_peers
        is_first = first == roles.everyone.rank
        reported = [str(meta.id) for meta in own if is_first]
        part = first if own else -1
        per_rank = roles.everyone.gather_objects((part, reported))
        parts = sorted({rank for rank, _ in per_rank} - {-1})
        names = [name for _, of_rank in per_rank for name in of_rank]
        has_namesakes |= len(set(names)) < len(names)
        if own and len(parts) > 1:
            texts.append(f"{kind} part {parts.index(first)} of {len(parts)}")
    return ", ".join(texts), has_namesakes
