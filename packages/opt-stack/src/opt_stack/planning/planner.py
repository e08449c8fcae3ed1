"""`Draft`: all that an optimizer is built from. `make_rules_`, `make_plan`, `with_compute` decide; `checks` refuses."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import lcm, prod
from typing import Any, NamedTuple

import torch
from torch import nn

from opt_config import ConfigError, OnDevice, OptimizerConfig, ParamKey
from opt_distributed.buffers import (
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
from opt_distributed.layout import AS_IT_CAME
from opt_distributed.pieces import Numbers
from opt_kernels.hooks import GivenHooks, HookError, Hyperball, bare, hooked, hooks_of
from opt_kernels.rules import Needs, Rule, SOAPMuonRule, SOAPRule
from opt_paramgroups import ParamId, ParamMeta, parameters_by_id
from opt_scheduler import ParamGroupOverride
from opt_stack.planning.compute import plan_compute, split_rows
from opt_stack.planning.plan import GroupPlan, Hosted, Plan, UnitPlan
from opt_stack.rules.entries import (
    check_entries,
    check_numbers,
    check_unread_fields,
    check_unread_numbers,
    checked_hyper,
    record_rule_,
)
from opt_stack.rules.registry import Registry
from opt_stack.rules.torch_rule import torch_host_rule

Groups = list[dict[str, Any]]
Overrides = Mapping[ParamKey, ParamGroupOverride | OptimizerConfig | Mapping[str, Any]]

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
    groups: Groups = field(default_factory=list)
    rules: Mapping[str, Rule] = field(default_factory=dict)  # with their hooks, by the groups' `optimizer`
    plan: Plan = field(init=False)

    @cached_property
    def params(self) -> Mapping[ParamId, nn.Parameter]:
        """The trainable parameters of the model."""
        return parameters_by_id(self.chunks)

    @cached_property
    def metas(self) -> Mapping[ParamId, ParamMeta]:
        """The descriptions of `params`."""
        return describe_stored(self.chunks)

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
        trained = self.rule_of.keys()
        return [buffer for chunk in self.wrapped.values() for buffer in chunk.buffers_of(trained)]

    def axes_of(self, buffer: BufferPlan) -> Axes:
        """The groups over which the parameters of a buffer are distributed."""
        return self.roles.expert if buffer.is_expert else self.roles.dense

    def placed(self, unit: UnitPlan) -> Iterator[tuple[BufferPlan, ParamId]]:
        """Yield the parameters of a unit with their buffers, in the order of these."""
        return ((b, param.id) for b in self.plan.buffers for param in b.params if param.id in unit.ids)


def make_rules_(draft: Draft) -> None:
    """Make the rules that the groups name, and add to the groups the numbers that these read and the groups lack.

    Raises:
        ConfigError: a rule is unknown or refuses the configuration; a group has an entry that nothing reads, or a
            number that is out of bounds; a hook does not fit its rule.
    """
    config, groups = draft.config, draft.groups
    names = {group["optimizer"] for group in groups}
    made = {name: draft.registry.rule(name, config) for name in names}
    hyper = {name: checked_hyper(draft.registry[name], rule, config) for name, rule in made.items()}
    check_entries(groups, hyper, decoupled=config.decoupled_weight_decay, extra_group_keys=draft.extra_group_keys)
    for group in groups:
        for key, value in hyper[group["optimizer"]].items():
            group.setdefault(key, value)
        check_numbers(group, made[group["optimizer"]])
    given = draft.hooks if isinstance(draft.hooks, Mapping) else dict.fromkeys(made, draft.hooks)
    if unused := [name for name, hooks in given.items() if name not in made and hooks]:
        raise ConfigError(f"hooks has {unused[0]!r}, but parameters are updated by {', '.join(made)}; use these names")
    try:
        draft.rules = made = {name: hooked(rule, given.get(name, ())) for name, rule in made.items()}
    except HookError as error:
        raise ConfigError(f"hooks: {error}") from error
    check_unread_fields(config, [draft.registry[name] for name in sorted(names)])
    for group in groups:
        rule = made[group["optimizer"]]
        for key in ("weight_decay", "start_wd", "end_wd"):
            if group.get(key) and any(isinstance(hook, Hyperball) for hook in hooks_of(rule)):
                raise ConfigError(
                    f"group {group['name']!r} has {key}={group[key]}, but Hyperball() fixes the norm of the weights "
                    "instead of decaying them; set weight_decay=0.0"
                )
        check_unread_numbers(group, rule)
        record_rule_(group, rule)


def make_plan(draft: Draft) -> Plan:
    """Plan the buffers and units of the groups' parameters, without the ranks that compute matrices."""
    config, rules, rule_of, sizes = draft.config, draft.rules, draft.rule_of, draft.sizes or WorldSizes.of(draft.roles)
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
    groups = [
        GroupPlan(
            name=group["name"],
            optimizer=group["optimizer"],
            num_params=len(group["params"]),
            numel=sum(param.numel() for param in group["params"]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            clips=group.get("clip_grad", True),
        )
        for group in draft.groups
    ]
    buffers = (*(buffer.plan for buffer in draft.wrapped_buffers), *plain)
    placement = config.placement
    hosted: dict[str, Hosted] = {}
    if not isinstance(placement, OnDevice):
        hosted = {buffer.name: tuple(_hosted(buffer, draft.metas, placement.fraction)) for buffer in buffers}
    return Plan(config=config, groups=tuple(groups), buffers=buffers, units=_plan_units(draft), hosted=hosted)


class _UnitKey(NamedTuple):
    """What the parameters of one unit share. Units are stepped in the order of their keys."""

    is_later: bool  # of a later model chunk, if the first is stepped and gathered before the others
    is_expert: bool
    rule: str


def _plan_units(draft: Draft) -> tuple[UnitPlan, ...]:
    """Plan one unit for each (rule, family), in order of first appearance; experts last: they use other groups."""
    config, metas, rule_of = draft.config, draft.metas, draft.rule_of
    first = min((id.chunk for id in rule_of), default=0) if config.overlap_param_gather_with_optimizer_step else None
    found: dict[_UnitKey, list[ParamId]] = {}
    for id, meta in metas.items():
        if id in rule_of:
            key = _UnitKey(first is not None and id.chunk != first, meta.is_expert, rule_of[id])
            found.setdefault(key, []).append(id)
    units = []
    for key, ids in sorted(found.items(), key=lambda item: item[0][:2]):
        rule, splits, whole_qkv = draft.rules[key.rule], {}, 0
        if rule.needs is Needs.MATRICES:  # rows of a parameter may form several matrices
            is_soap, of_unit = isinstance(bare(rule), SOAPRule | SOAPMuonRule), [metas[id] for id in ids]
            splits = split_rows(of_unit, split_qkv=config.soap_split_qkv if is_soap else config.muon_split_qkv)
            whole_qkv = len(split_rows(of_unit, split_qkv=True)) - len(splits) if is_soap else 0
        units.append(
            UnitPlan(
                name=f"{key.rule}{'/later chunks' * key.is_later}{'/experts' * key.is_expert}",
                rule=rule,
                is_expert=key.is_expert,
                ids=frozenset(ids),
                numbers={dtype: numbers_of(config, dtype) for dtype in {metas[id].stored_dtype for id in ids}},
                splits=splits,
                whole_qkv=whole_qkv,
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
    plan, sizes, units = draft.plan, draft.sizes or WorldSizes.of(draft.roles), []
    for unit in plan.units:
        if unit.rule.needs is Needs.MATRICES:
            tensor_parallel = sizes.expert_tp if unit.is_expert else sizes.dense_tp
            compute = plan_compute(
                bare(unit.rule),
                [draft.metas[id] for _, id in draft.placed(unit)],
                tensor_parallel=tensor_parallel,
                team_of=_shard_of(plan.buffers) if tensor_parallel > 1 else {},
                splits=unit.splits,
            )
            unit = replace(unit, compute=compute)
        if draft.config.use_torch_optimizer_for_cpu_offload:
            unit = replace(unit, host_rule=torch_host_rule(unit.rule, draft.config))
        units.append(unit)
    return replace(plan, units=tuple(units))


def _shard_of(buffers: Sequence[BufferPlan]) -> dict[ParamId, int]:
    """Map each whole parameter to its shard."""
    return {
        owned.piece.id: rank
        for buffer in buffers
        if buffer.kind.is_sharded and not buffer.kind.cuts
        for rank in range(buffer.layout.num_shards)
        for owned in buffer.layout.owned(rank)
    }
