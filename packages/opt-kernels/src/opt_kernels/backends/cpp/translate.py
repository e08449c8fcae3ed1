"""Generates the C++ source of an update sweep from a formula and the codecs of its states."""

from collections.abc import Sequence

from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.syntax import assigned
from opt_kernels.formulas.translate import Dialect, body_and_results


class Cpp(Dialect):
    """Expressions of float. Names of a formula get a prefix, so that none is a keyword of C++."""

    def name(self, name: str) -> str:
        return f"x_{name}"

    def literal(self, value: float) -> str:
        return f"{value!r}f"

    def call(self, function: str, arguments: list[str]) -> str:
        return f"f_{function}({', '.join(arguments)})"

    def choice(self, condition: str, yes: str, no: str) -> str:
        return f"({condition} ? {yes} : {no})"

    def both(self, conditions: list[str]) -> str:
        return f"({' && '.join(conditions)})"

    def either(self, conditions: list[str]) -> str:
        return f"({' || '.join(conditions)})"

    def negation(self, condition: str) -> str:
        return f"(!{condition})"

    def assignment(self, name: str, value: str) -> str:
        return f"x_{name} = {value};"

    def branch(self, condition: str, yes: list[str], no: list[str]) -> list[str]:
        otherwise = ["} else {", *no] if no else []
        return [f"if ({condition}) {{", *yes, *otherwise, "}"]


def source_of(formula: Formula, codecs: Sequence[str]) -> str:
    """The source of the sweep of `formula` with these codecs, which are types of `update.h`."""
    return "\n".join((*_row(formula), *_update(formula), *_run(formula, codecs), *_span(codecs), SWEEP))


def _row(formula: Formula) -> list[str]:
    names = "".join(f", s_{name}" for name in formula.scalar_names)
    return [f"struct Row {{ float grad_scale, step_low, step_high{names}; }};"]


def _update(formula: Formula) -> list[str]:
    """The function `update`: the formula on one element."""
    constants = dict(formula.constants)
    body, results = body_and_results(formula.update, formula.result_names, constants)
    dialect = Cpp(dict(formula.constants))
    values = ["p", *(state.name for state in formula.states)]
    references = ", ".join(f"float &v_{name}" for name in values)
    scalars = formula.scalar_names
    local = [name for name in assigned(body) if name not in {*values, "g", *scalars}]
    return [
        f"static inline void update(float x_g, {references}, const Row &row) {{",
        *(f"float x_{name} = v_{name};" for name in values),
        *(f"float x_{name} = row.s_{name};" for name in scalars),
        *(f"float x_{name} = 0.0f;" for name in local),
        *dialect.statements(body, frozenset(scalars)),
        *(f"const float new_{name} = {dialect.expression(result)};" for name, result in zip(values, results)),
        *(f"v_{name} = new_{name};" for name in values),
        "}",
    ]


def _run(formula: Formula, codecs: Sequence[str]) -> list[str]:
    """The struct `Run`, in the order of the columns of `cpp/sweep.py`."""
    kept = [f"using Codec{i} = {codec};" for i, codec in enumerate(codecs)]
    fields = ["MAIN *main", "OUT *out", "const GRAD *grad"]
    for i in range(len(formula.states)):
        fields += [f"Codec{i}::Code *codes{i}", f"float *scales{i}"]
    types = [field.rsplit("*", 1)[0] + "*" for field in fields]
    values = [f"({type_})table[{column} * n + i]" for column, type_ in enumerate(types)]
    values += [f"table[{len(types) + column} * n + i]" for column in range(3)]
    return [
        *kept,
        f"struct Run {{ {'; '.join(fields)}; int64_t numel, row, first; }};",
        "static inline Run run_at(const int64_t *table, int64_t n, int64_t i) {",
        f"return {{{', '.join(values)}}};",
        "}",
    ]


def _span(codecs: Sequence[str]) -> list[str]:
    """The function `update_span`, which updates elements [begin, end) of a run."""
    states = range(len(codecs))
    values = "".join(f", s{i}" for i in states)
    element = [
        "float p = read_main(main, out, i);",
        f"update(read(grad[i]) * row.grad_scale, p{values}, row);",
        "write_main<HAS_OUT, STOCHASTIC_ROUNDING>(main, out, i, p, run.first, step);",
    ]
    if all(codec.startswith("Plain<") for codec in codecs):
        return _plain_span(states, element)
    return _coded_span(states, element)


def _plain_span(states: range, element: list[str]) -> list[str]:
    return [
        "constexpr int64_t UNIT = 1;",
        "static inline void update_span(const Run &run, const Row row, int64_t begin, int64_t end) {",
        POINTERS,
        *(f"Codec{i}::Code *__restrict codes{i} = run.codes{i};" for i in states),
        "for (int64_t i = begin; i < end; i++) {",
        *(f"float s{i} = read(codes{i}[i]);" for i in states),
        *element,
        *(f"write(codes{i}[i], s{i});" for i in states),
        "}",
        "}",
    ]


def _coded_span(states: range, element: list[str]) -> list[str]:
    """Group by group: all codes are decoded, then all elements updated, then all values encoded."""
    return [
        "constexpr int64_t UNIT = GROUP;",
        "static inline __attribute__((always_inline)) void update_group(",
        "    const Run &run, const Row row, int64_t begin, int64_t n) {",
        POINTERS,
        "prefetch(main, begin + AHEAD);",
        "prefetch(grad, begin + AHEAD);",
        *(f"Codec{i}::Code *codes{i} = run.codes{i} + begin;" for i in states),
        *(f"float *scale{i} = Codec{i}::scale_at(run.scales{i}, begin);" for i in states),
        *(f"alignas(64) float values{i}[GROUP];" for i in states),
        *(f"int32_t largest{i} = 0;" for i in states),
        *(f"Codec{i}::decode(codes{i}, scale{i}, values{i}, n);" for i in states),
        "for (int64_t k = 0; k < n; k++) {",
        "const int64_t i = begin + k;",
        *(f"float s{i} = values{i}[k];" for i in states),
        *element,
        *(f"values{i}[k] = Codec{i}::kept(s{i});" for i in states),
        *(f"largest{i} = at_least(largest{i}, magnitude(values{i}[k]));" for i in states),
        "}",
        *(f"Codec{i}::encode(values{i}, largest{i}, codes{i}, scale{i}, n);" for i in states),
        "}",
        "static inline void update_span(const Run &run, const Row row, int64_t begin, int64_t end) {",
        "for (; begin + GROUP <= end; begin += GROUP) update_group(run, row, begin, GROUP);",
        "if (begin < end) update_group(run, row, begin, end - begin);",
        "}",
    ]


POINTERS = """
MAIN *__restrict main = run.main;
OUT *__restrict out = run.out;
const GRAD *__restrict grad = run.grad;
const uint32_t step = uint32_t(row.step_low) + (uint32_t(row.step_high) << 16);
"""

SWEEP = """
static int64_t sweep(const Task &task, int64_t begin, int64_t end) {
    const Row *rows = (const Row *)task.extra;
    int64_t start = 0;
    for (int64_t i = 0; i < task.num_runs && start < end; i++) {
        Run run = run_at(task.table, task.num_runs, i);
        int64_t from = larger(begin - start, 0), to = smaller(end - start, run.numel);
        start += run.numel;
        from = from / UNIT * UNIT;  // groups are not cut between threads
        to = to == run.numel ? to : to / UNIT * UNIT;
        if (from < to) update_span(run, rows[run.row], from, to);
    }
    return 0;
}
"""
