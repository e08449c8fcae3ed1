"""`get_optimizer`: build the optimizer of a model from a configuration; errors are the same on every rank."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from opt_config import ConfigError, OptimizerConfig, Replicated
from opt_distributed.buffers import (
    DistributedDataParallel,
    WorldSizes,
    broadcast_replicas_,
    check_replicas,
    check_untrained,
    share_launch_order,
)
from opt_distributed.comm import Given, agreed, find_roles
from opt_kernels.hooks import GivenHooks
from opt_paramgroups import (
    ParamGroup,
    get_param_groups,
)
from opt_paramgroups.overrides import ConfigOverrides
from opt_stack.building.parts import build_parts, build_stepper, holds_parts, model_part
from opt_stack.diagnosis.recorder import Recorder
from opt_stack.diagnosis.tensor_stats import TensorSums
from opt_stack.optimizer import Optimizer
from opt_stack.planning.checks import CHECKS, CHECKS_HERE, SHARED_FIELDS, refuse
from opt_stack.planning.design import Design, Groups, Model, ModelChunks, Request, make_plan, read_model
from opt_stack.planning.ranks import (
    RANK_CHECKS,
    check_peers,
    check_ranks,
    check_same_config,
    common_device,
    record_tp_modes,
    tp_modes,
)
from opt_stack.records import record_design, write_group_map
from opt_stack.rules.entries import ParamGroups, complete_groups, hooked_rules, with_rule_entries
from opt_stack.rules.registry import Registry, with_matrix_rule
from opt_stack.state.live import SharedCopies


def get_optimizer(
    config: OptimizerConfig,
    model_chunks: nn.Module | ModelChunks,
    config_overrides: ConfigOverrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Given = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    mesh: DeviceMesh | None = None,
    broadcast_params: bool = False,
    rules: Registry | None = None,
    hooks: GivenHooks = (),
    allow_unmatched: bool = False,
    extra_group_keys: Collection[str] = (),
) -> Optimizer:
    """Build the optimizer of a model: group its parameters, plan the step, allocate the state.

    >>> import torch
    >>> from opt_stack import OptimizerConfig, get_optimizer
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 2))
    >>> config = OptimizerConfig(optimizer="muon", lr=3e-3, muon_scale_mode="match_rms_adamw")
    >>> optimizer = get_optimizer(config, [model])
    >>> model(torch.ones(4, 8)).square().mean().backward()
    >>> optimizer.step().success
    True
    >>> [group["optimizer"] for group in optimizer.param_groups]
    ['muon', 'adam']

    Args:
        config: the settings that all parameters share.
        model_chunks: the model, or its virtual pipeline stages. Plain modules, or wrapped in `DistributedDataParallel`.
        config_overrides: the settings that differ for some parameters, by key. None: the standard overrides (no weight
            decay on vectors, ...), which others replace, with a warning if vectors are decayed then; {}: no overrides.
        use_gloo_process_groups: accepted for Megatron-Core's callers and ignored: no separate gloo groups are needed.
        pg_collection: process groups by role (`ProcessGroups`, Megatron-Core's `ProcessGroupCollection`, or `Roles`).
            None: the groups that a chunk was wrapped with; else those of Megatron-Core's initialised `parallel_state`,
            or of the mesh of DTensor parameters; else all ranks that hold parameters are data parallel. Under torchrun,
            `torch.distributed` is initialised if the script has not done so.
        mesh: a `DeviceMesh` over the whole world in place of `pg_collection`. Its axis names are among dp,
            dp_replicate, dp_shard, cp, ep, tp and pp.
        broadcast_params: copy the first rank's values to all replicas of a parameter or persistent buffer, trained or
            not. False: compare the values of replicas, and raise if they differ.
        dump_param_to_param_group_map: path to which rank 0 writes the group of every parameter, as a
            torch.distributed.checkpoint directory and as PATH.json.
        rules: the optimizers to choose from, by name; None: the built-in ones and those of installed packages.
        hooks: hooks around the update (`opt_kernels.hooks`): a sequence for every rule, or a mapping by rule name. To
            give hooks to only some parameters of a rule, register a rule with these hooks in `rules`.
        allow_unmatched: accept overrides by name or attribute that match no parameter on any rank.
        extra_group_keys: names of group entries that overrides may set although no rule or scheduler reads them,
            for the caller's own code.

    Raises:
        ConfigError: on every rank, if the optimizer cannot be built. The message names the field, its value and what is
            allowed. A ValueError.
    """
    request = make_request(
        config,
        model_chunks,
        overrides=config_overrides,
        pg_collection=pg_collection,
        mesh=mesh,
        broadcast_params=broadcast_params,
        rules=rules,
        hooks=hooks,
        allow_unmatched=allow_unmatched,
        extra_group_keys=extra_group_keys,
    )
    return build_optimizer(request, dump_param_to_param_group_map)


def build_optimizer(request: Request, group_map: str | None, *, kind: type[Optimizer] = Optimizer) -> Optimizer:
    """Build an optimizer of any class; `group_map` is `get_optimizer`'s `dump_param_to_param_group_map`. Collective."""
    model, groups = read_groups(request, dumps_groups=group_map is not None)
    optimizer = _build(request, model, groups, kind=kind)
    if group_map is not None:
        write_group_map(group_map, groups, everyone=request.roles.everyone)
    return optimizer


get_megatron_optimizer = get_optimizer  # Megatron-Core's name


def get_optimizer_based_on_param_groups(
    config: OptimizerConfig,
    model_chunks: ModelChunks,
    param_groups: ParamGroups,
    *,
    pg_collection: Given = None,
    mesh: DeviceMesh | None = None,
    broadcast_params: bool = False,
    rules: Registry | None = None,
    hooks: GivenHooks = (),
    part: str = "",
    extra_group_keys: Collection[str] = (),
) -> Optimizer:
    """Build the optimizer of a model from the caller's parameter groups. Collective.

    Args:
        config: the settings that all parameters share, and the defaults for entries that a group does not have.
        model_chunks: as for `get_optimizer`; parameters are named after them.
        param_groups: groups as for torch's optimizers, or from `get_param_groups`; the same on all ranks. They are
            copied. Parameters of the model that are in no group are not trained. A group without "optimizer" has the
            configuration's rule: for Muon or SOAP, put embeddings, output layers, biases and vectors into groups with
            "optimizer": "adam". Embeddings and output layers in other groups are named in warnings.
        pg_collection, mesh, broadcast_params, rules, hooks: as for `get_optimizer`.
        extra_group_keys: as for `get_optimizer`, for entries of the groups.
        part: a name for this part of the model. A `state_dict` of another part is refused even if its shapes fit.

    Raises:
        ConfigError: on every rank, as `get_optimizer`, and for groups that do not fit the model. A ValueError.
    """
    given = list(param_groups)
    request = make_request(
        config,
        model_chunks,
        pg_collection=pg_collection,
        mesh=mesh,
        rules=rules,
        hooks=hooks,
        broadcast_params=broadcast_params,
        extra_group_keys=extra_group_keys,
        has_given_groups=not all(isinstance(group, Mapping) and "param_ids" in group for group in given),
    )

    def described() -> tuple[Model, list[ParamGroup]]:
        model = read_model(request)
        return model, complete_groups(given, request.config, model.params, model.metas)

    model, groups = agreed(request.roles.everyone, described)
    check_same_config(request)
    return _build(request, model, groups, part=part)


def read_groups(request: Request, *, dumps_groups: bool = False) -> tuple[Model, list[ParamGroup]]:
    """Return what is known of the model, and the groups of the parameters of all ranks, which must have the same
    configuration. Collective. `dumps_groups` is as for `check_same_config`. Raises ConfigError on every rank.
    """
    config = request.config
    everyone = request.roles.everyone

    def described() -> tuple[ConfigOverrides, Model]:
        overrides = with_matrix_rule(config, request.overrides, request.registry, by_name=request.by_name)
        return overrides, read_model(request)

    read, model = agreed(everyone, described)
    check_same_config(request, dumps_groups=dumps_groups)
    groups = get_param_groups(
        request.chunks,
        config,
        read,
        gather=everyone.gather_objects,
        metas=model.metas,
        allow_unmatched=request.allow_unmatched,
        extra_group_keys=None,  # `Registry.rules` knows the rules, and so which entries they read
    )
    return model, groups


def make_request(
    config: OptimizerConfig,
    model_chunks: nn.Module | ModelChunks,
    *,
    pg_collection: Given = None,
    mesh: DeviceMesh | None = None,
    rules: Registry | None = None,
    **options: Any,
) -> Request:
    """Return the request of a caller, with the groups of ranks: those that were passed, those of a wrapped chunk, or
    those of the parameters. Shared fields that wrapped chunks set and `config`, which is not modified, leaves at False
    are True in it. `options` are fields of `Request`.

    Raises ConfigError for arguments of other types, and for fields that do not fit those of a wrapped chunk.
    """
    if not isinstance(config, OptimizerConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}; pass opt_stack.OptimizerConfig(...) as the first argument (from a "
            "dict: OptimizerConfig.from_dict), and the model as the second"
        )
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise ConfigError(
                f"model_chunks holds a {type(chunk).__name__}; pass the model, or a list of its modules, not parameters"
            )
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    taken: dict[str, Any] = {
        name: True
        for name in SHARED_FIELDS
        if any(getattr(chunk.ddp_config, name) for chunk in wrapped) and not getattr(config, name)
    }
    if not isinstance(config.sharding, Replicated):  # layer-wise sharding needs no `use_distributed_optimizer`
        taken.pop("use_distributed_optimizer", None)
    config = replace(config, **taken) if taken else config
    if pg_collection is None and mesh is None and wrapped:
        pg_collection = wrapped[0].roles
    roles = find_roles(chunks, pg_collection, mesh=mesh, sharded=not isinstance(config.sharding, Replicated))
    registry = agreed(roles.everyone, lambda: rules or Registry().with_installed())
    return Request(config=config, chunks=tuple(chunks), registry=registry, roles=roles, **options)


def make_design(request: Request, model: Model, given_groups: ParamGroups, sizes: WorldSizes | None = None) -> Design:
    """Complete the groups, plan the step and run the checks that need no other rank. Builds nothing.

    `sizes` are those of another world that is planned for; None: this one.

    Raises:
        ConfigError: the combination is not supported.
    """
    config = request.config
    config.validate()  # fields may have been assigned since it was built
    names = dict.fromkeys(group["optimizer"] for group in given_groups)
    bare_rules, numbers = request.registry.rules(names, config)
    rules = hooked_rules(bare_rules, request.hooks)
    complete = with_rule_entries(given_groups, rules, numbers, config, request.extra_group_keys)
    groups = Groups.of(complete, rules)
    plan = make_plan(request, model, groups, sizes or WorldSizes.of(request.roles))
    design = Design(request=request, model=model, groups=groups, plan=plan)
    refuse(design, CHECKS if sizes is not None else (*CHECKS_HERE, *CHECKS))
    return design


def _build(
    request: Request,
    model: Model,
    given_groups: ParamGroups,
    *,
    part: str = "",
    kind: type[Optimizer] = Optimizer,
) -> Optimizer:
    """Build the optimizer of groups; both public functions end here. Collective."""
    config = request.config
    roles = request.roles
    params = model.params
    metas = model.metas
    everyone = roles.everyone
    design = agreed(everyone, lambda: make_design(request, model, given_groups))
    facts = check_ranks(design, RANK_CHECKS)
    design = replace(design, groups=record_tp_modes(design.groups, facts[tp_modes]))
    check_peers(design)
    if request.broadcast_params:
        broadcast_replicas_(params, metas, roles)
    check_replicas(params, metas, roles)
    check_untrained(request.chunks, roles, broadcast=request.broadcast_params)
    record_design(design)
    parts = agreed(everyone, lambda: build_parts(design, facts[common_device]))
    # torch refuses an empty list, but a rank without parameters is legal: it still joins every collective.
    groups = design.groups.groups or [{"params": [], "param_ids": [], "name": "stub"}]
    copies = SharedCopies(
        model=model, roles=roles, held=parts.held, scaler=parts.scaler, spikes=parts.spikes, loaded=parts.loaded
    )
    names = [str(group["name"]) for group in groups]
    make_sums = partial(
        TensorSums, parts.units, parts.families, names, order=list(params), roles=roles, device=parts.device
    )
    recorder = Recorder(config, roles, parts.device.is_asynchronous, make_sums)
    stepper = build_stepper(design, parts, groups, copies, recorder)
    if model.wrapped:
        share_launch_order(list(model.wrapped.values()))
    is_laid_out = any(meta.is_dtensor for meta in metas.values())  # then every rank may hold other shards
    layout_id = design.plan.layout_id(everyone.rank if is_laid_out else roles.dense.dp.rank)
    model_text, has_namesakes = model_part(metas, roles)
    return kind(
        design,
        parts,
        stepper,
        groups=groups,
        layout_id=", ".join(filter(None, (part, layout_id, model_text))),
        rank_local=has_namesakes or any(everyone.gather_objects(holds_parts(design))),
        copies=copies,
        recorder=recorder,
    )
