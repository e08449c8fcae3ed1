"""Hooks of torch.optim around loads and steps, and profiler ranges, without their costs in steps that have neither.

torch wraps the `step` of every optimizer: it opens a profiler range and looks for hooks. Without a profiler and without
hooks this takes a fifth of the host time of a step.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

R = TypeVar("R")


def observed(step: Callable[..., R]) -> Callable[..., R]:
    """Like `Optimizer.profile_hook_step`, which runs in every step that has hooks, is profiled or is compiled."""
    wrapped: Callable[..., R] = Optimizer.profile_hook_step(step)

    @wraps(step)
    def wrapper(self: Any, *args: Any, **options: Any) -> R:
        if torch.compiler.is_compiling() or _is_observed(self):
            return wrapped(self, *args, **options)
        return step(self, *args, **options)

    return wrapper


def before_load(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `state_dict`, or what the hooks that run before a load put in its place."""
    loaded = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, loaded)
        loaded = loaded if replaced is None else replaced
    return loaded


def _is_observed(optimizer: Any) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )
