"""`Draft`: all that an optimizer is built from. `make_plan`, `with_compute`: which rank updates what. Values only."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from math import lcm, prod
from typing import Any

import torch
from torch import nn

from opt_config import OnDevice, OptimizerConfig, ParamKey, WholeParams
from opt_distributed.buffers import (
    AS_IT_CAME,
    CODED_MULTIPLE,
    BufferPlan,
    DistributedDataParallel,
    SyncedBuffer,
    WorldSizes,
    default_bucket_size,
    describe_stored,
    plan_buffers,
    uses_qk_layernorm,
)
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.pieces import Numbers
from opt_kernels.hooks import GivenHooks, bare, hooks_of
from opt_kernels.rules import Needs, Rule, SOAPMuonRule, SOAPRule
from opt_kernels.works import MatrixSpec
from opt_paramgroups import ParamId, ParamMeta, parameters_by_id
from opt_scheduler import ParamGroupOverride
from opt_stack.planning.matrices import ComputePlan, plan_compute, split_rows
from opt_stack.planning.report import buffer_lines, total_lines, unit_bytes, unit_lines
from opt_stack.rules.registry import Registry
from opt_stack.rules.torch_rule import torch_host_rule

Groups = list[dict[str, Any]]
Overrides = Mapping[ParamKey, ParamGroupOverride | OptimizerConfig | Mapping[str, Any]]
Hosted = tuple[frozenset[ParamId], ...]
"""For each shard of a buffer, the parameters whose pieces live on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """One rule and the parameters it updates."""

    name: str
    rule: Rule
    is_expert: bool
    ids: frozenset[ParamId]
    numbers: Mapping[torch.dtype, Numbers]  # how main values are kept, by parameter dtype
    compute: tuple[ComputePlan, ...] = ()  # for matrices that are cut over ranks
    splits: Mapping[ParamId, MatrixSpec] = field(default_factory=dict)  # of parameters whose rows are several matrices
    whole_qkv: int = 0  # number of fused q, k and v parameters that the rule updates as one matrix each
    finds_no_qkv: bool = False  # whether it would split fused q, k and v, but the model has none that are known
    host_rule: Rule | None = None  # updates the pieces that live on the host; None: `rule` does

    def rule_of(self, *, on_host: bool) -> Rule:
        """Return the rule of the device or of the host."""
        return self.host_rule if on_host and self.host_rule is not None else self.rule


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
        return sum(unit_bytes(self, unit, rank=rank, on_host=side) for unit in self.units for side in sides)

    def fingerprint(self, *, experts: bool) -> str:
        """Return a hash that is equal on ranks with the same layouts, rules and parameters: of experts, or dense."""
        buffers = [b for b in self.buffers if b.is_expert is experts and b.kind is not AS_IT_CAME]
        units = [u for u in self.units if u.is_expert is experts]
        text = [f"{b.name}:{b.layout.fingerprint()}" for b in buffers]
        text += [f"{u.name}:{rule_text(u.rule)}:{sorted(u.ids)}" for u in units]
        text += [f"{u.name}:{id}:{u.splits[id].split_name}" for u in units for id in sorted(u.splits)]
        text += [f"{b.name}:{list(map(sorted, self.hosted[b.name]))}" for b in buffers if b.name in self.hosted]
        return sha256("|".join(text).encode()).hexdigest()

    def layout_id(self, rank: int) -> str:
        """Return an id of this rank's pieces. A rank-local `state_dict` loads only where the id is the same."""
        shards = [b for b in self.buffers if b.layout.num_shards > 1 or b.kind is AS_IT_CAME]
        if not shards:
            return "replicated"
        layouts = "|".join(sorted(b.layout.fingerprint() for b in shards))
        return f"rank {rank} of {sha256(layouts.encode()).hexdigest()[:16]}"

    def __str__(self) -> str:
        return "\n\n".join("\n".join(lines(self)) for lines in (unit_lines, buffer_lines, total_lines))


def rule_text(rule: Rule) -> str:
    """The rule with its hooks as text that processes may compare: without addresses of memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"(hooks={list(hooks_of(rule))}, rule={rule!r})")


_MEGATRON = "megatron.core.distributed.distributed_data_parallel"


def is_megatron_wrapper(chunk: nn.Module) -> bool:
    """Return whether a chunk is Megatron-Core's wrapper. Megatron-Core is not imported."""
    return any(cls.__module__ == _MEGATRON and cls.__name__ == "DistributedDataParallel" for cls in type(chunk).__mro__)


def has_main_grads(chunk: nn.Module) -> bool:
    """Return whether a chunk is in a wrapper that reduces gradients in `main_grad`."""
    return isinstance(chunk, DistributedDataParallel) or is_megatron_wrapper(chunk)


_ALONE = Axes(dp=Alone(), tp=Alone())
ALONE = Roles(dense=_ALONE, expert=_ALONE, everyone=Alone())


@dataclass(kw_only=True)
class Draft:
    """What an optimizer is built from. `groups`, `rules` and `plan` are set in this order, after the other fields."""

    config: OptimizerConfig
    chunks: Sequence[nn.Module]
    registry: Registry
    roles: Roles = ALONE
    sizes: WorldSizes | None = None  # of a plan for another world; None: those of `roles`
    hooks: GivenHooks = ()
    extra_group_keys: Collection[str] = ()
    broadcast_params: bool = False
    overrides: Overrides | None = None  # for `get_optimizer`: None if there are only the standard ones
    by_name: bool = True  # whether embeddings and stacks of vectors are recognised; False: Megatron-Core's routing
    has_own_groups: bool = False  # whether the caller made the groups, not `get_param_groups`
    groups: Groups = field(default_factory=list)
    rules: Mapping[str, Rule] = field(default_factory=dict)  # with their hooks, by the groups' `optimizer`
    plan: Plan = field(init=False)
    device: torch.device | None = None  # of this rank; set when ranks are compared

    @cached_property
    def params(self) -> Mapping[ParamId, nn.Parameter]:
        """The trainable parameters of the model."""
        return parameters_by_id(self.chunks)

    @cached_property
    def metas(self) -> Mapping[ParamId, ParamMeta]:
        """The descriptions of `params`."""
        return describe_stored(self.chunks, by_name=self.by_name)

    @cached_property
    def group_of(self) -> dict[ParamId, int]:
        """The index of the group of each parameter; read once the groups are complete."""
        return {id: index for index, group in enumerate(self.groups) for id in group["param_ids"]}

    @cached_property
    def rule_of(self) -> dict[ParamId, str]:
        """The name of the rule of each parameter in a group; read once the groups are complete."""
        return {id: self.groups[index]["optimizer"] for id, index in self.group_of.items()}

    @cached_property
    def qk_layernorm(self) -> bool:
        """Whether gradients of norms of queries and keys are partial."""
        return any(map(uses_qk_layernorm, self.chunks))

    @property
    def wrapped(self) -> dict[int, DistributedDataParallel]:
        """The wrapped chunks by number."""
        return {at: chunk for at, chunk in enumerate(self.chunks) if isinstance(chunk, DistributedDataParallel)}

    @cached_property
    def wrapped_buffers(self) -> list[SyncedBuffer]:
        """The buffers of wrapped chunks that hold any parameter of the groups, chunk by chunk."""
        if self.shards_reduced:
            return []
        trained = self.rule_of.keys()
        return [buffer for chunk in self.wrapped.values() for buffer in chunk.buffers_of(trained)]

    @cached_property
    def shards_reduced(self) -> bool:
        """Whether ranks own whole parameters whose gradients a wrapper reduces on every rank."""
        wrappers = [chunk for chunk in self.chunks if has_main_grads(chunk)]
        shards = any(chunk.ddp_config.use_distributed_optimizer for chunk in wrappers)  # type: ignore[union-attr]
        return isinstance(self.config.sharding, WholeParams) and bool(wrappers) and not shards

    def axes_of(self, buffer: BufferPlan) -> Axes:
        """The groups over which the parameters of a buffer are distributed."""
        return self.roles.expert if buffer.is_expert else self.roles.dense

    def placed(self, unit: UnitPlan) -> Iterator[tuple[BufferPlan, ParamId]]:
        """Yield the parameters of a unit with their buffers, in the order of these."""
        return ((b, param.id) for b in self.plan.buffers for param in b.params if param.id in unit.ids)


def make_plan(draft: Draft) -> Plan:
    """Plan the buffers and units of the groups' parameters, without the ranks that compute matrices."""
    config = draft.config
    rules = draft.rules
    rule_of = draft.rule_of
    sizes = draft.sizes or WorldSizes.of(draft.roles)
    in_wrapper = {id for buffer in draft.wrapped_buffers for id in buffer.params}
    plain = plan_buffers(
        {id: meta for id, meta in draft.metas.items() if id in rule_of and id not in in_wrapper},
        sharding=config.sharding,
        sizes=sizes,
        needs_whole=lambda meta: rules[rule_of[meta.id]].needs is Needs.MATRICES,
        grad_dtype=lambda meta: config.precision.grads if meta.dtype is torch.bfloat16 else torch.float32,
        bucket_size=lambda numel: default_bucket_size(sizes.dense),
        # A block of a state has one scale, so a shard boundary must not cut it.
        shard_multiple=lcm(
            CODED_MULTIPLE, *(spec.block for rule in rules.values() for spec in rule.state_specs if spec.block)
        ),
    )
    norms = tuple("" if group.get("clip_grad", True) else group["optimizer"] for group in draft.groups)
    buffers = (*(buffer.plan for buffer in draft.wrapped_buffers), *plain)
    placement = config.placement
    hosted: dict[str, Hosted] = {}
    if not isinstance(placement, OnDevice):
        hosted = {buffer.name: tuple(_hosted(buffer, draft.metas, placement.fraction)) for buffer in buffers}
    return Plan(config=config, norms=norms, buffers=buffers, units=_plan_units(draft), hosted=hosted)


def _plan_units(draft: Draft) -> tuple[UnitPlan, ...]:
    """Plan one unit for each (rule, family), in order of first appearance; experts last: they use other groups.

    Of several model chunks, later ones are separate units if the first is stepped and gathered before them.
    """
    config = draft.config
    metas = draft.metas
    rule_of = draft.rule_of
    first = min((id.chunk for id in rule_of), default=0) if config.overlap_param_gather_with_optimizer_step else None
    found: dict[tuple[bool, bool, str], list[ParamId]] = {}
    for id, meta in metas.items():
        if id in rule_of:
            is_later = first is not None and id.chunk != first
            found.setdefault((is_later, meta.is_expert, rule_of[id]), []).append(id)
    units = []
    for (is_later, is_expert, name), ids in sorted(found.items(), key=lambda item: item[0][:2]):
        rule = draft.rules[name]
        splits: dict[ParamId, MatrixSpec] = {}
        whole_qkv = 0
        finds_no_qkv = False
        if rule.needs is Needs.MATRICES:  # rows of a parameter may form several matrices
            is_soap = isinstance(bare(rule), SOAPRule | SOAPMuonRule)
            split_qkv = config.soap_split_qkv if is_soap else config.muon_split_qkv
            of_unit = [metas[id] for id in ids]
            splits = split_rows(of_unit, split_qkv=split_qkv)
            whole_qkv = len(split_rows(of_unit, split_qkv=True)) - len(splits) if is_soap else 0
            finds_no_qkv = split_qkv and not is_expert and not any(meta.qkv_split_shapes for meta in of_unit)
        units.append(
            UnitPlan(
                name=f"{name}{'/later chunks' * is_later}{'/experts' * is_expert}",
                rule=rule,
                is_expert=is_expert,
                ids=frozenset(ids),
                numbers={dtype: numbers_of(config, dtype) for dtype in {metas[id].stored_dtype for id in ids}},
                splits=splits,
                whole_qkv=whole_qkv,
                finds_no_qkv=finds_no_qkv,
            )
        )
    return tuple(units)


def numbers_of(config: OptimizerConfig, dtype: torch.dtype) -> Numbers:
    """Return how the main values of parameters of `dtype` are kept."""
    if dtype == torch.float32:
        return Numbers.DIRECT
    if dtype == torch.bfloat16 and config.precision.remainder:
        return Numbers.REMAINDER
    if dtype == torch.bfloat16 and config.precision.mains is torch.int8:
        return Numbers.SHORT_REMAINDER
    return Numbers.FP16_SCALED if config.precision.mains is torch.float16 else Numbers.FP32_COPY


def _hosted(buffer: BufferPlan, metas: Mapping[ParamId, ParamMeta], fraction: float) -> Iterator[frozenset[ParamId]]:
    """Yield the parameters of each shard whose pieces live on the host.

    Each shard keeps its first pieces on the host, in the order of the layout, until they hold the fraction of its
    elements: at most one piece too many, as in Megatron-Core. DTensors are counted by their whole shapes, because ranks
    that store parts of one matrix must make the same decision.
    """
    is_laid_out = buffer.kind is AS_IT_CAME
    for shard in range(1 if is_laid_out else buffer.layout.num_shards):
        runs = [(run.id, prod(metas[run.id].shape) if is_laid_out else run.numel) for run in buffer.runs(shard)]
        wanted = fraction * sum(numel for _, numel in runs)
        before = accumulate((numel for _, numel in runs), initial=0)
        yield frozenset(id for (id, _), reached in zip(runs, before) if reached < wanted)


def with_compute(draft: Draft) -> Plan:
    """Return the plan with the ranks that compute each matrix that is cut over ranks, and the rules of the host.

    Raises:
        ConfigError, LayoutError: see `plan_compute` and `torch_host_rule`.
    """
    plan = draft.plan
    sizes = draft.sizes or WorldSizes.of(draft.roles)
    units = []
    shard_of = {  # of parameters that are dealt whole
        piece.id: rank
        for buffer in plan.buffers
        if max(sizes.dense_tp, sizes.expert_tp) > 1 and buffer.kind.is_sharded and not buffer.kind.cuts
        for rank in range(buffer.layout.num_shards)
        for _, piece in buffer.layout.owned(rank)
    }
    for unit in plan.units:
        if unit.rule.needs is Needs.MATRICES:
            tensor_parallel = sizes.expert_tp if unit.is_expert else sizes.dense_tp
            compute = plan_compute(
                bare(unit.rule),
                [draft.metas[id] for _, id in draft.placed(unit)],
                tensor_parallel=tensor_parallel,
                team_of=shard_of,
                splits=unit.splits,
            )
            unit = replace(unit, compute=compute)
        if draft.config.use_torch_optimizer_for_cpu_offload:
            unit = replace(unit, host_rule=torch_host_rule(unit.rule, draft.config))
        units.append(unit)
    return replace(plan, units=tuple(units))
