"""Elementwise hooks as transformations of formulas. The result is a formula that every backend sweeps in one pass.

The formula is evaluated without its own weight decay. If the hook needs the step, the formula is evaluated at p = 0,
which gives exactly the step -lr u of a rule with the update p - lr u(g, states):

    step = update(0, g, ...)
    p <- kept + step        with kept = p - d p, or the same only where the step moves p towards 0 or is 0

Elements that are not masked have the bits of the formula alone.
"""

import ast
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.syntax import Body, body_of, function_of, parameters_of, parsed, scalar_expressions
from opt_kernels.hooks.values import CautiousDecay, CoupledDecay, Hook, HookError, LrDecoupledDecay
from opt_kernels.works import Hyper


class _Parts(NamedTuple):
    """The source that a hook inserts into a formula."""

    scalar: str  # expression of `hook_scalar` in the numbers of the group
    before: tuple[str, ...] = ()  # first statements of the update
    kept: str | None = None  # expression of p after its decay; None: the update itself includes p


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
    raise HookError(f"{hook!r} is not elementwise: it cannot be part of a formula")


@cache
def with_hook(formula: Formula, hook: Hook) -> Formula:
    """`formula` with the decay of `hook` instead of its own.

    If the hook needs u, the update without weight decay must be p - lr u(g, states), which `hooked` checks.
    """
    parts = _parts(hook)
    statements, scalars = scalar_expressions(formula.scalars)
    values = {**dict(scalars), "hook_scalar": ast.Name("hook_scalar", ast.Load())}
    positional, named = parameters_of(formula.update)
    before = list(parts.before)
    body = deepcopy(list(body_of(formula.update)))
    added = ["hook_scalar"]
    if parts.kept is not None:
        values["hook_zero"] = ast.Constant(0.0)
        added.append("hook_zero")
        before += ["hook_p = p", "p = hook_zero"]
        body = _Returns(parts.kept).visit(ast.Module(body, type_ignores=[])).body
    first = parsed(f"hook_scalar = {parts.scalar}\nweight_decay = 0.0")
    keys: list[ast.expr | None] = [ast.Constant(name) for name in values]
    last = ast.Return(ast.Dict(keys, list(values.values())))
    numbers = list(dict.fromkeys((*formula.number_names, "lr", "weight_decay")))
    scalars_with_hook = function_of([*first, *statements, last], [], numbers, like=formula.scalars)
    steps = [*parsed("\n".join(before)), *body]
    update = function_of(steps, positional, [*named, *added], like=formula.update)
    return replace(formula, scalars=scalars_with_hook, update=update)


def hyper_of(formula: Formula) -> Hyper:
    """Return numbers for trial steps of a formula: its defaults, with a momentum that is not 0."""
    betas = formula.defaults.get("betas")
    return Hyper(lr=0.0, betas=betas) if isinstance(betas, tuple) else Hyper(lr=0.0)


class _Returns(ast.NodeTransformer):
    """Makes an update return `kept` plus the step instead of the step."""

    def __init__(self, kept: str) -> None:
        self.kept = kept

    def visit_Return(self, node: ast.Return) -> Body:
        assert node.value is not None
        step, *states = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        results = ", ".join([f"{self.kept} + hook_step", *map(ast.unparse, states)])
        return parsed(f"hook_step = {ast.unparse(step)}\nreturn {results}")
