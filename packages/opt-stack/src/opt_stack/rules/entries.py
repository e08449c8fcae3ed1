"""Entries of parameter groups: the caller's, those that rules read and record, and those of loaded groups."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from opt_config import AVERAGED, ConfigError, OptimizerConfig
from opt_distributed.buffers import Metas, Params
from opt_kernels.formulas import Formula, NumberError
from opt_kernels.hooks import (
    GivenHooks,
    HookError,
    Hyperball,
    bare,
    check_numbers,
    check_unread,
    described,
    hooked,
    hooks_of,
)
from opt_kernels.matrices import TpMode
from opt_kernels.params import CHOICES, HELD, HOOKS, Group
from opt_kernels.rules import ElementwiseRule, NamedChoice, Rule
from opt_paramgroups import ParamGroup, ParamId, completed_group
from opt_paramgroups.overrides import OVERRIDE_KEYS, unknown_entry, value_problem
from opt_stack.rules.built_in import HYPER_KEYS
from opt_stack.wording import logger

RULE_RECORDS = (HOOKS, CHOICES)  # entries that record how its rule was built
NOT_LOADED = (*RULE_RECORDS, *AVERAGED)
"""Entries of saved groups that a load does not write: rules and averages of weights are those of the present run."""
ParamGroups = Sequence[Group]
Pair = tuple[Group, Group]  # a current group and a saved one
_DECAYS = ("weight_decay", "start_wd", "end_wd")
_SCHEDULED = ("lr", "weight_decay", "initial_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale")
"""Written or read by torch's, timm's and our schedulers."""
_FLAGS_OF_TORCH = ("amsgrad", "maximize", "nesterov")
_DEFAULT_DECAY: float = OptimizerConfig().weight_decay
_COMMON = {*HELD, "name", "is_expert_parallel", "default_config", CHOICES, *_SCHEDULED, *OVERRIDE_KEYS} - {*HYPER_KEYS}
_NEUTRAL: dict[str, tuple[object, ...]] = {"dampening": (0,)}
_NEUTRAL |= dict.fromkeys(("foreach", "fused", "capturable"), (None, False, True))
_NEUTRAL |= dict.fromkeys(("amsgrad", "maximize", "differentiable", "nesterov"), (False,))
"""Entries of the groups of torch's optimizers, with the values that have no effect."""


# --- the caller's groups ----------------------------------------------------------------------------------------------


def complete_groups(
    param_groups: ParamGroups,
    config: OptimizerConfig,
    params: Params,
    metas: Metas,
) -> list[ParamGroup]:
    """Return new groups with every entry of `get_param_groups`: the caller's value, else the configuration's.
    Parameters of the model that are in no group are not trained.

    Raises:
        ConfigError: a group is not a dict with `params`; a parameter is in two groups, or is not a trainable parameter
            of the model; a group mixes dense parameters and experts; two groups have the same name.
    """
    ids = {id(param): param_id for param_id, param in params.items()}
    names: dict[ParamId, str] = {}  # of the group that has the parameter
    groups: list[ParamGroup] = []
    for number, given_group in enumerate(param_groups):
        if not isinstance(given_group, Mapping) or given_group.get("params") is None:
            raise ConfigError(f"param_groups[{number}] is {type(given_group).__name__}; must be a dict with 'params'")
        given = {key: value for key, value in given_group.items() if value is not None or key not in _COMMON}
        name = given.get("name", f"group {number}")
        params_given = given["params"]
        group_params = [params_given] if isinstance(params_given, Tensor) else list(params_given)
        for param in group_params:
            if id(param) not in ids:
                shown = f"{param!r}"
                frozen = ""
                if isinstance(param, Tensor):
                    shown = f"of shape {tuple(param.shape)}"
                    frozen = "" if param.requires_grad else ", which is frozen"
                raise ConfigError(
                    f"group {name!r} has a parameter {shown}{frozen}: it is not a trainable parameter of model_chunks; "
                    "leave it out"
                )
            if (param_id := ids[id(param)]) in names:
                raise ConfigError(
                    f"parameter {str(param_id)!r} is in group {names[param_id]!r} and in {name!r}; it must be in one"
                )
            names[param_id] = name
        for key, value in given.items():
            problem = "" if value is None or isinstance(value, Tensor) or key in HELD else value_problem(key, value)
            if problem:
                raise ConfigError(f"param_groups: group {name!r}: {key}={value!r}: {problem}")
        if given.get("lr_mult", 1.0) != 1.0 and "lr" in given and "max_lr" not in given:
            raise ConfigError(
                f"param_groups: group {name!r} has lr={given['lr']!r} and lr_mult={given['lr_mult']!r}, but lr may "
                "or may not include lr_mult; set lr alone, or lr_mult alone to multiply the configuration's lr"
            )
        param_ids = [ids[id(param)] for param in group_params]
        are_experts = {metas[param_id].is_expert for param_id in param_ids}
        if len(are_experts) > 1:
            raise ConfigError(f"group {name!r} mixes experts (allreduce=False) and dense parameters; make two groups")
        is_expert = are_experts.pop() if are_experts else bool(given.get("is_expert_parallel", False))
        if any(name == group["name"] for group in groups):
            raise ConfigError(
                f"param_groups: two groups have name={name!r}; names must be unique: checkpoints find groups by name"
            )
        known = {"name": name, "params": group_params, "param_ids": param_ids, "is_expert_parallel": is_expert}
        groups.append(completed_group({**given, **known}, config))
    return groups


# --- the rules of groups ----------------------------------------------------------------------------------------------


def hooked_rules(rules: Mapping[str, Rule], hooks: GivenHooks) -> dict[str, Rule]:
    """Return the rules with their hooks. Raises ConfigError for hooks of no rule, or that do not fit their rule."""
    given = hooks if isinstance(hooks, Mapping) else dict.fromkeys(rules, hooks)
    if unused := [name for name, of_rule in given.items() if name not in rules and of_rule]:
        raise ConfigError(f"hooks has {unused[0]!r}, but parameters are updated by {', '.join(rules)}; use these names")
    try:
        return {name: hooked(rule, given.get(name, ())) for name, rule in rules.items()}
    except HookError as error:
        raise ConfigError(f"hooks: {error}") from error


def with_rule_entries(
    given_groups: ParamGroups,
    rules: Mapping[str, Rule],  # with their hooks
    numbers: Mapping[str, Mapping[str, Any]],  # that each rule reads, with their initial values
    config: OptimizerConfig,
    extra_group_keys: Collection[str],
) -> list[ParamGroup]:
    """Return the groups with the numbers that they lack, and a record of the choices and hooks of their rules.

    Raises:
        ConfigError: a group has an entry that nothing reads, a number that is out of bounds, or weight decay that its
            rule or hooks ignore.
    """
    groups = [dict(group) for group in given_groups]
    _check_entries(groups, numbers, config, extra_group_keys)
    for group in groups:
        group |= {**numbers[group["optimizer"]], **group}
        rule = rules[group["optimizer"]]
        check_bounds(group, rule)
        hooks = hooks_of(rule)
        for key in _DECAYS:
            decay = group.get(key) or 0.0
            if decay and any(isinstance(hook, Hyperball) for hook in hooks):
                raise ConfigError(
                    f"group {group['name']!r} has {key}={decay}, but Hyperball() fixes the norm of the weights "
                    "instead of decaying them; set weight_decay=0.0"
                )
            try:  # the default of OptimizerConfig.weight_decay is accepted, even if the rule ignores it
                check_unread(rule, {**group, "weight_decay": 0.0 if decay == _DEFAULT_DECAY else decay})
            except NumberError as error:
                named = f"{error}".replace("weight_decay=", f"{key}=", 1)
                raise ConfigError(f"group {group['name']!r}: {named}") from None
        choices = {**choices_of(rule), **_choices_of_averages(config)}
        group[CHOICES] = tuple(f"{name}={value!r}" for name, value in sorted(choices.items()))
        if hooks:
            group[HOOKS] = described(hooks)
    return groups


def _check_entries(
    groups: ParamGroups,
    read_by: Mapping[str, Collection[str]],  # the hyper-parameters that each rule reads
    config: OptimizerConfig,
    extra_group_keys: Collection[str],
) -> None:
    """Raise ConfigError naming every entry of `groups` that no scheduler, rule or this package reads.

    One override may cover parameters of several rules: an entry that one of them reads is allowed in all groups.
    """
    used = {key for group in groups for key in group if key in read_by[group["optimizer"]]}
    problems = []
    for group in groups:
        reads = sorted(read_by[group["optimizer"]])
        for key, value in group.items():
            if key in _COMMON or key in used or key in extra_group_keys or key.startswith("initial_"):
                continue
            if key == "decoupled_weight_decay":
                is_neutral = value is config.decoupled_weight_decay
            else:
                is_neutral = value in _NEUTRAL.get(key, ())
            if is_neutral:
                continue
            optimizer = f"optimizer {group['optimizer']!r}"
            if key in HYPER_KEYS:
                reason = f"{optimizer} does not read it; it reads {', '.join(('lr', 'weight_decay', *reads))}"
            elif key in _NEUTRAL:
                allowed = " or ".join(map(repr, _NEUTRAL[key]))
                reason = f"not supported by {optimizer}; {allowed} is allowed. Drop the entry, or use torch_rule"
            else:
                reason = unknown_entry(key, {*OVERRIDE_KEYS} - {*HYPER_KEYS} | {*reads})
            problems.append(f"group {group['name']!r}: {key}={value!r}: {reason}")
    if problems:
        raise ConfigError("\n".join(problems))


def check_bounds(group: Group, rule: Rule | None) -> None:
    """Raise ConfigError if a hyper-parameter of a group is out of the bounds of its rule. lr may be None."""
    try:
        check_numbers(rule, {name: value for name, value in group.items() if value is not None})
    except NumberError as error:
        raise ConfigError(f"group {group['name']!r}: {error}") from None


# --- choices of rules: recorded in groups, and compared with those that a loaded state was saved with -----------------
#
# Structure that no number of a group shows, such as `maximize`, the choices of a formula, or Muon's `scale_mode`. State
# may mean something else under another choice of a formula, so it is refused. The options of a matrix rule change how
# its state is used, not what it means: a load with other options logs a warning.

_PRECISION_OPTIONS = ("backend", "fp32_matmul_prec", "use_syrk")  # options that change only rounding and speed
_OF_AVERAGES = ("ema_decay_by_schedule", "ema_from_step", "ema_nesterov_gamma")  # recorded beside choices of rules
TP_MODE = "tp_mode"  # recorded only where tensor parallelism cuts a matrix of the rule


def choices_of(rule: Rule) -> dict[str, Any]:
    """Return the choices of a rule, without its hooks: those of its formula, or the plain fields of its dataclass.

    Not the tensor-parallel mode, which has an effect only where matrices are cut: `planning.ranks` records it there.
    """
    rule = bare(rule)
    if isinstance(rule, ElementwiseRule):
        return {**_recorded(rule), "maximize": rule.maximize}
    return dict(_options(rule))


def _choices_of_averages(config: OptimizerConfig) -> dict[str, Any]:
    """Return what groups record of averages of weights, besides their numbers."""
    choices: dict[str, Any] = {}
    if config.ema_decay is not None:
        choices |= {"ema_decay_by_schedule": callable(config.ema_decay), "ema_from_step": config.ema_from_step}
    if config.ema_nesterov_beta is not None:
        choices["ema_nesterov_gamma"] = config.ema_nesterov_gamma
    return choices


def evaluation_of(rule: Rule) -> Formula | None:
    """Return the formula of a rule that evaluates other weights than it trains (schedule_free), else None."""
    inner = bare(rule)
    if isinstance(inner, ElementwiseRule) and inner.formula.evaluation is not None:
        return inner.formula
    return None


def _recorded(rule: ElementwiseRule) -> dict[str, Any]:
    """Return the choices of the rule's formula that groups record."""
    constants = dict(rule.formula.constants)
    return {choice.name: constants[choice.name] for choice in rule.formula.choices if choice.is_recorded}


def _options(rule: object) -> Iterator[tuple[str, Any]]:
    """Yield the options of a rule and of the rules among its fields, if their values read the same on every rank."""
    for field in dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ():
        value = getattr(rule, field.name, None)
        if dataclasses.is_dataclass(value):
            yield from _options(value)
        elif field.init and field.compare and field.name not in (*_PRECISION_OPTIONS, TP_MODE) and _is_plain(value):
            yield field.name, value.value if isinstance(value, NamedChoice) else value


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, bool | int | float | str)


def check_choices(group: Group, saved: Group, rules: Mapping[str, Rule]) -> None:
    """Raise ConfigError if `saved` was saved under another choice of the formula that updates `group`, or with whole
    matrices where tensor-parallel blocks are updated now, or the reverse.

    A group without a record passes: older versions and other optimizers write none. `rules` are those of this rank.
    """
    is_elementwise = isinstance(rules.get(group["optimizer"]), ElementwiseRule)
    for name, before, after in _differences(group, saved):
        if name == TP_MODE and repr(TpMode.BLOCKWISE.value) in (before, after):
            raise ConfigError(
                f"group {group['name']!r} was saved with muon_tp_mode={before}, but has muon_tp_mode={after}, by which "
                f"tensor-parallel matrices get other updates; set muon_tp_mode={before}, or delete {CHOICES!r} from "
                f"the saved groups to continue with {after}"
            )
        if is_elementwise and name not in _OF_AVERAGES:
            raise ConfigError(
                f"group {group['name']!r} was saved with {name}={before}, but optimizer {group['optimizer']!r} has "
                f"{name}={after}, for which state may mean something else; build it with the saved choice, or delete "
                f"{CHOICES!r} from the saved groups to continue from that state"
            )


def warn_of_other_choices(group: Group, saved: Group) -> None:
    """Log a warning for each hook, option of the rule and number of averages that differs from those `saved` was saved
    with."""
    before = tuple(saved.get(HOOKS, ()))
    after = tuple(group.get(HOOKS, ()))
    if before != after:
        logger.warning(
            "group %r continues with hooks %s, but was saved with %s",
            group["name"], ", ".join(after) or "none", ", ".join(before) or "none",
        )  # fmt: skip
    changed = [name for name in AVERAGED if name in saved and saved[name] != group.get(name)]
    averages = [(name, saved[name], group.get(name)) for name in changed]
    for name, was, now in (*_differences(group, saved), *averages):
        logger.warning("group %r continues with %s=%s, but was saved with %s=%s", group["name"], name, now, name, was)


def _differences(group: Group, saved: Group) -> Iterator[tuple[str, str, str]]:
    """Yield the names of choices that both groups record, with the saved and the present value where they differ.
    Groups of different rules do not differ in this sense."""
    if saved.get("optimizer", group["optimizer"]) != group["optimizer"]:
        return
    before = _choice_texts(saved)
    after = _choice_texts(group)
    for name in sorted(before.keys() & after.keys()):  # in one order on all ranks
        if before[name] != after[name]:
            yield name, before[name], after[name]


def _choice_texts(group: Group) -> dict[str, str]:
    """Return the value of each choice that a group records."""
    parts = (str(text).partition("=") for text in group.get(CHOICES) or ())
    return {name: value for name, _, value in parts}


# --- numbers of loaded groups -----------------------------------------------------------------------------------------


def check_loaded_numbers(loaded: Iterable[Pair], rules: Mapping[str, Rule]) -> None:
    """Raise ConfigError if a hyper-parameter of a loaded group is not valid, or if flags of torch's optimizer, or
    choices of a drop-in, were saved as entries of the group, and the rule has others.

    `loaded` are pairs (group, saved group), `rules` those of this rank, by the groups' `optimizer`; elementwise rules
    define their own bounds.
    """
    for group, saved in loaded:
        name = group["name"]
        rule = rules.get(group["optimizer"])
        check_bounds({**{key: saved[key] for key in saved if key in group}, "name": name}, rule)
        if rule is None:
            continue
        choices: dict[str, Any] = {}
        recorded: dict[str, Any] = {}
        if isinstance(rule, ElementwiseRule):
            choices = dict(rule.formula.constants)
            recorded = _recorded(rule)
        flags = {flag: bool(choices.get(flag, getattr(rule, flag, False))) for flag in _FLAGS_OF_TORCH}
        for flag, own in {**flags, **recorded}.items():
            value = saved.get(flag, own)
            compared = bool(value) if isinstance(own, bool) else value
            if compared != own:
                raise ConfigError(
                    f"group {name!r} was saved with {flag}={value!r}, but optimizer {rule.name!r} has {own}; "
                    "build it with the saved option, or set it in the state dict to continue without it"
                )
