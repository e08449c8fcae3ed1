"""Parameter groups: validation of their options and hooks, and the groups of a state_dict."""

import copy
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

from torch import Tensor

from opt_kernels.dtensor import is_dtensor, local
from opt_kernels.foreign import ARGUMENTS
from opt_kernels.hooks import (
    GivenHooks,
    HookError,
    Hyperball,
    checked,
    described,
    hooked,
    hooks_of,
    shape_problem,
)
from opt_kernels.optim.state import StateDictError
from opt_kernels.params import HOOKS, NEUTRAL, frozen, overlapping
from opt_kernels.rules.base import Rule
from opt_kernels.works import Number

ParamGroup = dict[str, Any]
Options = Mapping[str, Any]
"""Numbers and options of an optimizer, or entries of a group, by name."""

# Entries that schedulers, trainers, loggers and `opt_paramgroups` keep in groups. Optimizers ignore them.
_OF_OTHERS = frozenset(
    {
        *("params", "param_names", "param_ids", "name", "group_name", "label", "tag", "description"),
        *("initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr", "lr_mult", "lr_scale", "is_decoupled_lr"),
        *("base_momentum", "max_momentum", "wd_mult", "start_wd", "end_wd"),
        *("optimizer", "default_config", "is_expert_parallel"),
    }
)
_OF_OTHERS_PREFIXES = ("initial_", "swanlab", "wandb", "log_", "_")

_INSTEAD: Mapping[str, str] = {
    "foreach": "every step updates all tensors at once",
    "fused": "every step is fused",
    "capturable": "it applies to all groups; pass it to the optimizer",
    "differentiable": "autograd does not record steps; use torch.optim",
    "amsgrad": "use torch.optim's optimizer with amsgrad=True",
    "maximize": "minimize the negative of the objective",
}
NUMBERS = tuple(Number(name, 0.0, low=0.0) for name in ("lr", "weight_decay", "eps", "momentum", "scalar_eps"))
"""The numbers that every rule restricts, apart from betas."""
# Names of these options in other implementations.
_ALIASES: Mapping[str, str] = {"use_muon": "use_matrix_rule", "wd": "weight_decay"}


def params_with_groups(groups: Iterable[ParamGroup]) -> list[tuple[ParamGroup, Tensor]]:
    """All parameters in order, each with its group."""
    return [(group, param) for group in groups for param in group["params"]]


def check_flags(flags: Mapping[str, object]) -> None:
    """Raise ValueError for an argument of torch.optim whose value is not supported."""
    for name, value in flags.items():
        if not any(value is neutral for neutral in NEUTRAL[name]):
            allowed = " or ".join(map(repr, NEUTRAL[name]))
            raise ValueError(f"{name}={value!r} is not supported; {allowed} is allowed: {_INSTEAD[name]}")


def bound_arguments(of: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """The arguments of the class of an optimizer, with defaults. Raises TypeError, with a hint for names of other
    libraries."""
    try:
        bound = of.__signature__.bind(*args, **options)
    except TypeError as error:
        unknown = [name for name in options if name not in of.__signature__.parameters]
        problem = str(error)
        if unknown:
            problem = f"got an unexpected keyword argument {', '.join(map(repr, unknown))}"
        hints = [f"{name}: {ARGUMENTS[name]}" for name in unknown if name in ARGUMENTS]
        if hints:
            problem += f". {'; '.join(hints)}"
        raise TypeError(f"{of.__name__}: {problem}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def check_keys(group: Options, known: Collection[str]) -> None:
    """Raise ValueError for a key of a new group that neither the optimizer nor any known scheduler reads."""
    check_flags({name: value for name, value in group.items() if name in NEUTRAL and name not in known})
    for name, value in group.items():
        if name in known or name in _OF_OTHERS or name in NEUTRAL or name.startswith(_OF_OTHERS_PREFIXES):
            continue
        options = sorted({*known} - {"params"})
        alias = _ALIASES.get(name)
        nearest = [alias] if alias in options else get_close_matches(name, options, cutoff=0.5)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"{name}={value!r} in a parameter group: nothing reads it; allowed are {', '.join(options)}.{hint} Set "
            "keys for your own code after construction: optimizer.param_groups[0][...]"
        )


def check_distinct(params: Sequence[Tensor]) -> None:
    """Raise ValueError for a parameter that a group has twice: a fused sweep would update it twice at once."""
    first: dict[Tensor, int] = {}
    for index, param in enumerate(params):
        if first.setdefault(param, index) != index:
            raise ValueError(
                f"parameter {index} of a group, of shape {tuple(param.shape)}, is also parameter {first[param]}; pass "
                "each parameter once"
            )


def check_apart(params: Sequence[Tensor]) -> None:
    """Raise ValueError for parameters that share memory: each update would be overwritten by the other one, or race
    with it."""
    pair = overlapping(params, len(params))
    if pair is not None:
        shapes = [tuple(params[index].shape) for index in sorted(pair)]
        raise ValueError(
            f"parameters {min(pair)} and {max(pair)}, of shapes {shapes[0]} and {shapes[1]}, share "
            "memory; tie parameters by using one nn.Parameter twice, or pass only one of them"
        )


def check_fixed(group: Options, defaults: Options, fixed: Sequence[str]) -> None:
    """Raise ValueError if `group` changes an option that must be equal in all groups."""
    for name in fixed:
        is_neutral = name in NEUTRAL and group.get(name) is None
        if name in group and not is_neutral and frozen(group[name]) != frozen(defaults[name]):
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group, but the optimizer was built with {defaults[name]!r} "
                f"for all groups; build it with {name}={group[name]!r}"
            )


def saved_in_order(groups: Sequence[ParamGroup], saved: Sequence[ParamGroup]) -> Sequence[ParamGroup]:
    """Saved groups in the order of the parameters of `groups`: by name if both have names, and the same ones.

    Otherwise they stay as they are, which is by position. Logs which of the two was done if the orders differ.

    Raises StateDictError if parameters that share a group now were saved in groups that differ.
    """
    own_names = _names_of(groups)
    saved_names = _names_of(saved)
    if own_names is None or saved_names is None:
        return saved
    if set(own_names) != set(saved_names) or len(set(own_names)) != len(own_names):
        for position, (own, other) in enumerate(zip(own_names, saved_names)):
            if own != other:
                logger.warning(
                    "load_state_dict: names differ, so states are loaded by position: parameter %d is %r, and %r in "
                    "the state_dict", position, own, other,
                )  # fmt: skip
                break
        return saved
    sources: dict[str, tuple[int, Any]] = {}  # number of the saved group, and index in the state_dict
    for number, of_saved in enumerate(saved):
        for name, index in zip(of_saved["param_names"], of_saved["params"], strict=True):
            sources[name] = number, index
    arranged = []
    for group in groups:
        entries = group  # a group without parameters keeps its own
        of_group = [sources[name] for name in group["param_names"]]
        if of_group:
            numbers = dict.fromkeys(number for number, _ in of_group)
            entries, *_ = _check_equal([saved[number] for number in numbers])
        arranged.append({**entries, "params": [index for _, index in of_group]})
    if own_names != saved_names:
        logger.info("load_state_dict: the state_dict has the parameters in another order; states are loaded by name")
    return arranged


def _names_of(groups: Sequence[ParamGroup]) -> list[str] | None:
    """The names of all parameters in order; None if a group has none, or not one for each parameter."""
    names: list[str] = []
    for group in groups:
        of_group = group.get("param_names")
        if of_group is None or len(of_group) != len(group["params"]):
            return None
        names += of_group
    return names


def _check_equal(saved: Sequence[ParamGroup]) -> Sequence[ParamGroup]:
    """Return the saved groups of the parameters of one group. Raise StateDictError if they have different entries."""
    for first, other in pairwise(saved):
        for name in sorted({*first, *other} - {"params", "param_names", HOOKS}):
            if first.get(name) != other.get(name):
                raise StateDictError(
                    f"parameters {first['param_names'][0]!r} and {other['param_names'][0]!r} were saved in groups with "
                    f"{name}={first.get(name)!r} and {other.get(name)!r}, but share a group now; build the optimizer "
                    "with the groups of the state_dict"
                )
    return saved


def loaded_groups(groups: Sequence[ParamGroup], saved: Sequence[ParamGroup], defaults: Options) -> list[ParamGroup]:
    """`saved` with the parameters, names and hooks of `groups`, and with `defaults` for missing entries.

    Raises StateDictError if the number of groups or parameters differs, and for options of torch.optim that are not
    supported.
    """
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise StateDictError(
            f"the state_dict has groups of {saved_sizes} parameters where this optimizer has {sizes}; load one "
            "that was saved by an optimizer of the same groups"
        )
    for group in saved:
        for name in {"amsgrad", "maximize"} - defaults.keys():
            if group.get(name):
                raise StateDictError(
                    f"the state_dict was saved with {name}=True, which this optimizer does not support; set it to False"
                )
    loaded = []
    for group, of_saved in zip(groups, saved):
        own = {name: group[name] for name in ("params", "param_names", HOOKS) if name in group}
        kept = copy.deepcopy(of_saved)
        kept.pop(HOOKS, None)
        loaded.append({**defaults, **kept, **own})
    return loaded


logger = logging.getLogger(__name__)


def checked_hooks(given: GivenHooks, rules: Sequence[Rule]) -> GivenHooks:
    """`given` as a tuple, or as tuples by the names of rules. Raises HookError for objects that are not hooks, and for
    hooks of a rule that is not one of `rules`, those of the optimizer."""
    if not isinstance(given, Mapping):
        return checked(given)
    found = {name: checked(hooks) for name, hooks in given.items()}
    names = [rule.name for rule in rules]
    for name in found:
        if name not in names:
            raise HookError(
                f"hooks has {name!r}, which is not a rule of this optimizer; allowed are {', '.join(names)}"
            )
    return found


def with_hooks(rule: Rule, given: GivenHooks) -> Rule:
    """`rule` with the hooks that apply to it. Raises HookError for hooks that it does not support."""
    hooks = given.get(rule.name, ()) if isinstance(given, Mapping) else given
    return _hooked(rule, tuple(hooks)) if hooks else rule  # type: ignore[arg-type]  # rules of drop-ins are values


_hooked = cache(hooked)  # it runs trial steps to see whether the rule supports the hooks


def check_param_hooks(param: Tensor, rule: Rule, group: ParamGroup) -> None:
    """Raise HookError if the hooks of its rule do not support a parameter."""
    shard = local(param).detach()
    for hook in hooks_of(rule):
        problem = shape_problem(hook, rule.needs, tuple(param.shape))
        if is_dtensor(param) and shard.shape != param.shape and not hook.is_elementwise:
            problem = (
                "its norms span ranks, and this optimizer does not communicate; use opt_stack.get_optimizer, or no hook"
            )
        if isinstance(hook, Hyperball) and float(group.get("weight_decay", 0.0)) != 0:
            problem = f"weight_decay={group['weight_decay']}: it keeps the norm instead of decaying it; set 0.0"
        if isinstance(hook, Hyperball) and hook.radius is None and not shard.is_meta and not shard.any():
            problem = "it keeps the norm of the weights, and these are all zeros; pass Hyperball(radius=...)"
        if problem:
            raise HookError(f"{hook!r} of rule {rule.name!r} on a parameter of shape {tuple(param.shape)}: {problem}")


def recorded(given: GivenHooks) -> tuple[str, ...]:
    """Hooks as text, for a state_dict."""
    if not isinstance(given, Mapping):
        return described(tuple(given))
    texts: list[str] = []
    for name, hooks in given.items():
        texts += [f"{name}: {text}" for text in described(tuple(hooks))]
    return tuple(texts)


def warn_of_other_hooks(groups: Iterable[ParamGroup], saved: Iterable[ParamGroup], of_all: GivenHooks) -> None:
    """Log a warning for each group that was saved with other hooks: training continues differently. `of_all` are the
    hooks of groups without their own."""
    for number, (group, of_saved) in enumerate(zip(groups, saved)):
        before = tuple(of_saved.get(HOOKS, ()))
        after = recorded(group.get(HOOKS, of_all))
        if before != after:
            logger.warning(
                "group %d continues with hooks %s, but was saved with %s",
                number, ", ".join(after) or "none", ", ".join(before) or "none",
            )  # fmt: skip
