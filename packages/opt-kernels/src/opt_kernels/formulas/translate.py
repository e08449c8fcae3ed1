"""Translation of formulas to the source of a compiled language, which a `Dialect` describes."""

import ast
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from math import isfinite

from opt_kernels.formulas import syntax
from opt_kernels.works import Constants

COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
TINY = 2.0**-149  # the smallest positive float32
HUGE = (2 - 2**-23) * 2.0**127  # the largest float32
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

Lines = list[str]
"""Lines of source."""


def each(pattern: str, items: Iterable[object]) -> Lines:
    """Lines, or parts of them: `pattern` with each item in place of `#`."""
    return [pattern.replace("#", str(item)) for item in items]


class Dialect:
    """The syntax of a target language: its patterns of text, and the methods that write its source. Names of a formula
    get a prefix, so that none of them is a keyword there. By default `literal`, `call` and `branch` return no text."""

    # Patterns of conditions.
    BOTH = "{} {}"
    EITHER = "{} {}"
    NEGATION = "{}"
    CHOICE = "{} {} {}"  # by a condition, of two values
    ASSIGNMENT = "{} {}"  # of a name and its value

    def __init__(self, constants: Constants) -> None:
        self.constants = constants

    def name(self, name: str) -> str:
        return f"x_{name}"

    def literal(self, value: float) -> str:
        return ""

    def call(self, function: str, arguments: list[str]) -> str:
        return ""

    def branch(self, condition: str, yes: Lines, no: Lines) -> Lines:
        return []

    def assignment(self, name: str, value: str) -> str:
        return self.ASSIGNMENT.format(name, value)

    def operation(self, operator: str, left: str, right: str) -> str:
        return f"({left} {operator} {right})"

    def raised(self, base: ast.expr, exponent: ast.expr) -> str:
        """base ** exponent: a product for squares and cubes, else the function `power`."""
        if syntax.is_square_or_cube(exponent):
            x = self.expression(base)
            square = self.operation("*", x, x)
            return square if syntax.evaluated(exponent, {}) == 2 else self.operation("*", square, x)
        return self.call("power", [self.expression(base), self.expression(exponent)])

    def expression(self, node: ast.expr) -> str:
        """The expression in this language. Raises FormulaError for an expression that formulas do not support."""
        if syntax.is_constant(node, self.constants):
            value = syntax.evaluated(node, self.constants)
            if isinstance(value, str):
                raise syntax.FormulaError(
                    f"{ast.unparse(node)!r} is a string; formulas may compare strings, but compute with numbers only"
                )
            return self.literal(float(value))
        match node:
            case ast.BinOp(left, ast.Pow(), right):
                return self.raised(left, right)
            case ast.BinOp(_, ast.Div(), right) if self._is_zero(right):
                raise syntax.FormulaError(f"{ast.unparse(node)!r} divides by zero")
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                operator = OPERATORS[type(op)]
                return self.operation(operator, self.expression(left), self.expression(right))
            case ast.UnaryOp(ast.USub(), operand):
                return f"(-{self.expression(operand)})"
            case ast.Name(name):
                return self.name(name)
            case ast.Call(ast.Name("where"), [condition, yes, no]):
                return self.CHOICE.format(self.condition(condition), self.expression(yes), self.expression(no))
            case ast.IfExp(test, yes, no):
                remaining = syntax.decided(test, self.constants)
                if isinstance(remaining, bool):
                    return self.expression(yes if remaining else no)
                return self.CHOICE.format(self.condition(remaining), self.expression(yes), self.expression(no))
            case ast.Call(ast.Name(function), arguments):
                return self.call(function, [self.expression(argument) for argument in arguments])
        hint = "; in scalars a // b is floor(a / b)" if isinstance(node, ast.BinOp) else ""
        raise syntax.FormulaError(
            f"a formula may not contain {ast.unparse(node)!r}; allowed are + - * / **, names and calls{hint}"
        )

    def _is_zero(self, node: ast.expr) -> bool:
        return syntax.is_constant(node, self.constants) and not syntax.evaluated(node, self.constants)

    def condition(self, node: ast.expr) -> str:
        """A comparison, or a logical combination of comparisons."""
        match node:
            case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
                operator = COMPARISONS[type(op)]
                return f"({self.expression(left)} {operator} {self.expression(right)})"
            case ast.BoolOp(op, values):
                pattern = self.BOTH if isinstance(op, ast.And) else self.EITHER
                return reduce(pattern.format, map(self.condition, values))
            case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as op, right):
                pattern = self.BOTH if isinstance(op, ast.BitAnd) else self.EITHER
                return pattern.format(self.condition(left), self.condition(right))
            case ast.UnaryOp(ast.Not(), operand):
                return self.NEGATION.format(self.condition(operand))
        raise syntax.FormulaError(
            f"a formula may not branch on {ast.unparse(node)!r}; compare two numbers, and put comparisons into "
            "parentheses to combine them, as in (a > 0) & (b > 0)"
        )

    def statements(self, body: Sequence[ast.stmt]) -> Lines:
        """Assignments and branches as lines of source."""
        lines: Lines = []
        for statement in syntax.folded(list(body), self.constants):
            match statement:
                case ast.Assign([ast.Name(name)], value):
                    lines.append(self.assignment(name, self.expression(value)))
                case ast.If():
                    lines += self.conditional(statement)
                case ast.Pass():
                    pass
                case _:
                    raise syntax.FormulaError(
                        f"a formula may not contain {ast.unparse(statement)!r}; allowed are assignments to names, "
                        "`if` on scalars and constants, and one `return` at the end"
                    )
        return lines

    def conditional(self, statement: ast.If) -> Lines:
        """A branch as lines of source."""
        condition = self.condition(statement.test)
        return self.branch(condition, self.statements(statement.body), self.statements(statement.orelse))


def body_and_results(
    update: syntax.Function, names: Sequence[str], constants: Constants
) -> tuple[syntax.Body, list[ast.expr]]:
    """The statements of an update, and the expressions of its results in `names`: the new main and states."""
    *body, last = syntax.folded(syntax.body_of(update), constants) or [ast.Pass()]
    results: list[ast.expr] = []
    match last:
        case ast.Return(ast.Tuple(values)):
            results = values
        case ast.Return(ast.expr() as value):
            results = [value]
    (main, _, *states), _ = syntax.parameters_of(update)
    updated = (main, *states)
    if len(results) != len(updated):
        raise syntax.FormulaError(f"{update.__qualname__} must end with `return {', '.join(updated)}`, the new values")
    return body, [result for name, result in zip(updated, results) if name in names]


def elements_among(body: Sequence[ast.stmt], elements: Collection[str]) -> set[str]:
    """The names that have one value for each element, whichever branches run: `elements`, and variables that are
    computed from such names in every assignment. Others may be scalars."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    names = {*elements, *syntax.assigned(assignments)}
    while True:
        from_scalars = [node for node in assignments if names.isdisjoint(syntax.read(node))]
        scalars = names.intersection(syntax.assigned(from_scalars))
        if not scalars:
            return names
        names -= scalars


def check(update: syntax.Function, names: Sequence[str], scalars: frozenset[str], constants: Constants) -> None:
    """Raise FormulaError for an update that cannot be translated, or reads an undefined name."""
    body, results = body_and_results(update, names, constants)
    dialect = Check(constants, {*names, "g", *scalars, *constants}, update.__qualname__, scalars)
    dialect.statements(body)
    for result in results:
        dialect.expression(result)


def check_scalars(scalars: syntax.Function, constants: Constants) -> None:
    """Raise FormulaError for scalars that cannot be translated, or read an undefined name."""
    body, values = syntax.scalar_expressions(scalars)
    known = frozenset(syntax.parameters_of(scalars)[1])
    numbers = known | {*syntax.assigned(body)}
    dialect = _CheckScalars(constants, known, scalars.__qualname__, numbers)
    dialect.statements(body)
    for _, value in values:
        dialect.expression(value)


class Check(Dialect):
    """A dialect without output: a formula that it accepts can be translated to every other dialect."""

    def __init__(self, constants: Constants, known: Collection[str], function: str, scalars: frozenset[str]) -> None:
        super().__init__(constants)
        self.known = {*known}  # names that have a value, whichever branches ran
        self.function = function
        self.scalars = scalars | constants.keys()

    def _check_branch(self, test: ast.expr) -> None:
        """Raise FormulaError for a branch on elements, because the elements of a parameter may differ."""
        if wrong := syntax.read(test) - self.scalars:
            raise syntax.FormulaError(
                f"`if {ast.unparse(test)}` branches on elements ({', '.join(sorted(wrong))}); branch on scalars and "
                "constants, and choose between elements with where(condition, a, b)"
            )

    def expression(self, node: ast.expr) -> str:
        if isinstance(node, ast.IfExp):
            self._check_branch(node.test)
        return super().expression(node)

    def condition(self, node: ast.expr) -> str:
        elements = syntax.read(node) - self.scalars
        if elements and isinstance(node, ast.BoolOp | ast.UnaryOp):
            raise syntax.FormulaError(  # a tensor of elements has no single truth value in Python
                f"{self.function}: {ast.unparse(node)!r} of elements ({', '.join(sorted(elements))}); combine "
                "comparisons of elements with & and |, in parentheses: where((a > 0) & (b > 0), x, y)"
            )
        return super().condition(node)

    def name(self, name: str) -> str:
        if name not in self.known:
            raise syntax.FormulaError(
                f"{self.function} reads {name}, which is not defined there; allowed are "
                f"{', '.join(sorted(self.known)) or 'keyword-only parameters'}. Assign a variable in both branches of "
                "an `if`, and read a state that depends on a choice inside an `if` on it; constants of its module are "
                "numbers or strings"
            )
        return ""

    def conditional(self, statement: ast.If) -> Lines:
        """Check both branches. Of the names that they assign, those of both are known afterwards."""
        self._check_branch(statement.test)
        self.condition(statement.test)
        before = self.known
        ends: list[set[str]] = []
        for branch in (statement.body, statement.orelse):
            self.known = {*before}
            self.statements(branch)
            ends.append(self.known)
        self.known = ends[0] & ends[1]
        return []

    def literal(self, value: float) -> str:
        if not TINY <= abs(value) <= HUGE and value != 0:
            raise syntax.FormulaError(f"{self.function} has the constant {value!r}, which is not a float32 number")
        return ""

    def call(self, function: str, arguments: list[str]) -> str:
        if function in syntax.OF_SCALARS:
            raise syntax.FormulaError(f"{self.function} calls {function} on elements, but only scalars may")
        return ""

    def assignment(self, name: str, value: str) -> str:
        if name in self.constants:
            raise syntax.FormulaError(
                f"{self.function} assigns {name}, which is a choice: sweeps are compiled for the value it was declared "
                "with; assign another name"
            )
        self.known.add(name)
        return ""


class _CheckScalars(Check):
    """Checks the scalars of a formula, which are float64 and may call all functions."""

    def literal(self, value: float) -> str:
        if not isfinite(value):
            raise syntax.FormulaError(f"{self.function} has the constant {value!r}; constants are finite")
        return ""

    def call(self, function: str, arguments: list[str]) -> str:
        return ""
