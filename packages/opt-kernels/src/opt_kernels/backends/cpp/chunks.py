"""Generates the loops of a sweep over states with codecs, which take a chunk of groups through one stage at a time.

The stages of a chunk are: decode every state, run the formula up to its first roots, run the rest of it, and encode
every state. Each is a loop of few operations, which keeps a processor busier than one loop of all of them: it starts
few elements ahead of those that wait for a root and for the division after it. The roots of a chunk of elements are in
an array between the two loops.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.syntax import assigned, decided
from opt_kernels.formulas.translate import Dialect, body_and_results
from opt_kernels.works import Constant


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

    def branch(self, condition: str, yes: list[str], no: list[str]) -> list[str]:
        otherwise = ["} else {", *no] if no else []
        return [f"if ({condition}) {{", *yes, *otherwise, "}"]


# The tensors of a run, as functions that update its elements need them.
POINTERS = """
MAIN *__restrict main = run.main;
OUT *__restrict out = run.out;
const GRAD *__restrict grad = run.grad;
const uint32_t step = uint32_t(row.step_low) + (uint32_t(row.step_high) << 16);
"""


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


ARGUMENTS = "const Run &run, const Row &row, Chunk &chunk, int64_t begin, int64_t n"


def coded_span(formula: Formula, num_states: int) -> list[str]:
    """`update_span` and its stages."""
    parts = _ChunkPlan(formula)
    states = range(num_states)
    return [
        "constexpr int64_t UNIT = GROUP;",
        *_chunk(parts, states),
        *_before(parts),
        *_after(parts),
        *_without_outliers(states),
        *_span(parts, states),
    ]


class _ChunkPlan:
    """A formula in two parts, with the names that each needs."""

    def __init__(self, formula: Formula) -> None:
        constants = dict(formula.constants)
        body, results = body_and_results(formula.update, formula.result_names, constants)
        self.constants: Mapping[str, Constant] = constants
        self.scalars = formula.scalar_names
        self.states = [state.name for state in formula.states]
        self.cut = cut(body, results)
        self.main, *self.results = self.cut.results
        first = [*self.cut.before, *self.cut.roots]
        second = self.cut.after
        self.fixed = frozenset(self.scalars) - {*assigned(first), *assigned(second)}
        later = {*assigned(second)}
        self.is_early = [bool(self.cut.roots) and not read(result) & later for result in self.results]
        late = [result for result, early in zip(self.results, self.is_early) if not early]
        needed = read(*second, self.main, *late)
        known = ["p", "g", *self.states, *assigned(first)]
        # Names that the second part reads from the chunk; a main that the first leaves as it is stays in memory.
        self.kept = [
            name for name in dict.fromkeys(known) if name in needed and (name != "p" or "p" in assigned(first))
        ]
        if not self.cut.roots:
            self.kept = []
        # Those that equal an early result, or its root: the chunk stores one of the two anyway, depending on the codec.
        self.stored = dict(self._stored(copies(self.cut.before, constants)))

    def _stored(self, same: Mapping[str, str]) -> Iterator[tuple[str, "_Stored"]]:
        early = {
            same.get(result.id, result.id): i
            for i, (result, is_early) in enumerate(zip(self.results, self.is_early))
            if is_early and isinstance(result, ast.Name)
        }
        squares = self.cut.squares()
        for name in self.kept:
            of = squares.get(name, name)
            if (i := early.get(same.get(of, of))) is not None:
                yield name, _Stored(i, f"{'!' if name in squares else ''}Codec{i}::KEEPS")

    def loads_main(self) -> bool:
        """Whether the first part needs the main: also if it assigns it, which it may do in a branch only."""
        early = [result for result, is_early in zip(self.results, self.is_early) if is_early]
        return "p" in {*read(*self.cut.before, *self.cut.roots, *early), *assigned(self.cut.before)}

    def kept_at(self, name: str) -> str:
        """Where the second part finds a name that the first has computed."""
        stored = self.stored.get(name)
        return f"({stored.when} ? chunk.values{stored.state} : chunk.y_{name})[j]" if stored else f"chunk.y_{name}[j]"

    def unless_stored(self, name: str) -> str:
        """The condition under which the first part has to write a name."""
        return f"if constexpr (!({self.stored[name].when})) " if name in self.stored else ""


class _Stored(NamedTuple):
    """A state whose encoded values in the chunk are those of a name, if a condition in C++ holds."""

    state: int
    when: str


def _chunk(parts: _ChunkPlan, states: range) -> list[str]:
    """The struct `Chunk`: decoded or encoded states with their largest values, and what the first part leaves."""
    return [
        "struct Chunk {",
        *(f"alignas(64) float values{i}[CHUNK];" for i in states),
        *(f"alignas(64) float y_{name}[CHUNK];" for name in parts.kept),
        *(f"int32_t largest{i}[CHUNK / GROUP];" for i in states),
        "int32_t largest_root[CHUNK / GROUP];",
        "};",
    ]


def _before(parts: _ChunkPlan) -> list[str]:
    """The function `before`: the first part on a group, which is `begin` elements into the chunk's run."""
    if not parts.cut.roots:
        return []
    dialect = Cpp(dict(parts.constants))
    body = [*parts.cut.before, *parts.cut.roots]
    inputs = [*(["p"] if parts.loads_main() else []), "g", *parts.states]
    return [
        f"static inline __attribute__((always_inline)) void before({ARGUMENTS}, int64_t at) {{",
        POINTERS,
        *_largest(parts, True),
        "int32_t largest_root = 0;",
        "for (int64_t k = 0; k < n; k++) {",
        "const int64_t i = begin + k, j = at + k;",
        *_loaded(parts, inputs, []),
        *_locals(parts, body, {*inputs}),
        *dialect.statements(body, frozenset(parts.scalars)),
        *_results(parts, dialect, True),
        *(f"{parts.unless_stored(name)}chunk.y_{name}[j] = x_{name};" for name in parts.kept),
        *(f"largest_root = at_least(largest_root, magnitude(x_{name}));" for name in assigned(parts.cut.roots)),
        "}",
        *_stored(parts, True),
        "chunk.largest_root[at / GROUP] = largest_root;",
        "}",
    ]


def _after(parts: _ChunkPlan) -> list[str]:
    """The function `after`: the rest, with `EXACT` divisions by scalars where these are extreme."""
    dialect = _After(parts)
    is_whole = not parts.cut.roots
    inputs = ["g", *parts.states] if is_whole else []
    body = dialect.statements(parts.cut.after, frozenset(parts.scalars))
    results = _results(parts, dialect, False)
    main = dialect.expression(parts.main)
    names = {*inputs, "p", *parts.kept}
    return [
        "template <bool EXACT>",
        f"static inline __attribute__((always_inline)) void after({ARGUMENTS}, int64_t at) {{",
        POINTERS,
        *(f"const float inverse_{name} = 1.0f / row.s_{name};" for name in dialect.divisors),
        *_largest(parts, False),
        "for (int64_t k = 0; k < n; k++) {",
        "const int64_t i = begin + k, j = at + k;",
        *_loaded(parts, [*([] if "p" in parts.kept else ["p"]), *inputs], parts.kept),
        *_locals(parts, parts.cut.after, names),
        *body,
        f"const float new_p = {main};",
        *results,
        "write_main<HAS_OUT, STOCHASTIC_ROUNDING>(main, out, i, new_p, run.first, step);",
        "}",
        *_stored(parts, False),
        "}",
        "static inline bool is_moderate(const Row &row) {",
        f"return {' && '.join([f'is_moderate(row.s_{name})' for name in dialect.divisors]) or 'true'};",
        "}",
    ]


class _After(Cpp):
    """The dialect of the second part: a root divided by a scalar takes no division."""

    def __init__(self, parts: _ChunkPlan) -> None:
        super().__init__(dict(parts.constants))
        self.roots = {*assigned(parts.cut.roots)}
        self.scalars = parts.fixed
        self.divisors: dict[str, None] = {}

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.BinOp(ast.Name(root), ast.Div(), ast.Name(scalar)) if (
                root in self.roots and scalar in self.scalars
            ):
                self.divisors[scalar] = None
                return f"root_over<EXACT>(x_{root}, x_{scalar}, inverse_{scalar})"
        return super().expression(node)


def _loaded(parts: _ChunkPlan, inputs: Sequence[str], kept: Sequence[str]) -> list[str]:
    """Declarations of inputs of the formula, and of what its first part has left in the chunk."""
    sources = {"p": "read_main(main, out, i)", "g": "read(grad[i]) * row.grad_scale"}
    sources |= {name: f"chunk.values{i}[j]" for i, name in enumerate(parts.states)}
    return [
        *(f"float x_{name} = {sources[name]};" for name in inputs),
        *(f"float x_{name} = {parts.kept_at(name)};" for name in kept),
        *(f"float x_{name} = row.s_{name};" for name in parts.scalars if name not in kept),
    ]


def _locals(parts: _ChunkPlan, body: Sequence[ast.stmt], declared: set[str]) -> list[str]:
    return [f"float x_{name} = 0.0f;" for name in assigned(body) if name not in declared | {*parts.scalars}]


def _results(parts: _ChunkPlan, dialect: Cpp, early: bool) -> list[str]:
    """Writes the new states that are known in this part, as they will be encoded."""
    found = [(i, result) for i, result in enumerate(parts.results) if parts.is_early[i] is early]
    values = [f"const float new{i} = Codec{i}::kept({dialect.expression(result)});" for i, result in found]
    stores = [f"chunk.values{i}[j] = new{i};" for i, _ in found]
    largest = [f"largest{i} = at_least(largest{i}, magnitude(new{i}));" for i, _ in found]
    return [*values, *stores, *largest]


def _largest(parts: _ChunkPlan, early: bool) -> list[str]:
    return [f"int32_t largest{i} = 0;" for i, is_early in enumerate(parts.is_early) if is_early is early]


def _stored(parts: _ChunkPlan, early: bool) -> list[str]:
    chosen = [i for i, is_early in enumerate(parts.is_early) if is_early is early]
    return [f"chunk.largest{i}[at / GROUP] = largest{i};" for i in chosen]


def _without_outliers(states: range) -> list[str]:
    """The function `drop_outliers`: resets all states of elements of which one would spoil its group."""
    is_outlier = " || ".join(f"(Codec{i}::SHARES && magnitude(chunk.values{i}[j]) >= OUTLIER)" for i in states)
    return [
        "static __attribute__((noinline, cold)) void drop_outliers(Chunk &chunk, int64_t at, int64_t n) {",
        *(f"int32_t largest{i} = 0;" for i in states),
        "for (int64_t j = at; j < at + n; j++) {",
        f"const bool is_outlier = {is_outlier};",
        *(f"chunk.values{i}[j] = is_outlier ? 0.0f : chunk.values{i}[j];" for i in states),
        *(f"largest{i} = at_least(largest{i}, magnitude(chunk.values{i}[j]));" for i in states),
        "}",
        *(f"chunk.largest{i}[at / GROUP] = largest{i};" for i in states),
        "}",
    ]


def _span(parts: _ChunkPlan, states: range) -> list[str]:
    decode = (
        "Codec{i}::decode(run.codes{i} + at + j, Codec{i}::scale_at(run.scales{i}, at), chunk.values{i} + k + j, part);"
    )
    encode = (
        "Codec{i}::encode(chunk.values{i} + k, chunk.largest{i}[k / GROUP], run.codes{i} + at, "
        "Codec{i}::scale_at(run.scales{i}, at), n);"
    )
    before = "before(run, row, chunk, at, n, k);" if parts.cut.roots else ""
    is_finite = " && chunk.largest_root[k / GROUP] < INFINITE" if parts.cut.roots else ""
    has_outlier = " || ".join(f"(Codec{i}::SHARES && chunk.largest{i}[k / GROUP] >= OUTLIER)" for i in states)
    calls = [
        # States are interleaved, so that the divisions of one overlap with the decoding of the next.
        f"for (int64_t j = 0; j < n; j += part) {{ {' '.join(decode.format(i=i) for i in states)} }}",
        # Spread over the loops: a processor waits when many lines of memory are fetched at once.
        f"{{ prefetch(run.grad, at + AHEAD); {before} }}",
        f"{{ prefetch(run.main, at + AHEAD); if (moderate{is_finite}) after<false>(run, row, chunk, at, n, k); "
        "else after<true>(run, row, chunk, at, n, k); }",
        f"{{ if (__builtin_expect({has_outlier}, false)) drop_outliers(chunk, k, n); {encode.format(i=0)} }}",
        *(encode.format(i=i) for i in states[1:]),
    ]
    return [
        "static inline __attribute__((always_inline)) void update_chunk(",
        "    const Run &run, const Row &row, Chunk &chunk, int64_t begin, int64_t size, int64_t n, bool moderate) {",
        "const int64_t part = n == GROUP ? PART : n;",
        *(f"for (int64_t k = 0, at = begin; k < size; k += GROUP, at += GROUP) {call}" for call in calls),
        "}",
        "static inline void update_span(const Run &run, const Row row, int64_t begin, int64_t end) {",
        "Chunk chunk;",
        "const bool moderate = is_moderate(row);",
        "while (begin + GROUP <= end) {",
        "const int64_t size = smaller((end - begin) / GROUP * GROUP, CHUNK);",
        "update_chunk(run, row, chunk, begin, size, GROUP, moderate);",
        "begin += size;",
        "}",
        "if (begin < end) update_chunk(run, row, chunk, begin, 1, end - begin, moderate);",
        "}",
    ]
