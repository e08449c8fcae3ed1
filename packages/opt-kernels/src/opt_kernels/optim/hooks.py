"""Hooks of drop-in optimizers: which parameters have which, what is refused, and what a state_dict records of them."""

import logging
from collections.abc import Mapping, Sequence
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
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.rules.base import Rule

HOOKS = "hooks"  # a group's entry: hooks of its own; in a state_dict, what the group had

logger = logging.getLogger(__name__)


def checked_hooks(given: GivenHooks) -> GivenHooks:
    """`given` as a tuple, or tuples by the rules' names. Raises HookError for what are not hooks."""
    if isinstance(given, Mapping):
        return {name: checked(hooks) for name, hooks in given.items()}
    return checked(given)


def with_hooks(rule: Rule, given: GivenHooks) -> Rule:
    """`rule` with those of the hooks that are for it. Raises HookError for hooks that it cannot have."""
    found = given.get(rule.name, ()) if isinstance(given, Mapping) else given
    return _hooked(rule, tuple(found)) if found else rule  # type: ignore[arg-type]  # rules of drop-ins are values


@cache  # whether a rule can have hooks is found by trying
def _hooked(rule: Rule, hooks: Hooks) -> Rule:
    return hooked(rule, hooks)


def check_names(given: GivenHooks, rules: Sequence[Rule]) -> None:
    """Raises HookError for hooks of a rule that the optimizer does not have."""
    names = [rule.name for rule in rules]
    for name in given if isinstance(given, Mapping) else ():
        if name not in names:
            raise HookError(
                f"hooks has {name!r}, which is not a rule of this optimizer; allowed are {', '.join(names)}"
            )


def check_param_hooks(param: Tensor, rule: Rule, group: ParamGroup) -> None:
    """Raises HookError for a parameter on which the hooks of its rule cannot be had."""
    shard = local(param).detach()
    for hook in hooks_of(rule):
        problem = shape_problem(hook, rule.needs, tuple(param.shape))
        if is_dtensor(param) and shard.shape != param.shape and not hook.is_elementwise:
            problem = (
                "its norms span ranks, which this optimizer does not reach; use opt_stack.get_optimizer, or no hook"
            )
        if isinstance(hook, Hyperball) and float(group.get("weight_decay", 0.0)) != 0:
            problem = f"weight_decay={group['weight_decay']}, in the place of which it keeps the norm; give 0.0"
        if isinstance(hook, Hyperball) and hook.radius is None and not shard.is_meta and not shard.any():
            problem = "it keeps the norm that weights have, and these are all zeros; give Hyperball(radius=...)"
        if problem:
            raise HookError(f"{hook!r} of rule {rule.name!r} on a parameter of shape {tuple(param.shape)}: {problem}")


def recorded(given: GivenHooks) -> tuple[str, ...]:
    """Hooks as a state_dict has them: text."""
    if not isinstance(given, Mapping):
        return described(tuple(given))
    return tuple(f"{name}: {text}" for name, hooks in given.items() for text in described(tuple(hooks)))


def warn_of_other_hooks(number: int, now: GivenHooks, saved: Mapping[str, Any]) -> None:
    """Logs a warning where a group was saved under other hooks: the run goes on differently from then on."""
    before, after = tuple(saved.get(HOOKS, ())), recorded(now)
    if before != after:
        logger.warning(
            "group %d goes on with hooks %s, but was saved with %s",
            number, ", ".join(after) or "none", ", ".join(before) or "none",
        )  # fmt: skip
