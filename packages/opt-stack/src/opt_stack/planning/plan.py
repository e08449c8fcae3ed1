"""The plan of an optimizer: which rank updates what; what it costs in bytes, and its text. Values only."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import prod

import torch

from opt_config import ConstantScale, DynamicScale, OptimizerConfig
from opt_distributed.buffers import PRE_SHARDED, BufferPlan, short
from opt_distributed.layout import ComputeLayout, Computes, SplitMatrix, owner_load
from opt_distributed.pieces import NO_AVERAGES, WeightAverages
from opt_kernels.hooks import hooks_of
from opt_kernels.matrices import TpMode
from opt_kernels.params import FP16, MainFormat
from opt_kernels.quantized import FP8, RECIPES
from opt_kernels.rules import Needs, Rule, init_state
from opt_kernels.works import NOT_SPLIT, MatrixSpec, StateKind, StateSpec
from opt_paramgroups import ParamId
from opt_stack.planning.matrices import ComputePlan, Splits
from opt_stack.wording import listed

Hosted = tuple[frozenset[ParamId], ...]
"""For each shard of a buffer, the parameters whose pieces live on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """One rule and the parameters it updates."""

    name: str
    rule: Rule
    is_expert: bool
    ids: frozenset[ParamId]
    numbers: Mapping[torch.dtype, MainFormat]  # how main values are kept, by parameter dtype
    compute: tuple[ComputePlan, ...] = ()  # for matrices that are cut over ranks
    splits: Splits = field(default_factory=dict)
    whole_qkv: int = 0  # number of fused q, k and v parameters that the rule updates as one matrix each
    finds_no_qkv: bool = False  # whether it would split fused q, k and v, but the model has none that are known
    host_rule: Rule | None = None  # updates the pieces that live on the host; None: `rule` does
    averages: WeightAverages = NO_AVERAGES  # of its weights

    @property
    def needs_matrices(self) -> bool:
        """Whether its rule updates whole matrices."""
        return self.rule.needs is Needs.MATRICES

    def side_rule(self, *, on_host: bool) -> Rule:
        """Return the rule of the device or of the host."""
        return self.host_rule if on_host and self.host_rule is not None else self.rule

    def placed(self, buffers: Iterable[BufferPlan]) -> Iterator[tuple[BufferPlan, ParamId]]:
        """Yield the unit's parameters with their buffers, in the order of these."""
        return ((buffer, param.id) for buffer in buffers for param in buffer.params if param.id in self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which rank updates which parameters, by which rule, in which dtypes. `print(plan)` shows it."""

    config: OptimizerConfig
    norms: tuple[str, ...]  # by group, the rule whose separate norm it has, if it is not clipped; "": the model's norm
    buffers: tuple[BufferPlan, ...]
    units: tuple[UnitPlan, ...]
    hosted: Mapping[str, Hosted] = field(default_factory=dict)  # by buffer name; empty: everything is on the device

    def is_on_host(self, buffer: BufferPlan, rank: int, id: ParamId) -> bool:
        """Return whether data-parallel rank `rank` keeps its piece of a parameter on the host."""
        by_shard = self.hosted.get(buffer.name)
        return by_shard is not None and id in by_shard[rank % len(by_shard)]

    def state_bytes(self, rank: int = 0, *, on_host: bool | None = None) -> int:
        """Return the bytes of main values and state on data-parallel rank `rank`: on the host (True), on the device
        (False), or on both (None)."""
        sides = (False, True) if on_host is None else (on_host,)
        return sum(unit_bytes(self, unit, rank=rank, on_host=side) for side in sides for unit in self.units)

    def fingerprint(self, *, experts: bool) -> str:
        """Return a hash that is equal on ranks with the same layouts, rules and parameters: of experts, or dense."""
        texts = []
        for buffer in self.buffers:
            if buffer.is_expert is experts and buffer.kind is not PRE_SHARDED:
                hosted = [sorted(ids) for ids in self.hosted.get(buffer.name, ())]
                texts.append(f"{buffer.name}:{buffer.layout.fingerprint()}:{hosted}")
        for unit in self.units:
            if unit.is_expert is experts:
                splits = [(id, unit.splits[id].split_name) for id in sorted(unit.splits)]
                texts.append(f"{unit.name}:{rule_text(unit.rule)}:{sorted(unit.ids)}:{splits}")
        return sha256("|".join(texts).encode()).hexdigest()

    def layout_id(self, rank: int) -> str:
        """Return an id of this rank's pieces. A rank-local `state_dict` loads only where the id is the same."""
        layouts = [
            buffer.layout.fingerprint()
            for buffer in self.buffers
            if buffer.layout.num_shards > 1 or buffer.kind is PRE_SHARDED
        ]
        if not layouts:
            return "replicated"
        digest = sha256("|".join(sorted(layouts)).encode()).hexdigest()
        return f"rank {rank} of {digest[:16]}"

    def __str__(self) -> str:
        sections = (unit_lines(self), buffer_lines(self), total_lines(self))
        return "\n\n".join(map("\n".join, sections))


def rule_text(rule: Rule) -> str:
    """Return the rule with its hooks as text that processes may compare: without addresses of memory."""
    return without_addresses(f"(hooks={list(hooks_of(rule))}, rule={rule!r})")


def without_addresses(text: str) -> str:
    """Return the text of an object without addresses of memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def state_text(specs: Iterable[StateSpec]) -> str:
    """Return the names and dtypes of states."""
    shown = [f"{spec.name} {short(spec.dtype)}" for spec in specs]
    return ", ".join(shown) or "none"


# --- bytes ------------------------------------------------------------------------------------------------------------


MAIN_FORMAT_TEXTS: Mapping[MainFormat, str] = {
    MainFormat.PARAM: "updated in place",
    MainFormat.FP32_COPY: "fp32 mains",
    MainFormat.REMAINDER: "fp32 as bf16 + 16-bit remainder",
    MainFormat.SHORT_REMAINDER: "24 bits as bf16 + 8-bit remainder",
    MainFormat.FP16_SCALED: "scaled fp16 mains",
}
_MAIN_BYTES: Mapping[MainFormat, int] = {  # per element, in addition to the parameter
    MainFormat.PARAM: 0,
    MainFormat.FP32_COPY: 4,
    MainFormat.REMAINDER: 2,
    MainFormat.SHORT_REMAINDER: 1,
    MainFormat.FP16_SCALED: 2,
}


def unit_bytes(plan: Plan, unit: UnitPlan, *, rank: int, on_host: bool) -> int:
    """Return the bytes that `unit` keeps on data-parallel rank `rank`, on the host or on the device. State of matrices
    that one rank computes for its peers counts as equal shares."""
    total = 0
    rule = unit.side_rule(on_host=on_host)
    owned = {}  # of matrices that one rank computes for its peers: the whole shape, and how many ranks share the state
    for compute in unit.compute:
        layout = compute.layout
        for matrix in layout.matrices if layout.computes is Computes.OWNER else ():
            owned[matrix.id] = layout.whole(matrix, (0,) * len(layout.sizes)).shape, layout.num_ranks
    for buffer in plan.buffers:
        shapes = {param.id: param.shape for param in buffer.params if param.id in unit.ids}
        for _, run in buffer.owned(rank) if shapes else ():
            if run.id not in shapes or plan.is_on_host(buffer, rank, run.id) is not on_host:
                continue
            shape = shapes[run.id]
            total += main_bytes(unit.numbers[buffer.dtype], run.numel)
            split = unit.splits.get(run.id, NOT_SPLIT)
            whole_shape, num_owners = owned.get(run.id, (shape, 1))
            for spec, num_bytes in kept_bytes(rule, whole_shape, split, unit.averages.specs).items():
                if spec.whole:
                    total += num_bytes // num_owners
                else:
                    total += spec_bytes(spec, shape, run.numel)
    return total


def staging_bytes(plan: Plan, rank: int) -> int:
    """Return an upper bound in bytes of the host buffers that stage gradients and parameters of pieces on the host:
    less if 16-bit gradients are not accumulated, and none on a CPU. The device updates with gradients where they are.
    """
    stages_grads = plan.config.optimizer_offload_compute == "host"
    total = 0
    for buffer in plan.buffers:
        itemsize = buffer.dtype.itemsize
        if stages_grads:
            itemsize += buffer.grad_dtype.itemsize
        numel = sum(run.numel for _, run in buffer.owned(rank) if plan.is_on_host(buffer, rank, run.id))
        total += numel * itemsize
    return total


def param_bytes(plan: Plan, buffer: BufferPlan) -> int:
    """Return the bytes of a buffer's parameters, without padding; for fp8, of codes and scales."""
    if buffer.dtype is not FP8:
        return sum(param.numel for param in buffer.params) * buffer.dtype.itemsize
    assert plan.config.fp8_recipe is not None
    recipe = RECIPES[plan.config.fp8_recipe]
    return sum(recipe.num_bytes(param.shape) for param in buffer.params)


def main_bytes(main_format: MainFormat, numel: int) -> int:
    """Return the bytes of the main values of `numel` elements of one parameter, without the parameter itself."""
    num_bytes = numel * _MAIN_BYTES[main_format]
    if main_format is MainFormat.FP16_SCALED:
        num_bytes += 4 * -(-numel // FP16.block)
    return num_bytes


def kept_bytes(
    rule: Rule, shape: tuple[int, ...], matrix: MatrixSpec = NOT_SPLIT, averages: Sequence[StateSpec] = ()
) -> dict[StateSpec, int]:
    """Return the specs of the states that `rule`, and of the averages that its unit, keeps for a parameter of `shape`,
    with the bytes of each."""
    num_bytes = {spec: spec_bytes(spec, shape, prod(shape)) for spec in (*rule.state_specs, *averages)}
    if any(spec.optional or spec.by_part for spec in rule.state_specs):
        kept = init_state(rule, torch.empty(shape, dtype=torch.float32, device="meta"), matrix)
        for spec in rule.state_specs:
            if spec.name not in kept:
                del num_bytes[spec]
            elif spec.by_part:
                num_bytes[spec] = kept[spec.name].nbytes
    return num_bytes


def spec_bytes(spec: StateSpec, shape: tuple[int, ...], numel: int) -> int:
    """Return the bytes of one state tensor for `numel` elements of a parameter of `shape`."""
    if spec.kind is StateKind.LIKE_PARAM:
        count = numel
    elif spec.kind is StateKind.BLOCK_SCALES:
        count = -(-numel // spec.block)
    else:
        count = prod(spec.shape_for(shape) or (1,))
    return count * spec.dtype.itemsize


# --- the printed plan -------------------------------------------------------------------------------------------------


COMPUTE_TEXTS: Mapping[Computes, str] = {
    Computes.PART: "each rank computes its own block",
    Computes.JOINT: "ranks compute their parts, products are summed",
    Computes.OWNER: "one rank gathers, computes and returns each, balanced by cost",
}
BLOCKWISE_NOTE = (
    "muon_tp_mode='blockwise': updates depend on the number of tensor-parallel ranks; set muon_tp_mode='duplicated' to "
    "update whole matrices"
)


def compute_lines(plans: Iterable[ComputePlan], *, num_teams: int = 1) -> Iterator[str]:
    """Yield the matrices that are cut, by axes and computing ranks, with muon_tp_mode if it has an effect.

    `num_teams` are the shards of a layer-wise layout: the ranks of each compute the matrices that are in it.
    """
    plans_of: dict[str, list[ComputePlan]] = {}
    has_blocks = False
    for plan in plans:
        ranks = " x ".join(str(axis.size) for axis in plan.axes)
        names = ", ".join(axis.name for axis in plan.axes)
        line = f"cut over {ranks} ranks ({names}): {COMPUTE_TEXTS[plan.layout.computes]}"
        if plan.tp_mode is TpMode.BLOCKWISE:
            has_blocks = True
            line += ", each tensor-parallel block as a separate matrix"
        if plan.tp_mode is not None:
            line += f" (muon_tp_mode={plan.tp_mode.value!r})"
        plans_of.setdefault(line, []).append(plan)
    for line, same in plans_of.items():
        layouts = [plan.layout for plan in same]
        count = sum(len(layout.matrices) for layout in layouts)
        noun = "matrix" if count == 1 else "matrices"
        yield f"{count} {noun} {line}"
        if layouts[0].computes is Computes.OWNER:
            loads = [owner_load(layout) for layout in layouts]
            num_runs = max(load.num_runs for load in loads)
            numel = max(load.numel for load in loads)
            mebibytes = numel * 4 / 2**20  # gathered in fp32
            mean = sum(load.mean for load in loads) / max(num_teams, len(loads))
            slowest = max(load.slowest * load.mean for load in loads) / mean
            yield (
                f"  in {num_runs} run{'s' * (num_runs > 1)}, an owner holds at most {mebibytes:,.1f} MiB; "
                f"the slowest works {slowest:.2f} times the mean"
            )
            if same[0].tp_mode is TpMode.DUPLICATED and all(axis.is_tensor_parallel for axis in same[0].axes):
                yield from _distributed_lines(layouts, slowest, num_teams=num_teams)
    if has_blocks:
        yield f"  {BLOCKWISE_NOTE}"


def _distributed_lines(layouts: Sequence[ComputeLayout], slowest: float, *, num_teams: int) -> Iterator[str]:
    """Compare the slowest rank with that of muon_tp_mode='distributed', if fewer ranks own a matrix than there are.

    Both times are relative to the mean over ranks with whole matrices. They count the products of a Newton-Schulz step:
    the Gram matrix of the side that is not cut, its square, which every rank computes, and what is applied to X.
    """
    num_ranks = layouts[0].num_ranks * max(num_teams, len(layouts))
    num_owners = sum(len({matrix.owner for matrix in layout.matrices}) for layout in layouts)
    whole = sum(_products(matrix, 1) for layout in layouts for matrix in layout.matrices)
    by_team = [sum(_products(matrix, layout.num_ranks) for matrix in layout.matrices) for layout in layouts]
    if num_owners < num_ranks:
        yield (
            f"  fewer owners than ranks ({num_owners} of {num_ranks}): slowest rank {slowest:.1f} times the mean; "
            f"muon_tp_mode='distributed': {max(by_team) * num_ranks / max(whole, 1):.1f}"
        )


def _products(matrix: SplitMatrix, num_parts: int) -> int:
    """Multiplications of a Newton-Schulz step; of a part, with the Gram matrix of the side that is not cut."""
    shape = matrix.shape
    rows, cols = shape[-2:]
    side = min(rows, cols)
    if num_parts > 1:
        cuts_rows = matrix.dims[-1] == len(shape) - 2
        side = cols if cuts_rows else rows
    gram_and_apply = prod(shape) * 2 * side // num_parts
    gram_square = prod(shape[:-2]) * side**3
    return gram_and_apply + gram_square


def unit_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines on units: rule, dtypes, state, hooks."""
    for unit in plan.units:
        numel = sum(param.numel for buffer in plan.buffers for param in buffer.params if param.id in unit.ids)
        yield f"{unit.name} updates {len(unit.ids)} parameters, {numel:,} elements"
        for dtype, main_format in sorted(unit.numbers.items(), key=str):
            yield f"  {short(dtype)} parameters: {MAIN_FORMAT_TEXTS[main_format]}"
        kept = (*unit.rule.state_specs, *unit.averages.specs)
        yield f"  state: {state_text(kept)}; needs {unit.rule.needs.name.lower()}"
        if hooks := hooks_of(unit.rule):
            shown = ", ".join(map(repr, hooks))
            yield f"  hooks: {shown}"
        if unit.whole_qkv:
            yield f"  {unit.whole_qkv} fused q, k and v taken as one matrix each; soap_split_qkv=True splits them"
        if unit.finds_no_qkv:
            yield "  no fused q, k and v found to split: set qkv_split_shapes of these parameters, if there are any"
        layer_wise = [buffer for buffer in plan.buffers if buffer.kind.assigns_whole]
        num_teams = max((b.layout.num_shards for b in layer_wise if b.is_expert is unit.is_expert), default=1)
        for line in compute_lines(unit.compute, num_teams=num_teams):
            yield f"  {line}"


def buffer_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines on buffers: parameters, buckets, shards, padding."""
    for buffer in plan.buffers:
        layout = buffer.layout
        num_padding = layout.numel - layout.params_numel
        padding = num_padding / max(layout.numel, 1)
        plural = "s" * (layout.num_shards > 1)
        shards = f"{layout.num_shards} shard{plural}"
        line = f"{buffer.name}: {len(buffer.params)} parameters in {len(layout.buckets)} buckets, {shards}"
        line += f", padding {padding:.2%}"
        if buffer.dtype is FP8:
            line += f", {param_bytes(plan, buffer):,} bytes of codes and scales"
        yield line


def total_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines on bytes of state, clipping and loss scaling."""
    num_ranks = max((buffer.layout.num_shards for buffer in plan.buffers), default=1)

    def by_rank(bytes_of: Callable[[int], int]) -> str:
        shown = [f"{bytes_of(rank):,}" for rank in range(min(num_ranks, 9))]
        return listed(shown, 8)

    where = "data-parallel rank 0" if num_ranks == 1 else f"data-parallel ranks 0..{num_ranks - 1}"
    yield f"optimizer state: {by_rank(plan.state_bytes)} bytes on {where}"
    if plan.hosted:
        hosted = by_rank(partial(plan.state_bytes, on_host=True))
        staged = by_rank(partial(staging_bytes, plan))
        yield f"of this on the host: {hosted} bytes; staging buffers, at most: {staged}"
        if plan.config.optimizer_offload_compute == "device":
            yield "  updated on the device, which fetches and returns it run by run, two runs at a time"
    if plan.config.averaged:
        copies = sum(param_bytes(plan, buffer) for buffer in plan.buffers)
        yield f"eval() shows averages, and keeps {copies:,} bytes of trained weights until train()"
    config = plan.config
    clip = "off"
    if config.clip_grad > 0:
        clip = f"to global norm {config.clip_grad}"
    match config.loss_scaling:
        case ConstantScale(scale=scale):
            scaling = f"constant {scale:g}"
        case DynamicScale(initial=initial):
            scaling = f"dynamic from {initial:g}"
        case _:
            scaling = "none"
    yield f"clip: {clip}; loss scale: {scaling}"
