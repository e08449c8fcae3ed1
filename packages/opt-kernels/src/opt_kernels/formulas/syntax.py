"""The syntax of formulas: parses their source, evaluates branches on constants and checks their calls."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from opt_kernels.formulas import functions
from opt_kernels.formulas.numbers import Constant

FUNCTIONS = (
    "fma", "sqrt", "exp", "log", "power", "sign", "absolute", "maximum", "minimum", "where", "q_pochhammer",
    "floor",
)  # fmt: skip
OF_SCALARS = ("power", "q_pochhammer", "floor")  # scalars only


_FUNCTIONS = {name: getattr(functions, name) for name in FUNCTIONS}


class FormulaError(ValueError):
    """A formula that cannot be translated."""


ARITIES = {name: len(inspect.signature(function).parameters) for name, function in _FUNCTIONS.items()}


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the positional and of the keyword-only parameters. Raises FormulaError for anything but a function."""
    if not inspect.isfunction(function):
        raise FormulaError(f"{function!r} is not a function; define it with `def` in a file")
    parameters = inspect.signature(function).parameters.values()
    named = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY), named


def _parsed(function: Callable[..., Any], source: str) -> ast.stmt:
    try:
        return ast.parse(source).body[0]
    except SyntaxError:  # a lambda among other arguments
        raise FormulaError(
            f"{function.__qualname__} is not defined with `def`; a lambda cannot be translated"
        ) from None


@cache
def body_of(function: Callable[..., Any]) -> tuple[ast.stmt, ...]:
    """The statements of a function, without its docstring. Raises FormulaError if it has no source."""
    parameters_of(function)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise FormulaError(
            f"{function.__qualname__} has no source to translate: {error}; define it with `def` in a file"
        ) from None
    if hasattr(function, "__wrapped__"):
        raise FormulaError(
            f"{function.__qualname__} is decorated, which backends would ignore; leave the decorator out"
        )
    definition = _parsed(function, source)
    # The source of a lambda may be that of a function around it.
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__code__.co_name:
        raise FormulaError(f"{function.__qualname__} is not defined with `def`; a lambda cannot be translated")
    body: list[ast.stmt] = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    _check_names(function, body)
    return tuple(body)


def _check_names(function: Callable[..., Any], body: list[ast.stmt]) -> None:
    """Raise FormulaError for a call of anything but the functions of `opt_kernels.formulas`, for a variable of the name
    of one, and for a wrong number of arguments."""
    shadowing = {*chain.from_iterable(parameters_of(function)), *assigned(body)} & {*FUNCTIONS}
    if shadowing:
        raise FormulaError(
            f"{function.__qualname__} has a variable {min(shadowing)!r}, which is the name of a function; rename it"
        )
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
            called = inspect.unwrap(function).__globals__.get(name)
            if name not in FUNCTIONS or called is not getattr(functions, name) or node.keywords:
                raise FormulaError(
                    f"{function.__qualname__} calls {ast.unparse(node)}; a formula may call {', '.join(FUNCTIONS)} of "
                    "opt_kernels.formulas, by these names and with positional arguments"
                )
            if len(node.args) != ARITIES[name] and not any(isinstance(one, ast.Starred) for one in node.args):
                raise FormulaError(
                    f"{function.__qualname__} calls {ast.unparse(node)} with {len(node.args)} arguments; {name} takes "
                    f"{ARITIES[name]}"
                )


@cache
def scalar_expressions(
    function: Callable[..., Any],
) -> tuple[tuple[ast.stmt, ...], tuple[tuple[str, ast.expr], ...]]:
    """The assignments of `scalars`, and the expressions of its scalars. Raises FormulaError for any other form."""
    *statements, last = body_of(function) or (ast.Pass(),)
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Dict):
        raise FormulaError(f'{function.__qualname__} must end with `return {{"name": expression, ...}}`')
    names = [key.value for key in last.value.keys if isinstance(key, ast.Constant)]
    if len(names) != len(last.value.keys):
        raise FormulaError(f"{function.__qualname__} must name its scalars with string literals")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise FormulaError(f"{function.__qualname__} returns {twice[0]!r} twice; rename one of them")
    return tuple(statements), tuple(zip(map(str, names), last.value.values))


def folded(body: tuple[ast.stmt, ...] | list[ast.stmt], constants: Mapping[str, Constant]) -> list[ast.stmt]:
    """The statements that run with these constants, up to the return. Branches on constants alone are resolved."""
    result: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            test = decided(statement.test, constants)
            if isinstance(test, ast.expr):
                result.append(ast.If(test, statement.body, statement.orelse))
            else:
                result += folded(statement.body if test else statement.orelse, constants)
        else:
            result.append(statement)
        if result and isinstance(result[-1], ast.Return):
            break
    return result


def decided(test: ast.expr, constants: Mapping[str, Constant]) -> ast.expr | bool:
    """A condition simplified by constants: True or False, or the part that remains."""
    if is_constant(test, constants):
        return bool(evaluated(test, constants))
    if not isinstance(test, ast.BoolOp):
        return test
    deciding = isinstance(test.op, ast.Or)  # if one part has this value, so has the whole
    parts = [decided(part, constants) for part in test.values]
    if deciding in parts:
        return deciding
    remaining = [part for part in parts if isinstance(part, ast.expr)]
    return remaining[0] if len(remaining) == 1 else ast.BoolOp(test.op, remaining)


def is_constant(node: ast.expr, constants: Mapping[str, Constant]) -> bool:
    """Whether all names in an expression are constants or called functions."""
    called = {id(inner.func) for inner in ast.walk(node) if isinstance(inner, ast.Call)}
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and id(inner) not in called]
    return all(name.id in constants for name in names)


def evaluated(node: ast.expr, constants: Mapping[str, Constant]) -> Constant:
    """The value of a constant expression."""
    code = compile(ast.Expression(node), "<formula>", "eval")
    try:
        value: Constant = eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(constants))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise FormulaError(f"the constant {ast.unparse(node)!r} cannot be computed: {error}") from None
    if not isinstance(value, bool | int | float | str):
        raise FormulaError(f"the constant {ast.unparse(node)!r} is neither a number nor a string")
    return value


def assigned(body: Sequence[ast.stmt]) -> list[str]:
    """Names that the statements assign, in order."""
    found = [
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return list(dict.fromkeys(found))
