"""Generates the C++ source of an update sweep from a formula and the codecs of its states."""

from collections.abc import Sequence

from opt_kernels.backends.cpp.chunks import POINTERS, Cpp, coded_span
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.syntax import assigned
from opt_kernels.formulas.translate import body_and_results


def has_codes(codecs: Sequence[str]) -> bool:
    """Whether any of these types of codecs stores codes, which have scales."""
    return not all(codec.startswith("Plain<") for codec in codecs)


def source_of(formula: Formula, codecs: Sequence[str]) -> str:
    """The source of the sweep of `formula` with these codecs, which are types of `update.h`."""
    names = "".join(f", s_{name}" for name in formula.scalar_names)
    row = f"struct Row {{ float grad_scale, step_low, step_high{names}; }};"
    is_coded = has_codes(codecs)
    # The function `update_span`, which updates elements [begin, end) of a run.
    span = coded_span(formula, len(codecs)) if is_coded else [*_update(formula), *_plain_span(range(len(codecs)))]
    return "\n".join((row, *_run(formula, codecs), *span, SWEEP))


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
    """The struct `Run`, in the order of the columns of `update.py`."""
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


def _plain_span(states: range) -> list[str]:
    values = "".join(f", s{i}" for i in states)
    return [
        "constexpr int64_t UNIT = 1;",
        "static inline void update_span(const Run &run, const Row row, int64_t begin, int64_t end) {",
        POINTERS,
        *(f"Codec{i}::Code *__restrict codes{i} = run.codes{i};" for i in states),
        "for (int64_t i = begin; i < end; i++) {",
        *(f"float s{i} = read(codes{i}[i]);" for i in states),
        "float p = read_main(main, out, i);",
        f"update(read(grad[i]) * row.grad_scale, p{values}, row);",
        "write_main<HAS_OUT, STOCHASTIC_ROUNDING>(main, out, i, p, run.first, step);",
        *(f"write(codes{i}[i], s{i});" for i in states),
        "}",
        "}",
    ]


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
