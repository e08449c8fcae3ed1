"""Cuts a formula in two at its first square root, so that two short loops replace a long one.

A processor starts few elements ahead of those that wait for a root and for the division after it. Two loops, with the
roots of a chunk of elements in an array between them, keep it busy.
"""

import ast
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

from opt_kernels.formulas.numbers import Constant
from opt_kernels.formulas.syntax import assigned, decided


class SplitFormula(NamedTuple):
    """A formula in two parts. `roots` are assigned at the end of the first, under names that no formula can have."""

    before: list[ast.stmt]
    roots: list[ast.stmt]
    after: list[ast.stmt]
    results: list[ast.expr]  # of the whole formula, in terms of the roots

    def squares(self) -> dict[str, str]:
        """The names of the roots of a single name, with this name."""
        found: dict[str, str] = {}
        for statement in self.roots:
            match statement:
                case ast.Assign([ast.Name(root)], ast.Call(args=[ast.Name(square)])):
                    found[root] = square
        return found


def read(*nodes: ast.AST) -> set[str]:
    """The names that occur in `nodes`, except as targets of assignments."""
    found = [node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name)]
    return {node.id for node in found if not isinstance(node.ctx, ast.Store)} | {
        node.target.id
        for root in nodes
        for node in ast.walk(root)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }


def copies(body: Sequence[ast.stmt], constants: Mapping[str, Constant]) -> dict[str, str]:
    """Map each name that equals another one after `body` to the first name that has this value."""
    same: dict[str, str] = {}
    for statement in body:
        written = {*assigned([statement])}
        same = {name: first for name, first in same.items() if not written & {name, first}}
        match statement:
            case ast.Assign([ast.Name(name)], value):
                other = _chosen(value, constants)
                if isinstance(other, ast.Name) and other.id != name:
                    same[name] = same.get(other.id, other.id)
    return same


def _chosen(value: ast.expr, constants: Mapping[str, Constant]) -> ast.expr:
    """`value`, or the branch of it that constants choose."""
    if isinstance(value, ast.IfExp) and isinstance(test := decided(value.test, constants), bool):
        return _chosen(value.body if test else value.orelse, constants)
    return value


def cut(body: Sequence[ast.stmt], results: Sequence[ast.expr]) -> SplitFormula:
    """SplitFormula before the first statement, or the results, with a root. Without a root the first part is empty."""
    whole = SplitFormula([], [], [*body], [*results])
    index = next((index for index, statement in enumerate(body) if _has_root(statement)), len(body))
    users: list[ast.stmt] | list[ast.expr] = [*body[index : index + 1]] or [*results]
    is_choice = any(isinstance(node, ast.If | ast.IfExp) for user in users for node in ast.walk(user))
    if is_choice or not any(map(_has_root, users)):
        return whole
    hoist = _Hoist()
    after = [hoist.visit(deepcopy(statement)) for statement in body[index : index + 1]] + [*body[index + 1 :]]
    new_results = [hoist.visit(deepcopy(result)) for result in results] if index == len(body) else [*results]
    before, moved = _moved_down(body[:index], read(*hoist.roots, *results[1:]))
    return SplitFormula(before, hoist.roots, [*moved, *after], new_results)


class _Hoist(ast.NodeTransformer):
    """Replaces roots by names, to which `roots` assigns them."""

    def __init__(self) -> None:
        self.roots: list[ast.stmt] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not _is_root(node) or any(map(_has_root, node.args)):
            return self.generic_visit(node)
        name = f"{len(self.roots)}_root"
        self.roots.append(ast.fix_missing_locations(ast.Assign([ast.Name(name, ast.Store())], node)))
        return ast.Name(name, ast.Load())


def _is_root(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sqrt"


def _has_root(node: ast.AST) -> bool:
    return any(map(_is_root, ast.walk(node)))


def _moved_down(body: Sequence[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements that compute the names `needed`, and those that may run after these."""
    kept: list[ast.stmt] = []
    moved: list[ast.stmt] = []
    written: set[str] = set()
    for statement in reversed(body):
        targets = {*assigned([statement])}
        if targets & needed or written & (targets | read(statement)):
            kept.insert(0, statement)
            needed = needed | read(statement)
            written |= targets
        else:
            moved.insert(0, statement)
    return kept, moved
