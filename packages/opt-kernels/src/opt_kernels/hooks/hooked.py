"""`hooked`: applies hooks to a rule, if they agree and trial steps have shown that the rule supports them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from opt_kernels.hooks.compose import hyper_of, with_hook
from opt_kernels.hooks.measured import HookedUpdate
from opt_kernels.hooks.values import (
    CautiousDecay,
    CentralizeGradient,
    ClipUpdateRms,
    Hook,
    HookError,
    Hooks,
    Hyperball,
    RadialBrake,
    RadiusPin,
    RelativeUpdate,
    RowFloor,
)
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.works import HYPER_FIELDS, Batch, Hyper, Number, Work

TRIED_STEPS = (1, 2, 3, 6, 100)  # a formula may branch on the step
TRIED_SHAPES = {Needs.ELEMENTS: (256,), Needs.MATRICES: (8, 8)}


_OF_PARTS = (Hyperball, RowFloor, CautiousDecay)
# For a hook, those that it excludes, and why.
_CONFLICTS = (
    (Hyperball, (ClipUpdateRms, RelativeUpdate), "which sets the update's norm itself"),
    (RowFloor, (ClipUpdateRms, RelativeUpdate, Hyperball), "which changes the update's norm"),
    (RadialBrake, _OF_PARTS, "whose factors are those of whole matrices"),
    (RadiusPin, _OF_PARTS, "whose factors are those of whole matrices"),
)


def checked(hooks: Sequence[Hook]) -> Hooks:
    """`hooks` as a tuple. Raises HookError for objects that are not hooks, duplicates, and hooks that conflict."""
    wrong = [hook for hook in hooks if not isinstance(hook, Hook)]
    if wrong:
        hint = f"; pass {wrong[0].__name__}()" if isinstance(wrong[0], type) else ""
        raise HookError(f"hooks has {wrong[0]!r}, which is not a hook of opt_kernels.hooks{hint}")
    kinds = [type(hook) for hook in hooks]
    twice = [kind for kind in kinds if kinds.count(kind) > 1]
    if twice:
        raise HookError(f"hooks has {twice[0].__name__} {kinds.count(twice[0])} times; pass each kind once")
    decays = [hook for hook in hooks if hook.decays]
    if len(decays) > 1:
        raise HookError(
            f"hooks has {' and '.join(map(repr, decays))}: each replaces the weight decay; set only one of them"
        )
    for kind, others, why in _CONFLICTS:
        conflicting = [hook for hook in hooks if isinstance(hook, others)]
        if conflicting and kind in kinds:
            raise HookError(f"hooks has {conflicting[0]!r} and {kind.__name__}, {why}; set only one of them")
    return tuple(hooks)


def described(hooks: Hooks) -> tuple[str, ...]:
    """The text that a checkpoint records for `hooks`."""
    return tuple(map(repr, hooks))


def hooked(rule: Rule, hooks: Sequence[Hook]) -> Rule:
    """Return `rule` with `hooks` applied to its update; `rule` itself if there are none.

    Raises HookError for hooks that conflict, or that this rule does not support.
    """
    hooks = checked(hooks)
    if not hooks:
        return rule
    if hooks_of(rule):
        raise HookError(
            f"hooks {hooks!r} for rule {rule.name!r}, which already has {hooks_of(rule)!r}; pass all of them at once"
        )
    sizing = [hook for hook in hooks if isinstance(hook, Hyperball | RelativeUpdate)]
    if sizing and getattr(rule, "nuclear_scale", False):
        raise HookError(
            f"nuclear_scale=True with {sizing[0]!r}, which sets the update's norm itself; set only one of them"
        )
    made = HookedUpdate(rule=rule, hooks=hooks)
    if isinstance(rule, ElementwiseRule) and all(hook.is_elementwise for hook in hooks):
        if made.is_measured:
            _check_separable(rule, hooks)
        return replace(rule, formula=reduce(with_hook, hooks, rule.formula), hooks=hooks)
    if not made.is_measured:
        return made
    return replace(made, couples=_couples(rule, hooks), decays=reads_weight_decay(made))


def reads_weight_decay(rule: Rule) -> bool:
    """Whether weight decay has an effect on what `rule` updates, by itself or by one of its hooks."""
    if isinstance(rule, HookedUpdate):
        return any(hook.decays for hook in rule.hooks) or reads_weight_decay(rule.rule)
    return not isinstance(rule, ElementwiseRule) or rule.formula.reads_weight_decay


def check_unread(rule: Rule, values: Mapping[str, Any]) -> None:
    """Raise NumberError for a number of a group that would have no effect, as `Formula.check_unread`."""
    inner = bare(rule)
    if isinstance(inner, ElementwiseRule):
        decay = {"weight_decay": 0.0} if reads_weight_decay(rule) else {}
        inner.formula.check_unread({**values, **decay})


def check_numbers(rule: Rule | None, values: Mapping[str, Any]) -> None:
    """Raise NumberError for a number of a group that is out of the bounds that the formula of `rule` declares, or else
    of those that every rule has, or that does not go with the formats of its states. Other entries are ignored."""
    inner = None if rule is None else bare(rule)
    declared = inner.formula.numbers if isinstance(inner, ElementwiseRule) else ()
    for name, value in values.items():
        number = next((number for number in declared if number.name == name), None)
        if number is None and name in HYPER_FIELDS:
            is_row = name == "betas" and isinstance(value, tuple | list)
            number = Number(name, (0.0,) * len(value) if is_row else 0.0)
        if number is not None:
            number.check(value)
    if isinstance(inner, ElementwiseRule):
        inner.check_betas(values)


def bare(rule: Rule) -> Rule:
    """The rule without hooks that are not part of its formula."""
    return rule.rule if isinstance(rule, HookedUpdate) else rule


def hooks_of(rule: Rule) -> Hooks:
    """The hooks of a rule."""
    if isinstance(rule, HookedUpdate):
        return rule.hooks
    composed = rule.hooks if isinstance(rule, ElementwiseRule) else ()
    return tuple(hook for hook in composed if isinstance(hook, Hook))


def shape_problem(hook: Hook, needs: Needs, shape: tuple[int, ...]) -> str:
    """Why `hook` does not support a parameter of this shape, to continue a message; empty if it does."""
    if hook.needs_matrices and len(shape) < 2:
        return (
            "it is for matrices only; use separate groups, or pass it to the matrix rule by name as in "
            "hooks={'muon': ...}"
        )
    needs_norms = not hook.is_elementwise and (hook.needs_matrices or not hook.needs_rows)
    if needs is Needs.MATRICES and len(shape) > 2 and needs_norms:
        return "it does not support stacks of matrices, which need one norm each; leave the hook out for stacks"
    return ""


def _check_separable(rule: Rule, hooks: Hooks) -> str:
    """Raise HookError for a rule whose step depends on the weights. Returns the hook that needs it, for messages."""
    needs = next(repr(hook) for hook in hooks if not isinstance(hook, CentralizeGradient))
    try:
        separable = _moves_as(HookedUpdate(rule=rule, hooks=()), weight_decay=0.0)
    except Exception as error:  # any exception: the rule may be the caller's code
        raise HookError(f"{needs} with rule {rule.name!r}: a trial step failed: {error!r}") from error
    if not separable:
        raise HookError(
            f"{needs} with rule {rule.name!r}: the hook needs an update of the form p - lr u, with u independent of "
            "the weights and of lr; leave the hook out for this rule"
        )
    return needs


def _couples(rule: Rule, hooks: Hooks) -> bool:
    """Whether `rule` adds its decay to the gradient. Raises HookError for a rule that does not support the hooks."""
    needs = _check_separable(rule, hooks)
    if any(hook.decays for hook in hooks) or not reads_weight_decay(rule):
        return False  # the rule's own is not used
    for couples in (False, True):
        if _moves_as(HookedUpdate(rule=rule, hooks=(), couples=couples), weight_decay=0.25):
            return couples
    after_first_step, *_ = _tried(_on_cpu(rule), weight_decay=0.25)
    before, *_ = _trial_values(rule)
    if torch.equal(after_first_step, before):
        raise HookError(
            f"{needs} with rule {rule.name!r}, whose first step changes no weights, not even by weight decay, but "
            "the hook would decay them; pass weight decay as a hook, too: CautiousDecay(), LrDecoupledDecay(max_lr) or "
            "CoupledDecay(), which decays from the first step on"
        )
    raise HookError(
        f"{needs} with rule {rule.name!r}, whose weight decay is neither p - lr wd p nor g + wd p; pass a hook that "
        "replaces it: CautiousDecay(), LrDecoupledDecay(max_lr) or CoupledDecay()"
    )


def _moves_as(split: HookedUpdate, *, weight_decay: float) -> bool:
    """Whether trial steps of the rule and of `split`, which uses a buffer, give the same weights and states."""
    rule = _on_cpu(split.rule)
    whole = _tried(rule, weight_decay)
    parts = _tried(replace(split, rule=rule), weight_decay)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(whole, parts, strict=True))


def _tried(rule: Rule, weight_decay: float) -> list[Tensor]:
    """The weights after each trial step, and the states that are stored as they are."""
    found = []
    main, *grads = _trial_values(rule)
    state = rule.init_state(main)
    inner = bare(rule)
    own = dict.fromkeys(getattr(rule, "hyper_names", ()), 0.5)
    start = hyper_of(inner.formula) if isinstance(inner, ElementwiseRule) else Hyper(lr=0.0, own=own)
    for number, (step, grad) in enumerate(zip(TRIED_STEPS, grads, strict=True), start=1):
        hyper = replace(start, lr=0.125 * number, weight_decay=weight_decay, step=step)
        with torch.no_grad():
            rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state)])])
        found.append(main.clone())
        found += [value.clone() for value in state.values() if value.dtype is torch.float32]
    return found


def _trial_values(rule: Rule) -> list[Tensor]:
    """Weights, and the gradients of the steps."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    shape = TRIED_SHAPES[rule.needs]
    count = 1 + len(TRIED_STEPS)
    return [torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator) for _ in range(count)]


def _on_cpu(rule: Any) -> Any:
    """`rule` and the rules in its fields with the torch backend, which runs on any device."""
    if not is_dataclass(rule) or isinstance(rule, type):
        return rule
    values = {field.name: getattr(rule, field.name) for field in fields(rule) if field.init}
    changed = {name: _on_cpu(value) for name, value in values.items() if is_dataclass(value)}
    changed |= {"backend": "torch"} if "backend" in values else {}
    return replace(rule, **changed)
