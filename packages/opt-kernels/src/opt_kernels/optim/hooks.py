"""Hooks of drop-in optimizers: how they apply to parameters, what is refused, and what a state_dict records."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from opt_kernels.dtensor import is_dtensor, local
from opt_kernels.hooks import (
    GivenHooks,
    HookError,
    Hooks,
    Hyperball,
    checked,
    described,
    hooked,
    hooks_of,
    shape_problem,
)
from opt_kernels.optim.groups import HOOKS, ParamGroup
from opt_kernels.rules.base import Rule

logger = logging.getLogger(__name__)


def checked_hooks(given: GivenHooks) -> GivenHooks:
    """`given` as a tuple, or as tuples by the names of rules. Raises HookError for objects that are not hooks."""
    if isinstance(given, Mapping):
        return {name: checked(hooks) for name, hooks in given.items()}
    return checked(given)


def with_hooks(rule: Rule, given: GivenHooks) -> Rule:
    """`rule` with the hooks that apply to it. Raises HookError for hooks that it does not support."""
    hooks = given.get(rule.name, ()) if isinstance(given, Mapping) else given
    return _hooked(rule, tuple(hooks)) if hooks else rule  # type: ignore[arg-type]  # rules of drop-ins are values


@cache  # `hooked` runs trial steps to see whether the rule supports the hooks
def _hooked(rule: Rule, hooks: Hooks) -> Rule:
    return hooked(rule, hooks)


def check_names(given: GivenHooks, rules: Sequence[Rule]) -> None:
    """Raise HookError for hooks of a rule that the optimizer does not use."""
    names = [rule.name for rule in rules]
    for name in given if isinstance(given, Mapping) else ():
        if name not in names:
            raise HookError(
                f"hooks has {name!r}, which is not a rule of this optimizer; allowed are {', '.join(names)}"
            )


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
    return tuple(f"{name}: {text}" for name, hooks in given.items() for text in described(tuple(hooks)))


def record_hooks_(groups: Iterable[ParamGroup], of_all: GivenHooks) -> None:
    """Replace the hooks of groups, or `of_all` for a group without its own, by their text."""
    for group in groups:
        hooks = recorded(group.pop(HOOKS, of_all))
        group |= {HOOKS: hooks} if hooks else {}


def warn_of_other_hooks(groups: Iterable[ParamGroup], saved: Iterable[Mapping[str, Any]], of_all: GivenHooks) -> None:
    """Log a warning for each group that was saved with other hooks: training continues differently. `of_all` are the
    hooks of groups without their own."""
    for number, (group, of_saved) in enumerate(zip(groups, saved)):
        before, after = tuple(of_saved.get(HOOKS, ())), recorded(group.get(HOOKS, of_all))
        if before != after:
            logger.warning(
                "group %d continues with hooks %s, but was saved with %s",
                number, ", ".join(after) or "none", ", ".join(before) or "none",
            )  # fmt: skip
