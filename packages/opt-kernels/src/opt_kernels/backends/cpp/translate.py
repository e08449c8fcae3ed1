"""Generates the C++ source of an update sweep from a formula and the codecs of its states."""

from collections.abc import Sequence

from opt_kernels.backends.cpp.chunks import POINTERS, Cpp, coded_span, locals_of
from opt_kernels.formulas.formula import Formula


def has_codes(codecs: Sequence[str]) -> bool:
    """Whether any of these types of codecs stores codes, which have scales."""
    return not all(codec.startswith("Plain<") for codec in codecs)


def source_of(formula: Formula, codecs: Sequence[str]) -> str:
    """The source of the sweep of `formula` with these codecs, which are types of `update.h`."""
    names = "".join(f", s_{name}" for name in formula.scalar_names)
    row = f"struct Row {{ float grad_scale, step_low, step_high{names}; }};"
    # The function `update_span`, which updates elements [begin, end) of a run.
    num_states = len(codecs)
    plain_span = [*_update(formula), *_plain_block(num_states), *_plain_span(num_states)]
    span = coded_span(formula) if has_codes(codecs) else plain_span
    return "\n".join((row, *_run(codecs), *span, SWEEP))


def _update(formula: Formula) -> list[str]:
    """The function `update`: the formula on one element."""
    body, results = formula.body_and_results()
    dialect = Cpp(dict(formula.constants))
    values = formula.result_names
    references = ", ".join(f"float &v_{name}" for name in values)
    lines = [f"static inline void update(float x_g, {references}, const Row &row) {{"]
    lines += [f"float x_{name} = v_{name};" for name in values]
    lines += [f"float x_{name} = row.s_{name};" for name in formula.scalar_names]
    lines += locals_of(body, {*values, "g", *formula.scalar_names})
    lines += dialect.statements(body)
    lines += [f"const float new_{name} = {dialect.expression(result)};" for name, result in zip(values, results)]
    lines += [f"v_{name} = new_{name};" for name in values]
    return [*lines, "}"]


def _run(codecs: Sequence[str]) -> list[str]:
    """The struct `Run`, in the order of the columns of `update.py`."""
    types = {"main": "MAIN *", "out": "OUT *", "grad": "const GRAD *"}
    for i in range(len(codecs)):
        types |= {f"codes{i}": f"Codec{i}::Code *", f"scales{i}": "float *"}
    fields = "; ".join(f"{type_}{name}" for name, type_ in types.items())
    noises = ["main(run.first, step_of(row))"]
    noises += [f"state{i}(run.first, step_of(row), {i + 1})" for i in range(len(codecs))]
    casts = [f"({type_})" for type_ in types.values()]
    casts += ["", "", ""]  # numel, row and first are integers, like the table
    values = ", ".join(f"{cast}table[{column} * n + i]" for column, cast in enumerate(casts))
    aliases = [f"using Codec{i} = {codec};" for i, codec in enumerate(codecs)]
    return [
        *aliases,
        f"struct Run {{ {fields}; int64_t numel, row, first; }};",
        "static inline Run run_at(const int64_t *table, int64_t n, int64_t i) {",
        f"return {{{values}}};",
        "}",
        "static inline uint32_t step_of(const Row &row) {",
        "return uint32_t(row.step_low) + (uint32_t(row.step_high) << 16);",
        "}",
        "struct Noises {",
        "Noise main;",
        *(f"StateNoise state{i};" for i in range(len(codecs))),
        f"Noises(const Run &run, const Row &row) : {', '.join(noises)} {{}}",
        "};",
    ]


def _plain_block(num_states: int) -> list[str]:
    """The function `update_block`, for n elements whose noise words are multiples from those of the first on."""
    states = range(num_states)
    values = "".join(f", s{i}" for i in states)
    words = "".join(f", uint32_t word{i}" for i in states)
    lines = [
        "static inline __attribute__((always_inline)) void update_block(",
        f"    const Run &run, const Row &row, const Noise &noise, int64_t begin, int64_t n{words}) {{",
        POINTERS,
    ]
    lines += [f"Codec{i}::Code *__restrict codes{i} = run.codes{i};" for i in states]
    lines += ["for (int64_t k = 0; k < n; k++) {", "const int64_t i = begin + k;"]
    lines += [f"float s{i} = read(codes{i}[i]);" for i in states]
    lines += [
        "float p = read_main(main, out, i);",
        f"update(read(grad[i]) * row.grad_scale, p{values}, row);",
        "write_main<HAS_OUT, STOCHASTIC_ROUNDING>(main, out, i, p, noise);",
    ]
    lines += [f"Codec{i}::store(codes{i}[i], s{i}, word{i} + uint32_t(k) * GOLDEN);" for i in states]
    return [*lines, "}", "}"]


def _plain_span(num_states: int) -> list[str]:
    """`update_span`: by blocks of noise, or at once without it."""
    states = range(num_states)
    rounds = " || ".join(["false", *(f"Codec{i}::STOCHASTIC" for i in states)])
    words = "".join(f", Codec{i}::STOCHASTIC ? noise.state{i}.first(at) : 0" for i in states)
    lines = [
        "constexpr int64_t UNIT = 1;",
        "static inline void update_span(const Run &run, const Row row, int64_t begin, int64_t end) {",
        "const Noises noise(run, row);",
        f"constexpr bool ROUNDS = {rounds};",
        "for (int64_t at = begin; at < end;) {",
        "const int64_t left = NOISE_BLOCK - (run.first + at) % NOISE_BLOCK;",
        "const int64_t n = ROUNDS ? smaller(end - at, left) : end - at;",
    ]
    # Loops of a known length take no branches.
    lines += [
        f"if (ROUNDS && n == NOISE_BLOCK) update_block(run, row, noise.main, at, NOISE_BLOCK{words});",
        f"else update_block(run, row, noise.main, at, n{words});",
        "at += n;",
    ]
    return [*lines, "}", "}"]


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
