"""The frozen values from which an optimizer is built: each is complete, and made from those before it.

Request ─ read_model ─▶ Model ─ make_groups ─▶ Groups ─ make_plan ─▶ Plan ─ checks ─▶ Design ─▶ memory
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm, prod

import torch
from torch import nn

from opt_config import OnDevice, OptimizerConfig, WholeParams
from opt_distributed.buffers import (
    CODED_MULTIPLE,
    PRE_SHARDED,
    BufferPlan,
    DistributedDataParallel,
    Metas,
    Params,
    SyncedBuffer,
    WorldSizes,
    default_bucket_size,
    describe_stored,
    plan_buffers,
    uses_qk_layernorm,
)
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.pieces import NO_AVERAGES, WeightAverages
from opt_kernels.hooks import GivenHooks, bare
from opt_kernels.params import MainFormat
from opt_kernels.rules import Needs, Rule, SOAPMuonRule, SOAPRule
from opt_paramgroups import ParamId, ParamMeta, parameters_by_id
from opt_paramgroups.overrides import ConfigOverrides
from opt_stack.planning.matrices import plan_compute, split_rows
from opt_stack.planning.plan import Hosted, Plan, UnitPlan
from opt_stack.rules.entries import ParamGroups
from opt_stack.rules.registry import Registry
from opt_stack.rules.torch_rule import torch_host_rule

ModelChunks = Sequence[nn.Module]  # the model, or its virtual pipeline stages
ALONE = Roles(dense=Axes(dp=Alone(), tp=Alone()), expert=Axes(dp=Alone(), tp=Alone()), everyone=Alone())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for, of right types."""

    config: OptimizerConfig  # with the shared fields that wrapped chunks set
    chunks: tuple[nn.Module, ...]
    registry: Registry
    roles: Roles = ALONE
    overrides: ConfigOverrides | None = None  # None: only the standard ones
    hooks: GivenHooks = ()
    extra_group_keys: Collection[str] = ()
    allow_unmatched: bool = False
    broadcast_params: bool = False
    by_name: bool = True  # whether embeddings and stacks of vectors are recognised; False: Megatron-Core's routing
    has_given_groups: bool = False  # whether the caller made the groups, not `get_param_groups`


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is known of the modules of this rank."""

    params: Params  # trainable
    metas: Metas
    wrapped: Mapping[int, DistributedDataParallel]  # by number of the chunk
    shards_reduced: bool  # whether ranks own whole parameters whose gradients a wrapper reduces on every rank
    qk_layernorm: bool  # whether gradients of norms of queries and keys are partial
    device: torch.device | None  # of the first tensor; None without tensors

    def wrapped_buffers(self, trained: Collection[ParamId]) -> list[SyncedBuffer]:
        """Return the buffers of wrapped chunks that hold any of the trained parameters, chunk by chunk."""
        if self.shards_reduced:
            return []
        return [buffer for chunk in self.wrapped.values() for buffer in chunk.buffers_of(trained)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The complete parameter groups: every number that a rule reads, and a record of the rule's choices and hooks."""

    groups: ParamGroups
    rules: Mapping[str, Rule]  # with their hooks, by the groups' `optimizer`
    index_of: Mapping[ParamId, int]  # the group of each parameter
    rule_of: Mapping[ParamId, str]  # the name of the rule of each parameter

    @classmethod
    def of(cls, groups: ParamGroups, rules: Mapping[str, Rule]) -> "Groups":
        """Index groups by their parameters."""
        index_of = {id: index for index, group in enumerate(groups) for id in group["param_ids"]}
        rule_of = {id: groups[index]["optimizer"] for id, index in index_of.items()}
        return cls(groups=groups, rules=rules, index_of=index_of, rule_of=rule_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """All that memory is allocated from."""

    request: Request
    model: Model
    groups: Groups
    plan: Plan

    @property
    def config(self) -> OptimizerConfig:
        """The configuration that was asked for."""
        return self.request.config

    @property
    def roles(self) -> Roles:
        """The groups of ranks."""
        return self.request.roles

    @property
    def params(self) -> Params:
        """The trainable parameters of this rank."""
        return self.model.params

    @property
    def metas(self) -> Metas:
        """What is known of the parameters."""
        return self.model.metas

    @property
    def wrapped_buffers(self) -> list[SyncedBuffer]:
        """The buffers of wrapped chunks that hold any parameter of the groups."""
        return self.model.wrapped_buffers(self.groups.rule_of.keys())

    def axes_of(self, planned: BufferPlan | UnitPlan) -> Axes:
        """Return the groups of ranks over which the parameters of a buffer or unit are distributed."""
        return self.roles.expert if planned.is_expert else self.roles.dense


def read_model(request: Request) -> Model:
    """Describe the modules of this rank. Raises ConfigError for attributes that contradict each other."""
    chunks = request.chunks
    wrappers = [chunk for chunk in chunks if has_main_grads(chunk)]
    shards = any(chunk.ddp_config.use_distributed_optimizer for chunk in wrappers)  # type: ignore[union-attr]
    # Megatron-Core's wrapper has a list in place of the method `buffers`.
    tensors = (tensor for chunk in chunks for tensor in (*chunk.parameters(), *nn.Module.buffers(chunk)))
    device = next((tensor.device for tensor in tensors), None)
    shards_reduced = isinstance(request.config.sharding, WholeParams) and bool(wrappers) and not shards
    metas = describe_stored(chunks, by_name=request.by_name)
    wrapped = {at: chunk for at, chunk in enumerate(chunks) if isinstance(chunk, DistributedDataParallel)}
    return Model(
        params=parameters_by_id(chunks),
        metas=metas,
        wrapped=wrapped,
        shards_reduced=shards_reduced,
        qk_layernorm=any(map(uses_qk_layernorm, chunks)),
        device=device,
    )


_MEGATRON = "megatron.core.distributed.distributed_data_parallel"


def is_megatron_wrapper(chunk: nn.Module) -> bool:
    """Return whether a chunk is Megatron-Core's wrapper. Megatron-Core is not imported."""
    return any(cls.__module__ == _MEGATRON and cls.__name__ == "DistributedDataParallel" for cls in type(chunk).__mro__)


def has_main_grads(chunk: nn.Module) -> bool:
    """Return whether a chunk is in a wrapper that reduces gradients in `main_grad`."""
    return isinstance(chunk, DistributedDataParallel) or is_megatron_wrapper(chunk)


# --- the plan ---------------------------------------------------------------------------------------------------------


def make_plan(request: Request, model: Model, groups: Groups, sizes: WorldSizes) -> Plan:
    """Plan the buffers and units of the groups' parameters.

    Raises:
        ConfigError, LayoutError: see `plan_compute` and `torch_host_rule`.
    """
    config = request.config
    rule_of = groups.rule_of
    wrapped = model.wrapped_buffers(rule_of.keys())
    in_wrapper = {id for buffer in wrapped for id in buffer.params}
    plain = {id: meta for id, meta in model.metas.items() if id in rule_of and id not in in_wrapper}
    # A block of a state has one scale, so a shard boundary must not cut it.
    blocks = [spec.block for rule in groups.rules.values() for spec in rule.state_specs if spec.block]

    def needs_whole(meta: ParamMeta) -> bool:
        return groups.rules[rule_of[meta.id]].needs is Needs.MATRICES

    def grad_dtype(meta: ParamMeta) -> torch.dtype:
        return config.precision.grads if meta.dtype is torch.bfloat16 else torch.float32

    own = plan_buffers(
        plain,
        sharding=config.sharding,
        sizes=sizes,
        needs_whole=needs_whole,
        grad_dtype=grad_dtype,
        bucket_size=lambda numel: default_bucket_size(sizes.dense),
        shard_multiple=lcm(CODED_MULTIPLE, *blocks),
    )
    buffers = (*(buffer.plan for buffer in wrapped), *own)
    placement = config.placement
    hosted: dict[str, Hosted] = {}
    if not isinstance(placement, OnDevice):
        hosted = {buffer.name: tuple(_hosted(buffer, model.metas, placement.fraction)) for buffer in buffers}
    norms = tuple("" if group.get("clip_grad", True) else group["optimizer"] for group in groups.groups)
    units = tuple(_plan_units(config, model.metas, groups, buffers, sizes))
    return Plan(config=config, norms=norms, buffers=buffers, units=units, hosted=hosted)


def _plan_units(
    config: OptimizerConfig,
    metas: Metas,
    groups: Groups,
    buffers: Sequence[BufferPlan],
    sizes: WorldSizes,
) -> Iterator[UnitPlan]:
    """Plan one unit for each (rule, family), in order of first appearance; experts last: they use other groups.

    Of several model chunks, later ones are separate units if the first is stepped and gathered before them.
    """
    rule_of = groups.rule_of
    first = min((id.chunk for id in rule_of), default=0)
    found: dict[tuple[bool, bool, str], list[ParamId]] = {}
    for id, meta in metas.items():
        if id in rule_of:
            is_later = config.overlap_param_gather_with_optimizer_step and id.chunk != first
            found.setdefault((is_later, meta.is_expert, rule_of[id]), []).append(id)
    shard_of: dict[ParamId, int] = {}  # of each parameter that is assigned whole to one
    for buffer in buffers if max(sizes.dense_tp, sizes.expert_tp) > 1 else ():
        if buffer.kind.assigns_whole:
            for shard in range(buffer.layout.num_shards):
                shard_of.update((piece.id, shard) for _, piece in buffer.layout.owned(shard))
    averages = WeightAverages(config) if config.averaged else NO_AVERAGES
    for (is_later, is_expert, name), ids in sorted(found.items(), key=lambda item: item[0][:2]):
        rule = groups.rules[name]
        dtypes = {metas[id].stored_dtype for id in ids}
        unit_name = f"{name}{'/later chunks' * is_later}{'/experts' * is_expert}"
        unit = UnitPlan(
            name=unit_name,
            rule=rule,
            is_expert=is_expert,
            ids=frozenset(ids),
            numbers={dtype: main_format(config, dtype) for dtype in dtypes},
            averages=averages,
        )
        if unit.needs_matrices:  # the rows that form several matrices, and the ranks that compute each
            placed = [metas[id] for _, id in unit.placed(buffers)]
            is_soap = isinstance(bare(rule), SOAPRule | SOAPMuonRule)
            split_qkv = config.soap_split_qkv if is_soap else config.muon_split_qkv
            splits = split_rows(placed, split_qkv=split_qkv)
            tensor_parallel = sizes.expert_tp if is_expert else sizes.dense_tp
            compute = plan_compute(bare(rule), placed, tensor_parallel=tensor_parallel, team_of=shard_of, splits=splits)
            whole_qkv = len(split_rows(placed, split_qkv=True)) - len(splits) if is_soap else 0
            finds_no_qkv = split_qkv and not is_expert and not any(meta.qkv_split_shapes for meta in placed)
            unit = replace(unit, splits=splits, compute=compute, whole_qkv=whole_qkv, finds_no_qkv=finds_no_qkv)
        if config.use_torch_optimizer_for_cpu_offload:
            unit = replace(unit, host_rule=torch_host_rule(rule, config))
        yield unit


def main_format(config: OptimizerConfig, dtype: torch.dtype) -> MainFormat:
    """Return how the main values of parameters of `dtype` are kept."""
    if dtype == torch.float32:
        return MainFormat.PARAM
    if dtype == torch.bfloat16 and config.precision.remainder:
        return MainFormat.REMAINDER
    if dtype == torch.bfloat16 and config.precision.mains is torch.int8:
        return MainFormat.SHORT_REMAINDER
    return MainFormat.FP16_SCALED if config.precision.mains is torch.float16 else MainFormat.FP32_COPY


def _hosted(buffer: BufferPlan, metas: Metas, fraction: float) -> Iterator[frozenset[ParamId]]:
    """Yield the parameters of each shard whose pieces live on the host.

    Each shard keeps its first pieces on the host, in the order of the layout, until they hold the fraction of its
    elements: at most one piece too many, as in Megatron-Core. DTensors are counted by their whole shapes, because ranks
    that store parts of one matrix must make the same decision.
    """
    is_laid_out = buffer.kind is PRE_SHARDED
    for shard in range(1 if is_laid_out else buffer.layout.num_shards):
        owned = [piece for _, piece in buffer.owned(shard)]
        runs = [(piece.id, prod(metas[piece.id].shape) if is_laid_out else piece.numel) for piece in owned]
        wanted = fraction * sum(numel for _, numel in runs)
        before = accumulate((numel for _, numel in runs), initial=0)
        yield frozenset(id for (id, _), reached in zip(runs, before) if reached < wanted)
