"""`get_optimizer`: from a configuration and a model to an optimizer, with the same verdict on every rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey, Replicated
from opt_distributed.comm.collectives import agree
from opt_distributed.comm.groups import ProcessGroups, Roles, roles_of
from opt_kernels.rules.base import Needs
from opt_paramgroups import (
    describe,
    get_matrix_rule_overrides,
    get_param_groups,
    get_standard_config_overrides,
    parameters_by_id,
)
from opt_scheduler.override import ParamGroupOverride
from opt_stack.build import Model, build_stepper, group_index
from opt_stack.optimizer import Optimizer
from opt_stack.plan import Plan
from opt_stack.planner import WorldSizes, make_plan
from opt_stack.registry import Registry
from opt_stack.wrapped import check_wrapped, wrapped_buffers

Overrides = Mapping[ParamKey, ParamGroupOverride | OptimizerConfig]


def get_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: Overrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroups | None = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    rules: Registry | None = None,
) -> Optimizer:
    """The optimizer of a model: its parameters grouped, its step planned and built.

    Args:
        config: what is common to all parameters.
        model_chunks: the model, or its virtual pipeline stages. Plain modules, or wrapped in `DistributedDataParallel`.
        config_overrides: what differs for some parameters, by key. None: the standard ones (no weight decay on vectors, ...);
            {}: none at all.
        use_gloo_process_groups: kept for the reference's callers; one set of groups serves everything here.
        pg_collection: process groups by role. None: all of `torch.distributed`'s world is data parallel, or, where it is not
            initialised, this process is alone.
        dump_param_to_param_group_map: where to write which parameter is in which group.
        rules: optimizers by name; None: ours and those of installed packages.

    Raises:
        ConfigError (a ValueError), on every rank: whatever cannot be built, with the field, its value and what is allowed.
    """
    roles = roles_of(pg_collection, sharded=_is_sharded(config))
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    groups, plan = _agreed_plan(config, chunks, config_overrides, roles, rules or Registry().with_installed())
    model = Model(params=parameters_by_id(chunks), metas=describe(chunks), group_of=group_index(groups))
    stepper = build_stepper(plan, model, roles, sources={ready.plan.name: ready.source for ready in wrapped_buffers(chunks)})
    return Optimizer(plan=plan, stepper=stepper, groups=groups, layout_id=plan.layout_id(roles.dense.dp.rank), everyone=roles.everyone)


get_megatron_optimizer = get_optimizer  # the reference's name


def list_optimizers(rules: Registry | None = None) -> list[str]:
    """The names that `OptimizerConfig.optimizer` may take."""
    return list((rules or Registry().with_installed()).entries)


def describe_optimizer(name: str, rules: Registry | None = None) -> str:
    """One line on an optimizer: what it is, the state it keeps, what it needs.

    Raises:
        ConfigError: no optimizer has that name.
    """
    entry = (rules or Registry().with_installed())[name]
    rule = entry.make(OptimizerConfig(optimizer=name))
    state = ", ".join(spec.name for spec in rule.state_specs) or "nothing"
    return f"{name}: {entry.summary}. State: {state}. Needs {rule.needs.name.lower()}."


def _agreed_plan(
    config: OptimizerConfig, chunks: Sequence[nn.Module], overrides: Overrides | None, roles: Roles, rules: Registry
) -> tuple[list[dict[str, Any]], Plan]:
    """Groups and plan; an error of one rank is every rank's."""
    overrides = _with_matrix_rule(config, overrides, rules)
    groups = get_param_groups(chunks, config, overrides, gather=roles.everyone.gather_objects)
    metas = describe(chunks)
    error: Exception | None = None
    try:
        _fill_hyper(groups, config, rules)
        made = {name: rules[name].make(config) for name in {group["optimizer"] for group in groups}}
        sizes = WorldSizes(dense=roles.dense.dp.size, expert=roles.expert.dp.size)
        check_wrapped(config, chunks)
        ready = [buffer.plan for buffer in wrapped_buffers(chunks)]
        plan = make_plan(config, metas, groups, made, sizes=sizes, ready_buffers=ready)
    except ValueError as caught:
        error = caught
    agree(roles.everyone, error)
    _check_peers(plan, roles, num_params=len(metas))
    return groups, plan


def _with_matrix_rule(config: OptimizerConfig, overrides: Overrides | None, rules: Registry) -> Overrides | None:
    """`overrides`, and where the rule needs matrices what leaves all other parameters to an elementwise one."""
    if config.optimizer not in rules.entries or rules[config.optimizer].make(config).needs is not Needs.MATRICES:
        return overrides  # an unknown optimizer is refused where all ranks hear of it
    ours = get_standard_config_overrides(config) if overrides is None else overrides
    return {**ours, **get_matrix_rule_overrides(config)}


def _fill_hyper(groups: Sequence[dict[str, Any]], config: OptimizerConfig, rules: Registry) -> None:
    """Writes into every group what its rule reads and the group does not say itself."""
    for group in groups:
        for key, value in rules[group["optimizer"]].hyper(config).items():
            group.setdefault(key, value)


def _check_peers(plan: Plan, roles: Roles, *, num_params: int) -> None:
    """What only all ranks together can see: somebody has parameters, and replicas planned alike."""
    if sum(roles.everyone.gather_objects(num_params)) == 0:
        raise ConfigError("model_chunks hold no trainable parameter on any rank; at least one needs requires_grad=True")
    fingerprints = roles.dense.dp.gather_objects(plan.fingerprint())
    others = [rank for rank, print_ in enumerate(fingerprints) if print_ != fingerprints[0]]
    if others:
        raise ConfigError(
            f"data-parallel ranks {others} planned another step than rank 0: config, overrides and model must be equal "
            "on all ranks that share parameters"
        )


def _is_sharded(config: OptimizerConfig) -> bool:
    return not isinstance(config.sharding, Replicated)
