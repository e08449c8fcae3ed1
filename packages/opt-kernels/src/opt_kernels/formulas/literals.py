"""Rewrites formulas so that torch's operations compute what compiled sweeps do.

Torch computes `0.7 / x` as `0.7 * (1 / x)`, rounded twice; compiled sweeps round once. And `x += y` would write to a
tensor that other names may have, or to a gradient.
"""

import ast
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from opt_kernels.formulas import functions
from opt_kernels.formulas.syntax import FUNCTIONS, body_of, is_constant, parameters_of


@cache
def for_torch(update: Callable[..., Any], constants: tuple[str, ...]) -> Callable[..., Any]:
    """`update` with each quotient rounded once, and without writes to tensors. `constants` are the names that are
    numbers, not tensors."""
    replaced = _ForTorch(constants)
    body = [replaced.visit(deepcopy(statement)) for statement in body_of(update)]
    if not replaced.found:
        return update
    positional, named = parameters_of(update)
    head = ast.parse(f"def update({', '.join([*positional, *(['*'] if named else []), *named])}): pass").body[0]
    assert isinstance(head, ast.FunctionDef)
    head.body = body
    names: dict[str, Any] = {function: getattr(functions, function) for function in FUNCTIONS}
    names["quotient"] = quotient
    module = ast.fix_missing_locations(ast.Module([head], type_ignores=[]))
    exec(compile(module, f"<{update.__qualname__} for torch>", "exec"), names)
    made: Callable[..., Any] = names["update"]
    return made


class _ForTorch(ast.NodeTransformer):
    """Replaces `number / b` by `quotient(number, b)`, and `a += b` by `a = a + b`."""

    def __init__(self, constants: tuple[str, ...]) -> None:
        self.constants = dict.fromkeys(constants, 0.0)
        self.found = False

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div) or not is_constant(node.left, self.constants):
            return node
        self.found = True
        return ast.Call(ast.Name("quotient", ast.Load()), [node.left, node.right], [])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):  # refused by `check`
            return node
        self.found = True
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], cast("ast.expr", self.visit_BinOp(value)))


def quotient(a: float, b: Any) -> Any:
    """a / b, rounded once."""
    return torch.full_like(b, a).div_(b) if isinstance(b, Tensor) else a / b
