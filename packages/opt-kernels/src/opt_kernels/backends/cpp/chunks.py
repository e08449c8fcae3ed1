"""Generates the loops of a sweep over states with codecs, which take a chunk of groups through one stage at a time.

The stages of a chunk are: decode every state, run the formula up to its first roots, run the rest of it, and encode
every state. Each is a loop of few operations, which keeps a processor busier than one loop of all of them: it starts
few elements ahead of those that wait for a root and for the division after it. The roots of a chunk of elements are in
an array between the two loops.
"""

import ast
from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.syntax import Body, assigned, decided, read
from opt_kernels.formulas.translate import Dialect, Lines, each
from opt_kernels.works import Constants


class Cpp(Dialect):
    """Expressions of float."""

    BOTH = "({} && {})"
    EITHER = "({} || {})"
    NEGATION = "(!{})"
    CHOICE = "({} ? {} : {})"
    ASSIGNMENT = "x_{} = {};"

    def literal(self, value: float) -> str:
        return f"{value!r}f"

    def call(self, function: str, arguments: list[str]) -> str:
        return f"f_{function}({', '.join(arguments)})"

    def branch(self, condition: str, yes: Lines, no: Lines) -> Lines:
        otherwise = ["} else {", *no] if no else []
        return [f"if ({condition}) {{", *yes, *otherwise, "}"]


# The tensors of a run, as functions that update its elements need them.
POINTERS = """
MAIN *__restrict main = run.main;
OUT *__restrict out = run.out;
const GRAD *__restrict grad = run.grad;
"""


class SplitFormula(NamedTuple):
    """A formula in two parts. `roots` are assigned at the end of the first, under names that no formula can have."""

    before: Body
    roots: Body
    after: Body
    results: list[ast.expr]  # of the whole formula, in terms of the roots


def copies(body: Sequence[ast.stmt], constants: Constants) -> dict[str, str]:
    """Map each name that equals another one after `body` to the first name that has this value."""
    same: dict[str, str] = {}
    for statement in body:
        written = assigned([statement])
        same = {name: first for name, first in same.items() if name not in written and first not in written}
        match statement:
            case ast.Assign([ast.Name(name)], value):
                other = _chosen(value, constants)
                if isinstance(other, ast.Name) and other.id != name:
                    same[name] = same.get(other.id, other.id)
    return same


def _chosen(value: ast.expr, constants: Constants) -> ast.expr:
    """`value`, or the branch of it that constants choose."""
    if not isinstance(value, ast.IfExp):
        return value
    test = decided(value.test, constants)
    if not isinstance(test, bool):
        return value
    return _chosen(value.body if test else value.orelse, constants)


def cut(body: Sequence[ast.stmt], results: Sequence[ast.expr]) -> SplitFormula:
    """Split before the first statement, or the results, with a root. Without a root the first part is empty."""
    index = next((index for index, statement in enumerate(body) if _has_root(statement)), len(body))
    users: Sequence[ast.AST] = body[index : index + 1] or results
    inside = [node for user in users for node in ast.walk(user)]
    if not any(map(_is_root, inside)) or any(isinstance(node, ast.If | ast.IfExp) for node in inside):
        return SplitFormula([], [], [*body], [*results])
    hoist = _Hoist()
    hoisted = [hoist.visit(deepcopy(user)) for user in users]
    before, moved = _moved_down(body[:index], read(*hoist.roots, *results[1:]))
    if users is results:
        return SplitFormula(before, hoist.roots, moved, hoisted)
    after = [*moved, *hoisted, *body[index + 1 :]]
    return SplitFormula(before, hoist.roots, after, [*results])


class _Hoist(ast.NodeTransformer):
    """Replaces roots by names, to which `roots` assigns them."""

    def __init__(self) -> None:
        self.roots: Body = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not _is_root(node) or any(map(_has_root, node.args)):
            return self.generic_visit(node)
        name = f"{len(self.roots)}_root"
        root = ast.Assign([ast.Name(name, ast.Store())], node)
        self.roots.append(ast.fix_missing_locations(root))
        return ast.Name(name, ast.Load())


def _is_root(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sqrt"


def _has_root(node: ast.AST) -> bool:
    return any(map(_is_root, ast.walk(node)))


def _moved_down(body: Sequence[ast.stmt], needed: set[str]) -> tuple[Body, Body]:
    """The statements that compute the names `needed`, and those that may run after these."""
    kept: Body = []
    moved: Body = []
    written: set[str] = set()
    for statement in reversed(body):
        targets = {*assigned([statement])}
        inputs = read(statement)
        if targets & needed or written & (targets | inputs):
            kept.insert(0, statement)
            needed = needed | inputs
            written |= targets
        else:
            moved.insert(0, statement)
    return kept, moved


ARGUMENTS = "const Run &run, const Row &row, const Noises &noise, Chunk &chunk, int64_t begin, int64_t n"


def coded_span(formula: Formula) -> Lines:
    """`update_span` and its stages."""
    plan = _ChunkPlan(formula)
    states = range(len(plan.states))
    stages = [*_before(plan), *_after(plan), *_without_outliers(states)]
    return ["constexpr int64_t UNIT = GROUP;", *_chunk(plan), *stages, *_span(plan, states)]


class _ChunkPlan:
    """A formula in two parts, with the names that each needs. States and their results are known by number."""

    def __init__(self, formula: Formula) -> None:
        self.constants = dict(formula.constants)
        self.scalars = formula.scalar_names
        self.states = [state.name for state in formula.states]
        body, results = formula.body_and_results()
        self.cut = cut(body, results)
        self.main, *self.results = self.cut.results
        in_first = assigned([*self.cut.before, *self.cut.roots])
        in_second = assigned(self.cut.after)
        self.fixed = frozenset(self.scalars).difference(in_first, in_second)
        self.early: list[int] = []  # the results that the first part knows
        self.late: list[int] = []
        for i, result in enumerate(self.results):
            if self.cut.roots and read(result).isdisjoint(in_second):
                self.early.append(i)
            else:
                self.late.append(i)
        # Names that the second part reads from the chunk; a main that the first leaves as it is stays in memory.
        self.kept: list[str] = []
        if self.cut.roots:
            late = [self.results[i] for i in self.late]
            needed = read(*self.cut.after, self.main, *late)
            if "p" not in in_first:
                needed.discard("p")
            self.kept = [name for name in dict.fromkeys(["p", "g", *self.states, *in_first]) if name in needed]
        self.stored = self._stored()

    def _stored(self) -> dict[str, "_Stored"]:
        """The kept names that equal an early result, or its root: the chunk stores one of the two anyway, depending on
        the codec."""
        same = copies(self.cut.before, self.constants)
        states: dict[str, int] = {}
        for i in self.early:
            result = self.results[i]
            if isinstance(result, ast.Name):
                first = same.get(result.id, result.id)
                states[first] = i
        squares: dict[str, str] = {}  # of the roots of a single name, this name
        for statement in self.cut.roots:
            match statement:
                case ast.Assign([ast.Name(root)], ast.Call(args=[ast.Name(square)])):
                    squares[root] = square
        found: dict[str, _Stored] = {}
        for name in self.kept:
            value = squares.get(name, name)
            first = same.get(value, value)
            if first in states:
                state = states[first]
                keeps = f"Codec{state}::KEEPS"
                found[name] = _Stored(state, f"!{keeps}" if name in squares else keeps)
        return found


class _Stored(NamedTuple):
    """A state whose encoded values in the chunk are those of a name, if a condition in C++ holds."""

    state: int
    when: str


LARGEST = "int32_t largest# = 0;"
STORE_LARGEST = "chunk.largest#[at / GROUP] = largest#;"
LOOP = """\
for (int64_t k = 0; k < n; k++) {
const int64_t i = begin + k, j = at + k;"""


def _chunk(plan: _ChunkPlan) -> Lines:
    """The struct `Chunk`: decoded or encoded states with their largest values, and what the first part leaves."""
    states = range(len(plan.states))
    lines = each("alignas(64) float values#[CHUNK];", states)
    lines += each("alignas(64) float y_#[CHUNK];", plan.kept)
    lines += each("int32_t largest#[CHUNK / GROUP];", states)
    lines.append("int32_t largest_root[CHUNK / GROUP];")
    return ["struct Chunk {", *lines, "};"]


def _before(plan: _ChunkPlan) -> Lines:
    """The function `before`: the first part on a group, which is `begin` elements into the chunk's run."""
    if not plan.cut.roots:
        return []
    dialect = Cpp(plan.constants)
    body = [*plan.cut.before, *plan.cut.roots]
    early = [plan.results[i] for i in plan.early]
    inputs = ["g", *plan.states]
    # Also a main that it assigns: it may do so in a branch only.
    if "p" in assigned(body) or "p" in read(*body, *early):
        inputs.insert(0, "p")
    lines = [
        f"static inline __attribute__((always_inline)) void before({ARGUMENTS}, int64_t at) {{",
        POINTERS,
        *each(LARGEST, plan.early),
        "int32_t largest_root = 0;",
        LOOP,
    ]
    lines += _loaded(plan, inputs, [])
    lines += locals_of(body, {*inputs, *plan.scalars})
    lines += dialect.statements(body)
    lines += _results(plan, dialect, plan.early)
    for name in plan.kept:
        condition = f"if constexpr (!({plan.stored[name].when})) " if name in plan.stored else ""
        lines.append(f"{condition}chunk.y_{name}[j] = x_{name};")
    lines += each("largest_root = at_least(largest_root, magnitude(x_#));", assigned(plan.cut.roots))
    return [*lines, "}", *each(STORE_LARGEST, plan.early), "chunk.largest_root[at / GROUP] = largest_root;", "}"]


def _after(plan: _ChunkPlan) -> Lines:
    """The function `after`: the rest, with `EXACT` divisions by scalars where these are extreme."""
    dialect = _After(plan)
    inputs = [] if plan.cut.roots else ["g", *plan.states]
    if "p" not in plan.kept:
        inputs.insert(0, "p")
    body = dialect.statements(plan.cut.after)
    results = _results(plan, dialect, plan.late)
    main = dialect.expression(plan.main)
    lines = [
        "template <bool EXACT>",
        f"static inline __attribute__((always_inline)) void after({ARGUMENTS}, int64_t at) {{",
        POINTERS,
    ]
    lines += each("const float inverse_# = 1.0f / row.s_#;", dialect.divisors)
    lines += [*each(LARGEST, plan.late), LOOP]
    lines += _loaded(plan, inputs, plan.kept)
    lines += locals_of(plan.cut.after, {*inputs, *plan.kept, *plan.scalars})
    lines += [*body, f"const float new_p = {main};", *results]
    lines += ["write_main<HAS_OUT, STOCHASTIC_ROUNDING>(main, out, i, new_p, noise.main);", "}"]
    lines += [*each(STORE_LARGEST, plan.late), "}"]
    is_moderate = " && ".join(each("is_moderate(row.s_#)", dialect.divisors))
    return [*lines, "static inline bool is_moderate(const Row &row) {", f"return {is_moderate or 'true'};", "}"]


class _After(Cpp):
    """The dialect of the second part: a root divided by a scalar takes no division."""

    def __init__(self, plan: _ChunkPlan) -> None:
        super().__init__(plan.constants)
        self.roots = {*assigned(plan.cut.roots)}
        self.scalars = plan.fixed
        self.divisors: dict[str, None] = {}

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.BinOp(ast.Name(root), ast.Div(), ast.Name(scalar)) if (
                root in self.roots and scalar in self.scalars
            ):
                self.divisors[scalar] = None
                return f"root_over<EXACT>(x_{root}, x_{scalar}, inverse_{scalar})"
        return super().expression(node)


def _loaded(plan: _ChunkPlan, inputs: Sequence[str], kept: Sequence[str]) -> Lines:
    """Declarations of inputs of the formula, and of what its first part has left in the chunk."""
    sources = {"p": "read_main(main, out, i)", "g": "read(grad[i]) * row.grad_scale"}
    sources |= {name: f"chunk.values{i}[j]" for i, name in enumerate(plan.states)}
    values = [(name, sources[name]) for name in inputs]
    for name in kept:
        array = f"chunk.y_{name}"
        if name in plan.stored:
            state, when = plan.stored[name]
            array = f"({when} ? chunk.values{state} : {array})"
        values.append((name, f"{array}[j]"))
    values += [(name, f"row.s_{name}") for name in plan.scalars if name not in kept]
    return [f"float x_{name} = {value};" for name, value in values]


def locals_of(body: Sequence[ast.stmt], declared: set[str]) -> Lines:
    """Declarations of the variables of `body` that are not in `declared`."""
    return each("float x_# = 0.0f;", [name for name in assigned(body) if name not in declared])


def _results(plan: _ChunkPlan, dialect: Cpp, chosen: Sequence[int]) -> Lines:
    """Writes the new states of these numbers, as they will be encoded."""
    values = [f"const float new{i} = Codec{i}::kept({dialect.expression(plan.results[i])});" for i in chosen]
    stores = each("chunk.values#[j] = new#;", chosen)
    return [*values, *stores, *each("largest# = at_least(largest#, magnitude(new#));", chosen)]


def _without_outliers(states: range) -> Lines:
    """The function `drop_outliers`: resets all states of elements of which one would spoil its group."""
    is_outlier = " || ".join(each("(Codec#::SHARES && magnitude(chunk.values#[j]) >= OUTLIER)", states))
    return [
        "static __attribute__((noinline, cold)) void drop_outliers(Chunk &chunk, int64_t at, int64_t n) {",
        *each(LARGEST, states),
        "for (int64_t j = at; j < at + n; j++) {",
        f"const bool is_outlier = {is_outlier};",
        *each("chunk.values#[j] = is_outlier ? 0.0f : chunk.values#[j];", states),
        *each("largest# = at_least(largest#, magnitude(chunk.values#[j]));", states),
        "}",
        *each(STORE_LARGEST, states),
        "}",
    ]


DECODE = "Codec#::decode(run.codes# + at + j, Codec#::scale_at(run.scales#, at), chunk.values# + k + j, part);"
ENCODE = (
    "const GroupNoise of_group = Codec#::STOCHASTIC ? noise.state#.group(room, at) : GroupNoise(); "
    "Codec#::encode(chunk.values# + k, chunk.largest#[k / GROUP], run.codes# + at, "
    "Codec#::scale_at(run.scales#, at), n, of_group);"
)
SPAN = """\
static inline void update_span(const Run &run, const Row row, int64_t begin, int64_t end) {
Chunk chunk;
const bool moderate = is_moderate(row);
const Noises noise(run, row);
while (begin + GROUP <= end) {
const int64_t size = smaller((end - begin) / GROUP * GROUP, CHUNK);
update_chunk(run, row, noise, chunk, begin, size, GROUP, moderate);
begin += size;
}
if (begin < end) update_chunk(run, row, noise, chunk, begin, 1, end - begin, moderate);
}"""


def _span(plan: _ChunkPlan, states: range) -> Lines:
    """The functions `update_chunk`, which takes a chunk through all stages, and `update_span`."""
    before = "before(run, row, noise, chunk, at, n, k);" if plan.cut.roots else ""
    is_finite = " && chunk.largest_root[k / GROUP] < INFINITE" if plan.cut.roots else ""
    has_outlier = " || ".join(each("(Codec#::SHARES && chunk.largest#[k / GROUP] >= OUTLIER)", states))
    decode = " ".join(each(DECODE, states))
    first, *others = each(ENCODE, states)
    stages = [
        # States are interleaved, so that the divisions of one overlap with the decoding of the next.
        f"for (int64_t j = 0; j < n; j += part) {{ {decode} }}",
        # Spread over the loops: a processor waits when many lines of memory are fetched at once.
        f"{{ prefetch(run.grad, at + AHEAD); {before} }}",
        f"{{ prefetch(run.main, at + AHEAD); if (moderate{is_finite}) after<false>(run, row, noise, chunk, at, n, k); "
        "else after<true>(run, row, noise, chunk, at, n, k); }",
        f"{{ if (__builtin_expect({has_outlier}, false)) drop_outliers(chunk, k, n); {first} }}",
        *each("{ # }", others),
    ]
    return [
        "static inline __attribute__((always_inline)) void update_chunk(",
        "    const Run &run, const Row &row, const Noises &noise, Chunk &chunk,",
        "    int64_t begin, int64_t size, int64_t n, bool moderate) {",
        "const int64_t part = n == GROUP ? PART : n;",
        "alignas(64) uint32_t room[GROUP];",
        *each("for (int64_t k = 0, at = begin; k < size; k += GROUP, at += GROUP) #", stages),
        "}",
        SPAN,
    ]
