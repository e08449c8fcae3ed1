"""Elementwise hooks as transformations of formulas: what comes out is again a formula, swept in one pass anywhere.

A formula is evaluated without its own weight decay. Where the hook has to see the step, it is evaluated at p = 0, which
leaves exactly the step -lr u of a rule whose update is p - lr u(g, states):

    step = update(0, g, ...)
    p <- kept + step        with kept = p - d p, or the same only where the step moves p towards 0 or is 0

so that where nothing is masked, the bits are those of the formula alone.
"""

import ast
import linecache
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from opt_kernels.formulas import functions
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.syntax import FUNCTIONS, parameters_of, scalar_expressions
from opt_kernels.formulas.translate import body_and_results
from opt_kernels.hooks.values import CautiousDecay, CoupledDecay, Hook, HookError, LrDecoupledDecay
from opt_kernels.works import Hyper

_STEP = frozenset({"lr", "weight_decay", "step"})


class _Parts(NamedTuple):
    """What a hook puts into a formula, as source."""

    scalar: str  # what `hook_scalar` is, of the group's numbers
    before: tuple[str, ...] = ()  # the update's first statements
    kept: str | None = None  # p after its decay; None where the update itself moves p


def _parts(hook: Hook) -> _Parts:
    match hook:
        case CoupledDecay():
            # Zero times an infinite parameter would be NaN.
            return _Parts("weight_decay", ("if hook_scalar != 0:", "    g = fma(p, hook_scalar, g)"))
        case CautiousDecay():
            kept = "where(sign(hook_step) * hook_p <= 0, hook_p * hook_scalar, hook_p)"
            return _Parts("1 - lr * weight_decay", kept=kept)
        case LrDecoupledDecay(max_lr=max_lr):
            return _Parts(f"1 - lr / {max_lr!r} * weight_decay", kept="hook_p * hook_scalar")
    raise HookError(f"{hook!r} is not elementwise: it is not part of a formula")


@cache
def with_hook(formula: Formula, hook: Hook) -> Formula:
    """`formula` with the decay of `hook` in place of its own.

    Raises HookError for a formula whose update is not p - lr u(g, states) without weight decay, where the hook has to
    see u.
    """
    parts = _parts(hook)
    if parts.kept is not None and not is_separable(formula):
        raise HookError(
            f"{hook!r} with rule {formula.name!r}: the hook needs an update of the form p - lr u, with u independent "
            "of the weights; leave the hook out for this rule"
        )
    name = type(hook).__name__
    return Formula(
        name=f"{formula.name}_{name}",
        states=formula.states,
        numbers=formula.numbers,
        scalars=_function(_scalars_source(formula, parts), f"scalars of {formula.name} {hook!r}", formula),
        update=_function(_update_source(formula, parts), f"update of {formula.name} {hook!r}", formula),
        choices=formula.choices,
        constants=formula.constants,
        evaluation=formula.evaluation,
    )


def is_separable(formula: Formula) -> bool:
    """Whether the step without weight decay is the same at any weights; found by trying, in float64."""
    generator = torch.Generator().manual_seed(0)
    p, g, *states = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(2 + len(formula.states)))
    values = {state.name: x if state.signed else x.square() for state, x in zip(formula.states, states)}
    own = {name: 0.5 for name in formula.number_names if name not in _STEP}
    scalars = formula.scalars_of(Hyper(lr=0.125, weight_decay=0.0, step=3, own=own))
    at_p, *states_at_p = formula.updated(p, g, values, scalars)
    at_0, *states_at_0 = formula.updated(torch.zeros_like(p), g, values, scalars)
    same_states = all(map(torch.equal, states_at_p, states_at_0))
    return same_states and torch.allclose(at_p - p, at_0, rtol=1e-12, atol=1e-12)


def _scalars_source(formula: Formula, parts: _Parts) -> str:
    statements, scalars = scalar_expressions(formula.scalars)
    names = dict.fromkeys((*formula.number_names, "lr", "weight_decay"))
    pairs = [f"{name!r}: {ast.unparse(value)}" for name, value in scalars]
    pairs += ["'hook_scalar': hook_scalar", "'hook_zero': 0.0"]
    lines = [
        f"hook_scalar = {parts.scalar}",
        "weight_decay = 0.0",
        *(line for statement in statements for line in ast.unparse(statement).splitlines()),
        f"return {{{', '.join(pairs)}}}",
    ]
    return "\n".join([f"def scalars(*, {', '.join(names)}):", *_indented(lines)])


def _update_source(formula: Formula, parts: _Parts) -> str:
    positional, named = ("p", "g", *formula.result_names[1:]), parameters_of(formula.update)[1]
    body, results = body_and_results(formula.update, formula.result_names, dict(formula.constants))
    added = ["hook_scalar"] if parts.kept is None else ["hook_scalar", "hook_zero"]
    lines = [*parts.before, *(["hook_p = p", "p = hook_zero"] if parts.kept is not None else [])]
    lines += [line for statement in body for line in ast.unparse(statement).splitlines()]
    moved, *states = map(ast.unparse, results)
    if parts.kept is not None:
        lines.append(f"hook_step = {moved}")
        moved = f"{parts.kept} + hook_step"
    lines.append(f"return {', '.join([moved, *states])}")
    return "\n".join([f"def update({', '.join(positional)}, *, {', '.join([*named, *added])}):", *_indented(lines)])


def _function(source: str, what: str, formula: Formula) -> Callable[..., Any]:
    """The one function of `source`, which `inspect.getsource` finds again: every backend translates it."""
    file = f"<opt_kernels {what} {id(formula.update)} {dict(formula.constants)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {name: getattr(functions, name) for name in FUNCTIONS}
    exec(compile(source, file, "exec"), names)
    made: Callable[..., Any] = names.get("update") or names["scalars"]
    return made


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
