"""The syntax of formulas: parses their source, expands helper functions, evaluates branches on constants, and runs them
by torch's operations and on the host with the numbers of compiled sweeps.

Torch computes `0.7 / x` as `0.7 * (1 / x)`, rounded twice, and powers of float32 elements in float32; compiled sweeps
round once. And `x += y` would write to a tensor that other names may have, or to a gradient.
"""

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from opt_kernels.formulas import functions
from opt_kernels.works import Constant, Constants

FUNCTIONS = (
    "fma",
    "sqrt",
    "exp",
    "log",
    "tanh",
    "power",
    "sign",
    "absolute",
    "maximum",
    "minimum",
    "where",
    "q_pochhammer",
    "floor",
)
OF_SCALARS = ("q_pochhammer", "floor")  # scalars only


_FUNCTIONS = {name: getattr(functions, name) for name in FUNCTIONS}
_parsing = Lock()
Body = list[ast.stmt]
Function = Callable[..., Any]
"""The `scalars` or `update` of a formula, or a helper that they call."""


class FormulaError(ValueError):
    """A formula that cannot be translated."""


@cache
def parameters_of(function: Function) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the positional and of the keyword-only parameters. Raises FormulaError for anything but a function."""
    if not inspect.isfunction(function):
        raise FormulaError(f"{function!r} is not a function; define it with `def` in a file")
    positional: list[str] = []
    named: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        names = named if parameter.kind is parameter.KEYWORD_ONLY else positional
        names.append(parameter.name)
    return tuple(positional), tuple(named)


def parsed(source: str) -> Body:
    """The statements of `source`. One thread parses at a time: the parser of CPython 3.11 counts the depth of its calls
    once for all threads, and raises SystemError if that changed meanwhile (gh-106905)."""
    with _parsing:
        return ast.parse(source).body


def source_of(function: Function) -> Body:
    """The statements of a function as written, without its docstring. Raises FormulaError if it has no source."""
    parameters_of(function)
    name = function.__qualname__
    if hasattr(function, "statements"):  # by `function_of`
        return deepcopy(list(function.statements))
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise FormulaError(f"{name} has no source to translate: {error}; define it with `def` in a file") from None
    if hasattr(function, "__wrapped__"):
        raise FormulaError(f"{name} is decorated, which backends would ignore; leave the decorator out")
    try:
        definition = parsed(source)[0]
    except SyntaxError:  # a lambda among other arguments
        definition = ast.Pass()
    # The source of a lambda may be that of a function around it.
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__code__.co_name:
        raise FormulaError(f"{name} is not defined with `def`; a lambda cannot be translated")
    match definition.body:
        case [ast.Expr(ast.Constant()), *body]:  # a docstring
            return body
    return definition.body


@cache
def body_of(function: Function) -> tuple[ast.stmt, ...]:
    """The statements of a function, with calls of helper functions expanded and module constants as literals.

    Raises FormulaError if it has no source, for a call of anything else than helpers and the functions of
    `opt_kernels.formulas`, for a variable of the name of one of these, and for a wrong number of arguments.
    """
    body = source_of(function)
    positional, named = parameters_of(function)
    variables = {name: ast.Name(name, ast.Load()) for name in (*positional, *named, *assigned(body))}
    expansion = _Expansion(function, {*variables}, {**variables})
    return tuple(map(ast.fix_missing_locations, expansion.statements(body)))


class _Expansion(ast.NodeTransformer):
    """Replaces calls of helper functions by what they compute, and module constants by literals."""

    def __init__(
        self,
        function: Function,
        taken: set[str],  # names of variables of the formula
        local: dict[str, ast.expr],  # the values of the variables of `function`
        callers: tuple[Function, ...] = (),
    ) -> None:
        self.function = function
        self.taken = taken
        self.local = local
        self.callers = callers
        # Assignments before the current statement; None in branches, where every value is part of the expression.
        self.before: Body | None = None
        if shadowing := local.keys() & {*FUNCTIONS}:
            raise FormulaError(
                f"{function.__qualname__} has a variable {min(shadowing)!r}, which is the name of a function; rename it"
            )

    def statements(self, body: Sequence[ast.stmt]) -> Body:
        result: Body = []
        for statement in body:
            if isinstance(statement, ast.If):
                test = self.visit(statement.test)
                yes = self.statements(statement.body)
                no = self.statements(statement.orelse)
                result.append(ast.If(test, yes, no))
            else:
                self.before = []
                statement = self.visit(statement)
                result += [*self.before, statement]
            self.before = None
        return result

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load) or node.id in FUNCTIONS:
            return node
        if node.id in self.local:
            return deepcopy(self.local[node.id])
        value: Any = self.function.__globals__.get(node.id)
        # As a value of a built-in type: the number may be NumPy's, the string a member of an enumeration.
        kind = next((kind for kind in (bool, str, int, float) if isinstance(value, kind)), None)
        if kind is None:
            return node
        literal: Any = kind(value)
        if kind in (int, float) and literal < 0:
            return ast.UnaryOp(ast.USub(), ast.Constant(-literal))
        return ast.Constant(literal)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        return self.generic_visit(as_assignment(node))

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        before = self.before
        self.before = None
        self.generic_visit(node)
        self.before = before
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = ast.unparse(node.func)
        called = self.function.__globals__.get(name, getattr(builtins, name, None))
        if called is pow:
            name = "power"
            called = functions.power
        is_ours = name in FUNCTIONS and called is _FUNCTIONS[name]
        is_helper = inspect.isfunction(called) and name not in FUNCTIONS
        if name in self.local or node.keywords or not (is_ours or is_helper):
            raise FormulaError(
                f"{self.function.__qualname__} calls {ast.unparse(node)}; a formula may call {', '.join(FUNCTIONS)} of "
                "opt_kernels.formulas, by these names, and helper functions of its module, with positional arguments"
            )
        wanted, _ = parameters_of(called)
        is_counted = not any(isinstance(argument, ast.Starred) for argument in node.args)
        if is_counted and len(node.args) != len(wanted):
            raise FormulaError(
                f"{self.function.__qualname__} calls {ast.unparse(node)} with {len(node.args)} arguments; {name} takes "
                f"{len(wanted)}"
            )
        arguments = [self.visit(argument) for argument in node.args]
        if is_helper:
            return self._expanded(called, arguments)
        return ast.Call(ast.Name(name, ast.Load()), arguments, [])

    def _expanded(self, helper: Any, arguments: list[ast.expr]) -> ast.expr:
        """What `helper` returns. Its variables are assigned under new names, or inserted where it reads them."""
        *statements, last = source_of(helper)
        result = last.value if isinstance(last, ast.Return) else None
        positional, named = parameters_of(helper)
        if helper in self.callers or named or result is None:
            raise FormulaError(
                f"{self.function.__qualname__} calls {helper.__qualname__}; a helper takes positional arguments, ends "
                "with `return expression`, and does not call itself"
            )
        inside = _Expansion(helper, self.taken, {}, (*self.callers, helper))
        inside.before = self.before
        for parameter, argument in zip(positional, arguments):
            inside._bind(parameter, argument)
        for statement in statements:
            match as_assignment(statement):
                case ast.Assign([ast.Name(name)], value):
                    inside._bind(name, inside.visit(value))
                case _:
                    raise FormulaError(
                        f"{helper.__qualname__} contains {ast.unparse(statement)!r}; a helper of a formula may contain "
                        "assignments to names and one `return` at the end"
                    )
        expanded: ast.expr = inside.visit(result)
        return expanded

    def _bind(self, name: str, value: ast.expr) -> None:
        if self.before is not None and not isinstance(value, ast.Name | ast.Constant):
            number = 1
            while (fresh := f"{self.function.__name__}_{name}_{number}") in self.taken:
                number += 1
            self.taken.add(fresh)
            self.before.append(ast.Assign([ast.Name(fresh, ast.Store())], value))
            value = ast.Name(fresh, ast.Load())
        self.local[name] = value


def as_assignment(statement: ast.stmt) -> ast.stmt:
    """`x += y` as `x = x + y`, which does not write to a tensor that other names may have. Other statements stay."""
    match statement:
        case ast.AugAssign(ast.Name(name), op, value):
            new = ast.BinOp(ast.Name(name, ast.Load()), op, value)
            return ast.Assign([ast.Name(name, ast.Store())], new)
    return statement


@cache
def scalar_expressions(function: Function) -> tuple[tuple[ast.stmt, ...], tuple[tuple[str, ast.expr], ...]]:
    """The assignments of `scalars`, and the expressions of its scalars. Raises FormulaError for any other form."""
    *statements, last = body_of(function) or (ast.Pass(),)
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Dict):
        raise FormulaError(f'{function.__qualname__} must end with `return {{"name": expression, ...}}`')
    found: dict[str, ast.expr] = {}
    for key, value in zip(last.value.keys, last.value.values):
        if not isinstance(key, ast.Constant):
            raise FormulaError(f"{function.__qualname__} must name its scalars with string literals")
        name = str(key.value)
        if name in found:
            raise FormulaError(f"{function.__qualname__} returns {name!r} twice; rename one of them")
        found[name] = value
    return tuple(statements), tuple(found.items())


def folded(body: Sequence[ast.stmt], constants: Constants) -> Body:
    """The statements that run with these constants, up to the return. Branches on constants alone are resolved."""
    result: Body = []
    for statement in body:
        if not isinstance(statement, ast.If):
            result.append(statement)
        else:
            test = decided(statement.test, constants)
            if isinstance(test, ast.expr):
                result.append(ast.If(test, statement.body, statement.orelse))
            else:
                result += folded(statement.body if test else statement.orelse, constants)
        if result and isinstance(result[-1], ast.Return):
            break
    return result


def decided(test: ast.expr, constants: Constants) -> ast.expr | bool:
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


def function_of(
    body: Sequence[ast.stmt], positional: Sequence[str], named: Sequence[str], *, like: Function, **names: Any
) -> Function:
    """A function of these statements and parameters, with the name and the module's docstring of another one. It may
    call the functions of formulas and `names`."""
    parameters = [*positional, "*", *named] if named else positional
    (head,) = parsed(f"def made({', '.join(parameters)}): pass")
    assert isinstance(head, ast.FunctionDef)
    head.body = list(body)
    module = ast.fix_missing_locations(ast.Module([head], type_ignores=[]))
    code = compile(module, f"<{like.__qualname__} of a formula>", "exec")
    scope: dict[str, Any] = {**_FUNCTIONS, **names, "__doc__": like.__globals__.get("__doc__")}
    exec(code, scope)
    made: Any = scope["made"]
    made.__qualname__ = like.__qualname__
    made.statements = tuple(head.body)
    return made  # type: ignore[no-any-return]


def is_square_or_cube(exponent: ast.expr) -> bool:
    """Whether an exponent is 2 or 3, so that a power is a product."""
    return isinstance(exponent, ast.Constant) and exponent.value in (2, 3)


def is_constant(node: ast.expr, constants: Constants) -> bool:
    """Whether all names in an expression are constants or called functions."""
    return read(node) <= constants.keys()


def evaluated(node: ast.expr, constants: Constants) -> Constant:
    """The value of a constant expression."""
    code = compile(ast.Expression(node), "<formula>", "eval")
    try:
        value: Constant = eval(code, {"__builtins__": {}, **_FUNCTIONS}, dict(constants))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise FormulaError(f"the constant {ast.unparse(node)!r} cannot be computed: {error}") from None
    if not isinstance(value, bool | int | float | str):
        raise FormulaError(f"the constant {ast.unparse(node)!r} is neither a number nor a string")
    return value


def assigned(nodes: Sequence[ast.AST]) -> list[str]:
    """Names that are assigned in `nodes`, in order."""
    found = [node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(name.id for name in found if isinstance(name.ctx, ast.Store)))


def read(*nodes: ast.AST) -> set[str]:
    """Names that occur in `nodes`, except called functions and targets of assignments."""
    inner = [node for root in nodes for node in ast.walk(root)]
    called = {id(node.func) for node in inner if isinstance(node, ast.Call)}
    names = [node for node in inner if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return {name.id for name in names if id(name) not in called}


@cache
def for_torch(update: Function, constants: tuple[str, ...]) -> Function:
    """`update` with each quotient and power rounded once. `constants` are the names that are numbers, not tensors."""
    rounds = _ForTorch(constants)
    return _compiled(update, [rounds.visit(deepcopy(statement)) for statement in body_of(update)])


@cache
def for_host(scalars: Function) -> Function:
    """`scalars` with the module constants that sweeps were compiled with."""
    return _compiled(scalars, list(body_of(scalars)))


def _compiled(function: Function, body: Body) -> Function:
    """A function with this body; `function` itself if it has the same."""
    if [*map(ast.dump, body)] == [*map(ast.dump, source_of(function))]:
        return function
    return function_of(body, *parameters_of(function), like=function, quotient=quotient)


class _ForTorch(ast.NodeTransformer):
    """Replaces `number / b` by `quotient(number, b)` and `a ** b` by `power(a, b)`."""

    def __init__(self, constants: tuple[str, ...]) -> None:
        self.constants = dict.fromkeys(constants, 0.0)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Div) and is_constant(node.left, self.constants):
            name = "quotient"
        elif isinstance(node.op, ast.Pow) and not is_square_or_cube(node.right):
            name = "power"
        else:
            return node
        return ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])


def quotient(a: float, b: Any) -> Any:
    """a / b, rounded once."""
    return torch.full_like(b, a).div_(b) if isinstance(b, Tensor) else a / b
