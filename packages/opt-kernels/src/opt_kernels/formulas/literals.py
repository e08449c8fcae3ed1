"""Quotients of literals: torch computes `0.7 / x` as `0.7 * (1 / x)`, rounded twice; compiled sweeps round once."""

import ast
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opt_kernels.formulas import functions
from opt_kernels.formulas.syntax import FUNCTIONS, body_of, is_constant, parameters_of


@cache
def rounded_once(update: Callable[..., Any], constants: tuple[str, ...]) -> Callable[..., Any]:
    """`update` with each quotient rounded once. `constants` are the names that are numbers, not tensors."""
    replaced = _Quotients(constants)
    body = [replaced.visit(deepcopy(statement)) for statement in body_of(update)]
    if not replaced.found:
        return update
    positional, named = parameters_of(update)
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(name) for name in positional],
        kwonlyargs=[ast.arg(name) for name in named],
        kw_defaults=[None for _ in named],
        defaults=[],
    )
    head = ast.parse("def update(): pass").body[0]
    assert isinstance(head, ast.FunctionDef)
    head.args, head.body = arguments, body
    names: dict[str, Any] = {function: getattr(functions, function) for function in FUNCTIONS}
    names["quotient"] = quotient
    module = ast.fix_missing_locations(ast.Module([head], type_ignores=[]))
    exec(compile(module, f"<quotients of {update.__qualname__}>", "exec"), names)
    made: Callable[..., Any] = names["update"]
    return made


class _Quotients(ast.NodeTransformer):
    """Replaces `number / b` by `quotient(number, b)`."""

    def __init__(self, constants: tuple[str, ...]) -> None:
        self.constants = dict.fromkeys(constants, 0.0)
        self.found = False

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div) or not is_constant(node.left, self.constants):
            return node
        self.found = True
        return ast.Call(ast.Name("quotient", ast.Load()), [node.left, node.right], [])


def quotient(a: float, b: Any) -> Any:
    """a / b, rounded once."""
    return torch.full_like(b, a).div_(b) if isinstance(b, Tensor) else a / b
