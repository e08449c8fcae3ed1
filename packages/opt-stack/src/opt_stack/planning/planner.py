"""The rules and the plan of a draft: `make_rules_`, `make_plan`, `with_compute`. They decide; `checks` refuses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import lcm, prod
from typing import Any, NamedTuple

import torch

from opt_config import OnDevice, OptimizerConfig
from opt_distributed.buffers import CODED_MULTIPLE, BufferPlan, default_bucket_size, plan_buffers
from opt_distributed.layout import AS_IT_CAME
from opt_distributed.pieces import Numbers
from opt_kernels.hooks import bare
from opt_kernels.rules import Needs, Rule, SOAPMuonRule, SOAPRule
from opt_kernels.works import MatrixSpec
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.compute import plan_compute, split_rows
from opt_stack.planning.draft import Draft
from opt_stack.planning.hooks import check_weight_decay, with_hooks
from opt_stack.planning.plan import GroupPlan, Hosted, Plan, UnitPlan
from opt_stack.rules.entries import (
    check_entries,
    check_numbers,
    check_unread_fields,
    check_unread_numbers,
    checked_hyper,
    record_choices_,
    record_hooks_,
)
from opt_stack.rules.torch_rule import torch_host_rule


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
    draft.rules = made = with_hooks(made, draft.hooks)
    check_weight_decay(groups, made)
    check_unread_fields(config, [draft.registry[name] for name in sorted(names)])
    for group in groups:
        check_unread_numbers(group, made[group["optimizer"]])
    record_hooks_(groups, made)
    record_choices_(groups, made)


def make_plan(draft: Draft) -> Plan:
    """Plan the buffers and units of the groups' parameters, without the ranks that compute matrices."""
    buffers = (*(buffer.plan for buffer in draft.wrapped_buffers), *_plain_buffers(draft))
    return Plan(
        config=draft.config,
        groups=tuple(map(_group_plan, draft.groups)),
        buffers=buffers,
        units=_plan_units(draft),
        hosted=_plan_host(draft, buffers),
    )


def with_compute(draft: Draft) -> Plan:
    """Return the plan with the ranks that compute each matrix that is cut over ranks, and the rules of the host.

    Raises:
        ConfigError, LayoutError: see `plan_compute` and `torch_host_rule`.
    """
    units = [_with_compute(draft, unit) for unit in draft.plan.units]
    if draft.config.use_torch_optimizer_for_cpu_offload:
        units = [replace(unit, host_rule=torch_host_rule(unit.rule, draft.config)) for unit in units]
    return replace(draft.plan, units=tuple(units))


def _plain_buffers(draft: Draft) -> tuple[BufferPlan, ...]:
    """Plan the buffers of parameters that no wrapped chunk has."""
    config, rules, rule_of, sizes = draft.config, draft.rules, draft.rule_of, draft.world
    in_wrapper = {id for buffer in draft.wrapped_buffers for id in buffer.params}
    return plan_buffers(
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


class _UnitKey(NamedTuple):
    """What the parameters of one unit share. Units are stepped in the order of their keys."""

    is_later: bool  # of a later model chunk, if the first is stepped and gathered before the others
    is_expert: bool
    rule: str

    @property
    def name(self) -> str:
        """Return the unit's name, such as `muon/experts`."""
        marks = {"later chunks": self.is_later, "experts": self.is_expert}
        return "/".join([self.rule, *(mark for mark, applies in marks.items() if applies)])


def _plan_units(draft: Draft) -> tuple[UnitPlan, ...]:
    """Plan one unit for each (rule, family), in order of first appearance; experts last: they use other groups."""
    config, metas, rule_of = draft.config, draft.metas, draft.rule_of
    first = min((id.chunk for id in rule_of), default=0) if config.overlap_param_gather_with_optimizer_step else None
    found: dict[_UnitKey, list[ParamId]] = {}
    for id, meta in metas.items():
        if id in rule_of:
            key = _UnitKey(first is not None and id.chunk != first, meta.is_expert, rule_of[id])
            found.setdefault(key, []).append(id)
    return tuple(
        UnitPlan(
            name=key.name,
            rule=draft.rules[key.rule],
            is_expert=key.is_expert,
            ids=frozenset(ids),
            numbers={dtype: numbers_of(config, dtype) for dtype in {metas[id].stored_dtype for id in ids}},
            **_splits(config, draft.rules[key.rule], [metas[id] for id in ids]),
        )
        for key, ids in sorted(found.items(), key=lambda item: item[0][:2])
    )


def numbers_of(config: OptimizerConfig, dtype: torch.dtype) -> Numbers:
    """Return how the main values of parameters of `dtype` are kept."""
    if dtype == torch.float32:
        return Numbers.DIRECT
    if dtype == torch.bfloat16 and config.precision.remainder:
        return Numbers.REMAINDER
    if dtype == torch.bfloat16 and config.precision.mains is torch.int8:
        return Numbers.SHORT_REMAINDER
    return Numbers.FP16_SCALED if config.precision.mains is torch.float16 else Numbers.FP32_COPY


def _splits(config: OptimizerConfig, rule: Rule, metas: Sequence[ParamMeta]) -> dict[str, Any]:
    """The fields of a `UnitPlan` on parameters whose rows form several matrices."""
    if rule.needs is not Needs.MATRICES:
        return {}
    is_soap = isinstance(bare(rule), SOAPRule | SOAPMuonRule)
    splits: Mapping[ParamId, MatrixSpec] = split_rows(
        metas, split_qkv=config.soap_split_qkv if is_soap else config.muon_split_qkv
    )
    whole_qkv = len(split_rows(metas, split_qkv=True)) - len(splits) if is_soap else 0
    return {"splits": splits, "whole_qkv": whole_qkv}


def _with_compute(draft: Draft, unit: UnitPlan) -> UnitPlan:
    if unit.rule.needs is not Needs.MATRICES:
        return unit
    buffers, metas, sizes = draft.plan.buffers, draft.metas, draft.world
    tensor_parallel = sizes.expert_tp if unit.is_expert else sizes.dense_tp
    compute = plan_compute(
        bare(unit.rule),
        [metas[param.id] for buffer in buffers for param in buffer.params if param.id in unit.ids],
        tensor_parallel=tensor_parallel,
        team_of=_shard_of(buffers) if tensor_parallel > 1 else {},
        splits=unit.splits,
    )
    return replace(unit, compute=compute)


def _shard_of(buffers: Sequence[BufferPlan]) -> dict[ParamId, int]:
    """Map each whole parameter to its shard."""
    return {
        owned.piece.id: rank
        for buffer in buffers
        if buffer.kind.is_sharded and not buffer.kind.cuts
        for rank in range(buffer.layout.num_shards)
        for owned in buffer.layout.owned(rank)
    }


def _group_plan(group: Mapping[str, Any]) -> GroupPlan:
    return GroupPlan(
        name=group["name"],
        optimizer=group["optimizer"],
        num_params=len(group["params"]),
        numel=sum(param.numel() for param in group["params"]),
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        clips=group.get("clip_grad", True),
    )


def _plan_host(draft: Draft, buffers: Sequence[BufferPlan]) -> Mapping[str, Hosted]:
    """Return, by buffer name, the parameters whose pieces live on the host: one set for each shard.

    Each shard keeps its first pieces on the host, in the order of the layout, until they hold the fraction of its
    elements: at most one piece too many, as in Megatron-Core. DTensors are counted by their whole shapes, because ranks
    that store parts of one matrix must make the same decision.
    """
    placement = draft.config.placement
    if isinstance(placement, OnDevice):
        return {}
    return {buffer.name: tuple(_hosted(buffer, draft.metas, placement.fraction)) for buffer in buffers}


def _hosted(buffer: BufferPlan, metas: Mapping[ParamId, ParamMeta], fraction: float) -> Iterator[frozenset[ParamId]]:
    """Yield the parameters of each shard whose pieces live on the host."""
    is_laid_out = buffer.kind is AS_IT_CAME
    for shard in range(1 if is_laid_out else buffer.layout.num_shards):
        runs = [(run.id, prod(metas[run.id].shape) if is_laid_out else run.numel) for run in buffer.runs(shard)]
        wanted = fraction * sum(numel for _, numel in runs)
        before = accumulate((numel for _, numel in runs), initial=0)
        yield frozenset(id for (id, _), reached in zip(runs, before) if reached < wanted)
