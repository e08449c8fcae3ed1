"""`Draft`: all that an optimizer is built from, as one value that every check reads."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from opt_config import OptimizerConfig, ParamKey
from opt_distributed.buffers import (
    BufferPlan,
    DistributedDataParallel,
    SyncedBuffer,
    WorldSizes,
    describe_stored,
    uses_qk_layernorm,
)
from opt_distributed.comm import Alone, Axes, Roles
from opt_kernels.hooks import GivenHooks
from opt_kernels.rules import Rule
from opt_paramgroups import ParamId, ParamMeta, parameters_by_id
from opt_scheduler import ParamGroupOverride
from opt_stack.planning.plan import Plan
from opt_stack.rules.registry import Registry

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
    sizes: WorldSizes | None = None  # None: those of `roles`
    hooks: GivenHooks = ()
    extra_group_keys: Collection[str] = ()
    broadcast_params: bool = False
    overrides: Overrides | None = None  # for `get_optimizer`: None if there are only the standard ones
    groups: Groups = field(default_factory=list)
    rules: Mapping[str, Rule] = field(default_factory=dict)  # with their hooks, by the groups' `optimizer`
    plan: Plan = field(init=False)

    @property
    def world(self) -> WorldSizes:
        """The sizes of the groups that the plan is made for."""
        return self.sizes or WorldSizes.of(self.roles)

    @cached_property
    def params(self) -> Mapping[ParamId, nn.Parameter]:
        """The trainable parameters of the model."""
        return parameters_by_id(self.chunks)

    @cached_property
    def metas(self) -> Mapping[ParamId, ParamMeta]:
        """The descriptions of `params`."""
        return describe_stored(self.chunks)

    def axes_of(self, buffer: BufferPlan) -> Axes:
        """The groups over which the parameters of a buffer are distributed."""
        return self.roles.expert if buffer.is_expert else self.roles.dense

    @cached_property
    def rule_of(self) -> dict[ParamId, str]:
        """The name of the rule of each parameter in a group; read once the groups are complete."""
        return {id: group["optimizer"] for group in self.groups for id in group["param_ids"]}

    @cached_property
    def group_of(self) -> dict[ParamId, int]:
        """The index of the group of each parameter; read once the groups are complete."""
        return {id: index for index, group in enumerate(self.groups) for id in group["param_ids"]}

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
