"""Formulas as functions that torch's operations and the host run, with the numbers of compiled sweeps.

Torch computes `0.7 / x` as `0.7 * (1 / x)`, rounded twice, and powers of float32 elements in float32; compiled sweeps
round once. And `x += y` would write to a tensor that other names may have, or to a gradient.
"""

import ast
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from opt_kernels.formulas.syntax import body_of, function_of, is_constant, is_square_or_cube, parameters_of, source_of


@cache
def for_torch(update: Callable[..., Any], constants: tuple[str, ...]) -> Callable[..., Any]:
    """`update` with each quotient and power rounded once, and without writes to tensors. `constants` are the names that
    are numbers, not tensors."""
    return _compiled(update, [_ForTorch(constants).visit(deepcopy(statement)) for statement in body_of(update)])


@cache
def for_host(scalars: Callable[..., Any]) -> Callable[..., Any]:
    """`scalars` with the module constants that sweeps were compiled with."""
    return _compiled(scalars, list(body_of(scalars)))


def _compiled(function: Callable[..., Any], body: list[ast.stmt]) -> Callable[..., Any]:
    """A function with this body; `function` itself if it has the same."""
    if [*map(ast.dump, body)] == [*map(ast.dump, source_of(function))]:
        return function
    return function_of(body, *parameters_of(function), like=function, quotient=quotient)


class _ForTorch(ast.NodeTransformer):
    """Replaces `number / b` by `quotient(number, b)`, `a ** b` by `power(a, b)`, and `a += b` by `a = a + b`."""

    def __init__(self, constants: tuple[str, ...]) -> None:
        self.constants = dict.fromkeys(constants, 0.0)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        is_quotient = isinstance(node.op, ast.Div) and is_constant(node.left, self.constants)
        is_power = isinstance(node.op, ast.Pow) and not is_square_or_cube(node.right)
        if not is_quotient and not is_power:
            return node
        return ast.Call(ast.Name("quotient" if is_quotient else "power", ast.Load()), [node.left, node.right], [])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):  # refused by `check`
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], cast("ast.expr", self.visit_BinOp(value)))


def quotient(a: float, b: Any) -> Any:
    """a / b, rounded once."""
    return torch.full_like(b, a).div_(b) if isinstance(b, Tensor) else a / b
