"""Formulas as source text of a compiled language: expressions and statements in a `Dialect`."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opt_kernels.formulas.syntax import FormulaError, body_of, decided, evaluated, folded, is_constant

COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="
}  # fmt: skip
OPERATORS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class Dialect(ABC):
    """How a language writes what formulas are made of."""

    def __init__(self, constants: Mapping[str, bool | float]) -> None:
        self.constants = constants

    @abstractmethod
    def name(self, name: str) -> str: ...

    @abstractmethod
    def literal(self, value: float) -> str: ...

    @abstractmethod
    def call(self, function: str, arguments: list[str]) -> str: ...

    @abstractmethod
    def choice(self, condition: str, yes: str, no: str) -> str: ...

    @abstractmethod
    def both(self, conditions: list[str]) -> str: ...

    @abstractmethod
    def either(self, conditions: list[str]) -> str: ...

    @abstractmethod
    def negation(self, condition: str) -> str: ...

    @abstractmethod
    def assignment(self, name: str, value: str) -> str: ...

    @abstractmethod
    def branch(self, condition: str, yes: list[str], no: list[str]) -> list[str]: ...

    def operation(self, operator: str, left: str, right: str) -> str:
        return f"({left} {operator} {right})"

    def expression(self, node: ast.expr) -> str:
        """The expression in this language. Raises FormulaError for one that formulas do not have."""
        if is_constant(node, self.constants):
            return self.literal(float(evaluated(node, self.constants)))
        match node:
            case ast.BinOp(left, ast.Pow(), right):
                return self.call("power", [self.expression(left), self.expression(right)])
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return self.operation(OPERATORS[type(op)], self.expression(left), self.expression(right))
            case ast.UnaryOp(ast.USub(), operand):
                return f"(-{self.expression(operand)})"
            case ast.Name(name):
                return self.name(name)
            case ast.Call(ast.Name("where"), [condition, yes, no]):
                return self.choice(self.condition(condition), self.expression(yes), self.expression(no))
            case ast.IfExp(test, yes, no):
                remaining = decided(test, self.constants)
                if isinstance(remaining, bool):
                    return self.expression(yes if remaining else no)
                return self.choice(self.condition(remaining), self.expression(yes), self.expression(no))
            case ast.Call(ast.Name(function), arguments):
                return self.call(function, [self.expression(argument) for argument in arguments])
        raise FormulaError(f"a formula may not contain {ast.unparse(node)!r}; allowed are arithmetic, names and calls")

    def condition(self, node: ast.expr) -> str:
        """A comparison, or several."""
        match node:
            case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
                return f"({self.expression(left)} {COMPARISONS[type(op)]} {self.expression(right)})"
            case ast.BoolOp(ast.And(), values):
                return self.both([self.condition(value) for value in values])
            case ast.BoolOp(ast.Or(), values):
                return self.either([self.condition(value) for value in values])
            case ast.UnaryOp(ast.Not(), operand):
                return self.negation(self.condition(operand))
        raise FormulaError(f"a formula may not branch on {ast.unparse(node)!r}; compare two numbers")

    def statements(self, body: Sequence[ast.stmt], scalars: frozenset[str]) -> list[str]:
        """Assignments and branches, line by line."""
        lines: list[str] = []
        for statement in folded(list(body), self.constants):
            match statement:
                case ast.Assign([ast.Name(name)], value):
                    lines.append(self.assignment(name, self.expression(value)))
                case ast.AugAssign(ast.Name(name), op, value):
                    new = ast.BinOp(ast.Name(name), op, value)
                    lines.append(self.assignment(name, self.expression(new)))
                case ast.If(test, yes, no):
                    _check_branch(test, scalars | self.constants.keys())
                    lines += self.branch(
                        self.condition(test), self.statements(yes, scalars), self.statements(no, scalars)
                    )
                case ast.Pass():
                    pass
                case _:
                    raise FormulaError(
                        f"a formula may not contain {ast.unparse(statement)!r}; allowed are assignments to names, "
                        "`if` on scalars and constants, and one `return` at the end"
                    )
        return lines


def _check_branch(test: ast.expr, allowed: frozenset[str]) -> None:
    """Raises FormulaError for a branch on elements: those of one parameter would go different ways."""
    wrong = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)} - allowed
    if wrong:
        raise FormulaError(
            f"`if {ast.unparse(test)}` branches on elements ({', '.join(sorted(wrong))}); branch on scalars and "
            "constants, and choose between elements with where(condition, a, b)"
        )


def body_and_results(
    update: Callable[..., Any], names: Sequence[str], constants: Mapping[str, bool | float]
) -> tuple[list[ast.stmt], list[ast.expr]]:
    """The statements of an update, and its results: the new main, then the new states, which `names` says."""
    *body, last = folded(body_of(update), constants)
    value = last.value if isinstance(last, ast.Return) else None
    results = list(value.elts) if isinstance(value, ast.Tuple) else [] if value is None else [value]
    if len(results) != len(names):
        raise FormulaError(f"{update.__qualname__} must end with `return {', '.join(names)}`, the new values")
    return body, results


def check(
    update: Callable[..., Any], names: Sequence[str], scalars: frozenset[str], constants: Mapping[str, bool | float]
) -> None:
    """Raises FormulaError for an update that cannot be translated."""
    body, results = body_and_results(update, names, constants)
    dialect = Check(constants)
    dialect.statements(body, scalars)
    for result in results:
        dialect.expression(result)


class Check(Dialect):
    """A language of no words: what it can be written in, every other can."""

    def name(self, name: str) -> str:
        return ""

    def literal(self, value: float) -> str:
        return ""

    def call(self, function: str, arguments: list[str]) -> str:
        return ""

    def choice(self, condition: str, yes: str, no: str) -> str:
        return ""

    def both(self, conditions: list[str]) -> str:
        return ""

    def either(self, conditions: list[str]) -> str:
        return ""

    def negation(self, condition: str) -> str:
        return ""

    def assignment(self, name: str, value: str) -> str:
        return ""

    def branch(self, condition: str, yes: list[str], no: list[str]) -> list[str]:
        return []


def assigned(body: Sequence[ast.stmt]) -> list[str]:
    """Names that the statements assign, in order."""
    found = [
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return list(dict.fromkeys(found))
