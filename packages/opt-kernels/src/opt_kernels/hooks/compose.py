"""Elementwise hooks as transformations of formulas. The result is a formula that every backend sweeps in one pass.

The formula is evaluated without its own weight decay. If the hook needs the step, the formula is evaluated at p = 0,
which gives exactly the step -lr u of a rule with the update p - lr u(g, states):

    step = update(0, g, ...)
    p <- kept + step        with kept = p - d p, or the same only where the step moves p towards 0 or is 0

Elements that are not masked have the bits of the formula alone.
"""

import ast
import linecache
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from opt_kernels.formulas import functions
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.syntax import FUNCTIONS, body_of, parameters_of, scalar_expressions
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

    Raises HookError if the hook needs u, and the update without weight decay is not p - lr u(g, states).
    """
    parts = _parts(hook)
    if parts.kept is not None and not is_separable(formula):
        raise HookError(
            f"{hook!r} with rule {formula.name!r}: the hook needs an update of the form p - lr u, with u independent "
            "of the weights; leave the hook out for this rule"
        )
    return replace(
        formula,
        scalars=_function("scalars", _scalars_source(formula, parts), formula, hook),
        update=_function("update", _update_source(formula, parts), formula, hook),
    )


def is_separable(formula: Formula) -> bool:
    """Whether the step without weight decay is independent of the weights, by a trial in float64."""
    generator = torch.Generator().manual_seed(0)
    p, g, *states = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(2 + len(formula.states)))
    values = {state.name: x if state.signed else x.square() for state, x in zip(formula.states, states)}
    scalars = formula.scalars_of(replace(hyper_of(formula), lr=0.125, weight_decay=0.0, step=3))
    at_p, *states_at_p = formula.updated(p, g, values, scalars)
    at_0, *states_at_0 = formula.updated(torch.zeros_like(p), g, values, scalars)
    same_states = all(map(torch.equal, states_at_p, states_at_0))
    return same_states and torch.allclose(at_p - p, at_0, rtol=1e-12, atol=1e-12)


def hyper_of(formula: Formula) -> Hyper:
    """Numbers for trials of a formula: its defaults, with a momentum that is not 0."""
    betas = formula.defaults.get("betas")
    return Hyper(lr=0.0, betas=betas) if isinstance(betas, tuple) else Hyper(lr=0.0)


def _scalars_source(formula: Formula, parts: _Parts) -> list[str]:
    statements, scalars = scalar_expressions(formula.scalars)
    names = dict.fromkeys((*formula.number_names, "lr", "weight_decay"))
    pairs = [f"{name!r}: {ast.unparse(value)}" for name, value in scalars]
    pairs += ["'hook_scalar': hook_scalar", *([] if parts.kept is None else ["'hook_zero': 0.0"])]
    lines = [f"hook_scalar = {parts.scalar}", "weight_decay = 0.0", *_lines(statements)]
    return [f"def scalars(*, {', '.join(names)}):", *_indented([*lines, f"return {{{', '.join(pairs)}}}"])]


def _update_source(formula: Formula, parts: _Parts) -> list[str]:
    positional, named = parameters_of(formula.update)
    added, body = ["hook_scalar"], list(body_of(formula.update))
    before = list(parts.before)
    if parts.kept is not None:
        added += ["hook_zero"]
        before += ["hook_p = p", "p = hook_zero"]
        body = [_Returns(parts.kept).visit(deepcopy(statement)) for statement in body]
    lines = [*before, *_lines(body)]
    return [f"def update({', '.join(positional)}, *, {', '.join([*named, *added])}):", *_indented(lines)]


class _Returns(ast.NodeTransformer):
    """Makes an update return `kept` plus the step instead of the step."""

    def __init__(self, kept: str) -> None:
        self.kept = kept

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        assert node.value is not None
        step, *states = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        results = ", ".join([f"{self.kept} + hook_step", *map(ast.unparse, states)])
        return ast.parse(f"hook_step = {ast.unparse(step)}\nreturn {results}").body


def _function(name: str, lines: list[str], formula: Formula, hook: Hook) -> Callable[..., Any]:
    """The function that the source defines. `inspect.getsource` finds its source, which every backend translates."""
    source = "\n".join([*lines, ""])
    file = f"<opt_kernels {name} of {formula.name} with {hook!r} {id(formula.update)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {function: getattr(functions, function) for function in FUNCTIONS}
    names["__doc__"] = formula.description
    exec(compile(source, file, "exec"), names)
    made: Callable[..., Any] = names[name]
    return made


def _lines(statements: Iterable[ast.AST]) -> list[str]:
    return [line for statement in statements for line in ast.unparse(statement).splitlines()]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
