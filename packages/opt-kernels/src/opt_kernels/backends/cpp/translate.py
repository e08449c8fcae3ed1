"""Generates the C++ source of an update sweep from a formula and the codecs of its states."""

from collections.abc import Sequence
from string import Template

from opt_kernels.backends.cpp.chunks import POINTERS, Cpp, coded_span, locals_of
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.translate import Lines, each


def has_codes(codecs: Sequence[str]) -> bool:
    """Whether any of these types of codecs stores codes, which have scales."""
    return not all(codec.startswith("Plain<") for codec in codecs)


def source_of(formula: Formula, codecs: Sequence[str]) -> str:
    """The source of the sweep of `formula` with these codecs, which are types of `update.h`."""
    names = "".join(each(", s_#", formula.scalar_names))
    states = range(len(codecs))
    row = f"struct Row {{ float grad_scale, step_low, step_high{names}; }};"
    aliases = [f"using Codec{i} = {codec};" for i, codec in zip(states, codecs)]
    # The function `update_span`, which updates elements [begin, end) of a run.
    span = coded_span(formula) if has_codes(codecs) else [*_update(formula), _plain_span(states)]
    return "\n".join((row, *aliases, _run(states), *span, SWEEP))


def _update(formula: Formula) -> Lines:
    """The function `update`: the formula on one element."""
    body, results = formula.body_and_results()
    dialect = Cpp(dict(formula.constants))
    values = formula.result_names
    references = ", ".join(each("float &v_#", values))
    lines = [f"static inline void update(float x_g, {references}, const Row &row) {{"]
    lines += each("float x_# = v_#;", values)
    lines += each("float x_# = row.s_#;", formula.scalar_names)
    lines += locals_of(body, {*values, "g", *formula.scalar_names})
    lines += dialect.statements(body)
    lines += [f"const float new_{name} = {dialect.expression(result)};" for name, result in zip(values, results)]
    return [*lines, *each("v_# = new_#;", values), "}"]


RUN = """
static inline uint32_t step_of(const Row &row) {
return uint32_t(row.step_low) + (uint32_t(row.step_high) << 16);
}
struct Noises {
Noise main;
$members
Noises(const Run &run, const Row &row) : main(run.first, step_of(row))$noises {}
};"""


def _run(states: range) -> str:
    """The structs `Run`, in the order of the columns of `update.py`, and `Noises`."""
    types = {"main": "MAIN *", "out": "OUT *", "grad": "const GRAD *"}
    for i in states:
        types |= {f"codes{i}": f"Codec{i}::Code *", f"scales{i}": "float *"}
    fields = "; ".join(f"{type_}{name}" for name, type_ in types.items())
    casts = [*each("(#)", types.values()), "", "", ""]  # numel, row and first are integers, like the table
    values = ", ".join(f"{cast}table[{column} * n + i]" for column, cast in enumerate(casts))
    members = "".join(each("StateNoise<Codec#> state#;", states))
    noises = "".join(f", state{i}(run.first, step_of(row), {i + 1})" for i in states)
    return (
        f"struct Run {{ {fields}; int64_t numel, row, first; }};\n"
        f"static inline Run run_at(const int64_t *table, int64_t n, int64_t i) {{ return {{{values}}}; }}"
        + Template(RUN).substitute(members=members, noises=noises)
    )


PLAIN_SPAN = """
// For n elements of one block of noise.
static inline __attribute__((always_inline)) void update_block(
    const Run &run, const Row &row, const Noise &noise, int64_t begin, int64_t n$parameters) {
$pointers
for (int64_t k = 0; k < n; k++) {
const int64_t i = begin + k;
$reads
float p = read_main(main, out, i);
update(read(grad[i]) * row.grad_scale, p$values, row);
write_main<HAS_OUT, STOCHASTIC_ROUNDING>(main, out, i, p, noise);
$stores
}
}
constexpr int64_t UNIT = 1;
// By blocks of noise, or at once without it. Loops of a known length take no branches.
static inline void update_span(const Run &run, const Row row, int64_t begin, int64_t end) {
const Noises noise(run, row);
constexpr bool ROUNDS = false$rounds;
for (int64_t at = begin; at < end;) {
const int64_t left = NOISE_BLOCK - (run.first + at) % NOISE_BLOCK;
const int64_t n = ROUNDS ? smaller(end - at, left) : end - at;
if (ROUNDS && n == NOISE_BLOCK) update_block(run, row, noise.main, at, NOISE_BLOCK$words);
else update_block(run, row, noise.main, at, n$words);
at += n;
}
}"""
# In the source of each state.
STATE = {
    "parameters": ", GroupNoise noise#",
    "reads": "float s# = read(codes#[i]);",
    "values": ", s#",
    "stores": "Codec#::store(codes#[i], s#, Codec#::STOCHASTIC ? noise#[k] : 0);",
    "rounds": " || Codec#::STOCHASTIC",
    "words": ", Codec#::STOCHASTIC ? noise.state#.from(at) : GroupNoise()",
}


def _plain_span(states: range) -> str:
    """`update_span` of states without codes."""
    parts = {name: "".join(each(pattern, states)) for name, pattern in STATE.items()}
    pointers = POINTERS + "".join(each("Codec#::Code *__restrict codes# = run.codes#;", states))
    return Template(PLAIN_SPAN).substitute(parts, pointers=pointers)


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
