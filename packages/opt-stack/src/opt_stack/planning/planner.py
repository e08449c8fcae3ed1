"""`make_plan`: plan the step from the configuration, the parameters and the sizes of groups, or refuse it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

import torch

from opt_config import ConfigError, FlatShards, OptimizerConfig, Replicated, WholeParams
from opt_distributed.comm.groups import Roles
from opt_distributed.layout import Layout, ParamShape, flat_layout, replicated_layout, whole_layout
from opt_distributed.layout.padding import SHARD_MULTIPLE
from opt_distributed.step.coded_main import FP16
from opt_distributed.step.mains import Numbers
from opt_kernels.hooks import bare
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.soap import SOAPRule
from opt_kernels.rules.soap_muon import SOAPMuonRule
from opt_kernels.works import MatrixSpec
from opt_paramgroups import ParamId, ParamMeta
from opt_stack.planning.compute import plan_compute, split_rows
from opt_stack.planning.fp8 import check_fp8
from opt_stack.planning.hooks import check_hooks
from opt_stack.planning.host_plan import plan_host
from opt_stack.planning.host_rule import torch_host_rule
from opt_stack.planning.plan import BufferPlan, GroupPlan, Plan, Spread, UnitPlan, short

SEPARATE_NORMS = ("mtp",)
"""Values of a parameter's `grad_norm_group`, as in Megatron-Core: its gradients are clipped by a separate norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSizes:
    """Sizes of the data-parallel groups of dense parameters and experts, and of their tensor-parallel groups."""

    dense: int = 1
    expert: int = 1
    dense_tp: int = 1
    expert_tp: int = 1

    @classmethod
    def of(cls, roles: Roles) -> "WorldSizes":
        """The sizes of the groups of `roles`."""
        return cls(
            dense=roles.dense.dp.size,
            expert=roles.expert.dp.size,
            dense_tp=roles.dense.tp.size,
            expert_tp=roles.expert.tp.size,
        )


def make_plan(
    config: OptimizerConfig,
    metas: Mapping[ParamId, ParamMeta],
    groups: Sequence[Mapping[str, Any]],  # of `get_param_groups`: `name`, `optimizer`, `param_ids`, ...
    rules: Mapping[str, Rule],  # by the groups' `optimizer`
    *,
    sizes: WorldSizes,
    bucket_size: int | None = None,
    ready_buffers: Sequence[BufferPlan] = (),  # of wrapped chunks
) -> Plan:
    """Plan the step for these parameters.

    Raises:
        ConfigError: a rule does not support the layout, or a parameter has a dtype that the precision options do not
            cover.
    """
    rule_of = {id: group["optimizer"] for group in groups for id in group["param_ids"]}
    _check_dtypes(config, metas, rule_of)
    check_fp8(config, metas, rule_of, rules)
    _check_norm_groups(metas)
    in_buffers = {param.id for buffer in ready_buffers for param in buffer.params}
    ours = {id: name for id, name in rule_of.items() if id not in in_buffers}
    planned = _plan_buffers(config, metas, ours, rules, sizes=sizes, bucket_size=bucket_size)
    buffers = (*ready_buffers, *planned)
    units = _plan_units(config, metas, rule_of, rules)
    for unit in units:
        _check_unit(unit, buffers, config.sharding)
        _check_matrices(unit, metas)
        check_hooks(unit, metas, buffers)
    units = tuple(_with_compute(config, unit, metas, buffers, sizes) for unit in units)
    _check_moments(config, rules)
    if config.use_torch_optimizer_for_cpu_offload:
        units = tuple(replace(unit, host_rule=torch_host_rule(unit.rule, config)) for unit in units)
    return Plan(
        config=config,
        groups=tuple(map(_group_plan, groups)),
        buffers=buffers,
        units=units,
        hosted=plan_host(config.placement, buffers, metas),
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


def _plan_buffers(
    config: OptimizerConfig,
    metas: Mapping[ParamId, ParamMeta],
    rule_of: Mapping[ParamId, str],
    rules: Mapping[str, Rule],
    *,
    sizes: WorldSizes,
    bucket_size: int | None,
) -> tuple[BufferPlan, ...]:
    """Plan one buffer for each (dtype, family, spread), in order of first appearance."""
    found: dict[tuple[torch.dtype, bool, Spread], list[ParamShape]] = {}
    for id, meta in metas.items():
        if id not in rule_of:
            continue
        spread = Spread.LAID_OUT if meta.is_dtensor else _spread(config.sharding, rules[rule_of[id]])
        stored = meta.local_shape if meta.is_dtensor else meta.shape
        shape = ParamShape(id=id, shape=tuple(stored), shared_embedding=meta.is_on_several_stages)
        found.setdefault((meta.stored_dtype, meta.is_expert, spread), []).append(shape)
    # A block of block-quantised state or main values has one scale, so a shard boundary must not cut it.
    multiple = lcm(SHARD_MULTIPLE, *(spec.block for rule in rules.values() for spec in rule.state_specs if spec.block))
    if config.precision.mains is torch.float16:
        multiple = lcm(multiple, FP16.block)
    buffers = []
    for (dtype, is_expert, spread), params in found.items():
        size = sizes.expert if is_expert else sizes.dense
        name = f"{short(dtype)} {'experts' if is_expert else 'dense'}, {spread.value}"
        layout = _layout(spread, params, num_shards=size, bucket_size=bucket_size, shard_multiple=multiple)
        buffers.append(
            BufferPlan(name=name, dtype=dtype, is_expert=is_expert, spread=spread, params=tuple(params), layout=layout)
        )
    return tuple(buffers)


def _spread(sharding: Replicated | FlatShards | WholeParams, rule: Rule) -> Spread:
    match sharding:
        case Replicated():
            return Spread.REPLICATED
        case FlatShards():
            return Spread.FLAT
        case WholeParams():
            return Spread.WHOLE if rule.needs is Needs.MATRICES else Spread.FLAT


def _layout(
    spread: Spread, params: Sequence[ParamShape], *, num_shards: int, bucket_size: int | None, shard_multiple: int
) -> Layout:
    match spread:
        case Spread.FLAT:
            return flat_layout(params, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=shard_multiple)
        case Spread.WHOLE:
            return whole_layout(params, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=shard_multiple)
        case Spread.REPLICATED | Spread.LAID_OUT:
            return replicated_layout(params, bucket_size=bucket_size)


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


def _plan_units(
    config: OptimizerConfig,
    metas: Mapping[ParamId, ParamMeta],
    rule_of: Mapping[ParamId, str],
    rules: Mapping[str, Rule],
) -> tuple[UnitPlan, ...]:
    """Plan one unit for each (rule, family), in order of first appearance; experts last: they use other groups."""
    first = min((id.chunk for id in rule_of), default=0) if config.overlap_param_gather_with_optimizer_step else None
    found: dict[_UnitKey, list[ParamId]] = {}
    for id, meta in metas.items():
        if id in rule_of:
            key = _UnitKey(first is not None and id.chunk != first, meta.is_expert, rule_of[id])
            found.setdefault(key, []).append(id)
    return tuple(
        UnitPlan(
            name=key.name,
            rule=rules[key.rule],
            is_expert=key.is_expert,
            ids=frozenset(ids),
            numbers={dtype: numbers_of(config, dtype) for dtype in {metas[id].stored_dtype for id in ids}},
            splits=_splits(config, rules[key.rule], [metas[id] for id in ids]),
            whole_qkv=_whole_qkv(config, rules[key.rule], [metas[id] for id in ids]),
        )
        for key, ids in sorted(found.items(), key=lambda item: item[0][:2])
    )


def _splits(config: OptimizerConfig, rule: Rule, metas: Sequence[ParamMeta]) -> Mapping[ParamId, MatrixSpec]:
    """The matrix specs of parameters whose rows form several matrices."""
    if rule.needs is not Needs.MATRICES:
        return {}
    return split_rows(metas, split_qkv=config.soap_split_qkv if _is_soap(rule) else config.muon_split_qkv)


def _whole_qkv(config: OptimizerConfig, rule: Rule, metas: Sequence[ParamMeta]) -> int:
    """Number of fused q, k and v parameters that SOAP updates as one matrix each."""
    if not _is_soap(rule) or config.soap_split_qkv:
        return 0
    return len(split_rows(metas, split_qkv=True)) - len(split_rows(metas, split_qkv=False))


def _is_soap(rule: Rule) -> bool:
    return isinstance(bare(rule), SOAPRule | SOAPMuonRule)


def _check_dtypes(config: OptimizerConfig, metas: Mapping[ParamId, ParamMeta], rule_of: Mapping[ParamId, str]) -> None:
    allowed = {torch.float32, config.precision.params}
    wrong = [id for id in rule_of if metas[id].dtype not in allowed]
    if wrong:
        dtype = metas[wrong[0]].dtype
        remedy = {torch.bfloat16: "set bf16=True", torch.float16: "set fp16=True"}.get(dtype, "convert the model")
        raise ConfigError(
            f"parameter {wrong[0].name!r} (and {len(wrong) - 1} more) is {dtype}; fp16={config.fp16} and "
            f"bf16={config.bf16} allow {', '.join(sorted(map(str, allowed)))}: {remedy}"
        )


def _check_unit(unit: UnitPlan, buffers: Sequence[BufferPlan], sharding: Replicated | FlatShards | WholeParams) -> None:
    if unit.rule.needs is not Needs.MATRICES:
        return
    for buffer in buffers:
        cut = [param.id for param in buffer.params if param.id in unit.ids] if buffer.spread is Spread.FLAT else []
        if cut and isinstance(sharding, WholeParams):  # then the buffer came with a wrapped chunk
            raise ConfigError(
                f"optimizer={unit.rule.name!r} needs whole matrices, but {str(cut[0])!r} was wrapped in a buffer that "
                "is cut between ranks; pass is_whole=opt_stack.matrices_whole to DistributedDataParallel"
            )
        if cut:
            raise ConfigError(
                f"optimizer={unit.rule.name!r} needs whole matrices, but use_distributed_optimizer=True "
                f"({type(sharding).__name__}) cuts parameters between ranks; set "
                "use_layer_wise_distributed_optimizer=True and use_distributed_optimizer=False"
            )


def _check_norm_groups(metas: Mapping[ParamId, ParamMeta]) -> None:
    for id, meta in metas.items():
        if meta.grad_norm_group not in (None, *SEPARATE_NORMS):
            raise ConfigError(
                f"parameter {str(id)!r} has grad_norm_group={meta.grad_norm_group!r}; "
                f"allowed are {', '.join(map(repr, SEPARATE_NORMS))}, or None for the model's own norm"
            )


def _check_matrices(unit: UnitPlan, metas: Mapping[ParamId, ParamMeta]) -> None:
    """Raise ConfigError if a matrix rule was given a parameter that is not a matrix or a stack of matrices."""
    if unit.rule.needs is not Needs.MATRICES:
        return
    wrong = [id for id in sorted(unit.ids) if len(metas[id].shape) not in (2, 3)]
    if wrong:
        raise ConfigError(
            f"optimizer={unit.rule.name!r} updates matrices (2-D or 3-D parameters), but {wrong[0]} has shape "
            f"{metas[wrong[0]].shape}; use an elementwise rule for it through config_overrides"
        )


def _with_compute(
    config: OptimizerConfig,
    unit: UnitPlan,
    metas: Mapping[ParamId, ParamMeta],
    buffers: Sequence[BufferPlan],
    sizes: WorldSizes,
) -> UnitPlan:
    """Return the unit with the plan of which rank computes each matrix that is cut over ranks."""
    if unit.rule.needs is not Needs.MATRICES:
        return unit
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
        if buffer.spread is Spread.WHOLE
        for rank in range(buffer.layout.num_shards)
        for owned in buffer.layout.owned(rank)
    }


def _check_moments(config: OptimizerConfig, rules: Mapping[str, Rule]) -> None:
    """Raise ConfigError if `exp_avg_dtype` or `exp_avg_sq_dtype` is narrow, but a rule keeps that moment in fp32, or no
    rule has it.

    Checks the rules, which are the same on all ranks, and not the units: a rank may hold no parameter of Adam's.
    """
    for state, dtype in (("exp_avg", config.precision.exp_avg), ("exp_avg_sq", config.precision.exp_avg_sq)):
        if dtype is torch.float32:
            continue
        kept = {name: spec for name, rule in rules.items() for spec in rule.state_specs if spec.name == state}
        wide = [name for name, spec in kept.items() if spec.dtype is torch.float32]
        if wide or not kept:
            problem = f"optimizer={wide[0]!r} keeps it in fp32" if wide else f"{', '.join(rules)} has no such state"
            raise ConfigError(f"{state}_dtype={dtype}: {problem}; leave it at torch.float32, or use optimizer='adam'")


def _group_plan(group: Mapping[str, Any]) -> GroupPlan:
    clips = group.get("clip_grad", True)
    if not isinstance(clips, bool):
        raise ConfigError(
            f"config_overrides: group {group['name']!r} has clip_grad={clips!r}; allowed are True (clip to "
            "OptimizerConfig.clip_grad) and False (do not clip; the group has a separate norm)"
        )
    return GroupPlan(
        name=group["name"],
        optimizer=group["optimizer"],
        num_params=len(group["params"]),
        numel=sum(param.numel() for param in group["params"]),
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        clips=clips,
    )
