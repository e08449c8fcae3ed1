"""A formula as Triton kernels, written as Python source and compiled from it, and their launch over the chunk table.

One kernel computes the scalar block, a row for each group; the other sweeps the chunk table. A row holds whether to
proceed, the gradient scale, the step (an int32 in the float's bits), then the formula's scalars.
"""

import linecache
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from opt_kernels.backends.elements import in_order, parts_of, rounds_stochastically
from opt_kernels.backends.tables import launching_on
from opt_kernels.backends.triton.formats import LaunchFormats, triton_dtype
from opt_kernels.backends.triton.launches import cut_sweeps, launch_options, sweeps
from opt_kernels.backends.triton.quantize import scheme
from opt_kernels.backends.triton.scalars import CHANGING, Row, numbers_on
from opt_kernels.codecs import Codecs, StateCodec
from opt_kernels.formulas.formula import Formula, number_of
from opt_kernels.formulas.syntax import FormulaError, read, scalar_expressions
from opt_kernels.formulas.translate import Dialect, Lines, each, elements_among
from opt_kernels.works import Batch, Scalar, Skip

SCALARS_AT = 3  # lanes of a row before the formula's scalars

HEADER = """
from opt_kernels.backends.triton import jit, tl
from opt_kernels.backends.triton.lanes import divide, larger, load, pointer, raised, root, sign, smaller, tanh
from opt_kernels.backends.triton.quantize import no_outlier, read_state, write_state
from opt_kernels.backends.triton.scalars import any_power, q_pochhammer
from opt_kernels.backends.triton.lanes import noise_of_state, read_main, write_main

"""

# Calls of the functions of formulas, where elements and scalars do not differ.
CALLS = {
    "maximum": "larger({}, {})",
    "minimum": "smaller({}, {})",
    "sign": "sign({})",
    "absolute": "tl.abs({})",
    "fma": "tl.fma({}, {}, {})",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "tanh": "tanh({})",
}


class Kernels(NamedTuple):
    """The kernels of a formula."""

    fill: Any  # compiled-from-source functions have no type that a checker knows
    sweep: Any
    row_width: int  # float32 in a row of the scalar block
    own: tuple[str, ...]  # the numbers that `fill` reads after the common ones


class _Triton(Dialect):
    """Expressions of Triton."""

    BOTH = "({} & {})"
    EITHER = "({} | {})"
    NEGATION = "({} == 0)"
    CHOICE = "tl.where({}, {}, {})"
    ASSIGNMENT = "x_{} = {}"
    CALLS: ClassVar[Mapping[str, str]] = CALLS

    def literal(self, value: float) -> str:
        return repr(value)

    def branch(self, condition: str, yes: Lines, no: Lines) -> Lines:
        otherwise = ["else:", *_indented(no)] if no else []
        return [f"if {condition}:", *_indented(yes), *otherwise]

    def call(self, function: str, arguments: list[str]) -> str:
        if function not in self.CALLS:
            raise FormulaError(f"the triton backend has no {function}; pass another backend")
        return self.CALLS[function].format(*arguments)


class _Element(_Triton):
    """Expressions of float32 elements. Divisions and roots are correctly rounded if IEEE is set.

    Exponentials, logarithms and powers are computed in float64: those of float32 have other bits on every device.
    """

    CALLS: ClassVar[Mapping[str, str]] = {
        **CALLS,
        "exp": "tl.exp(({}).to(tl.float64)).to(tl.float32)",
        "log": "tl.log(({}).to(tl.float64)).to(tl.float32)",
        "tanh": "tanh(({}).to(tl.float64)).to(tl.float32)",
        "power": "raised({}, {})",
        "sqrt": "root({}, IEEE)",
    }

    def operation(self, operator: str, left: str, right: str) -> str:
        return f"divide({left}, {right}, IEEE)" if operator == "/" else super().operation(operator, left, right)


class _Scalar(_Triton):
    """Expressions of float64 scalars."""

    CALLS: ClassVar[Mapping[str, str]] = {
        **CALLS,
        "power": "any_power({}, ({}).to(tl.float64))",
        "floor": "tl.floor(({}).to(tl.float64))",
        "q_pochhammer": "q_pochhammer({}, {}, {})",
        "sqrt": "tl.sqrt({})",
    }

    def literal(self, value: float) -> str:
        return f"tl.full((), {value!r}, tl.float64)"  # a bare literal would be float32 in calls


@cache
def kernels_of(formula: Formula) -> Kernels:
    """The kernels of `formula`, with its constants."""
    width = 16
    while width < SCALARS_AT + len(formula.scalar_names):
        width *= 2
    digest = "-".join(f"{name}={value}" for name, value in formula.constants)
    file = f"<opt_kernels formula {formula.name} {digest} {id(formula.update)}>"
    source = source_of(formula, width)
    # Triton reads the source of its kernels through `linecache`.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": f"{__name__}.generated"}
    exec(compile(source, file, "exec"), names)
    return Kernels(names["fill"], names["sweep"], width, tuple(_own(formula)))


def source_of(formula: Formula, row_width: int) -> str:
    """The module of a formula's kernels."""
    kernels = (_fill(formula, row_width), _tile(formula), _sweep(formula, row_width))
    return HEADER + "\n\n\n".join(map("\n".join, kernels))


def _own(formula: Formula) -> list[str]:
    constants = dict(formula.constants)
    return [name for name in formula.number_names if name not in (*CHANGING, *constants)]


def _fill(formula: Formula, row_width: int) -> Lines:
    """The kernel `fill`, which computes the scalar block, one program per row."""
    statements, scalars = scalar_expressions(formula.scalars)
    dialect = _Scalar(dict(formula.constants))
    columns = [*CHANGING, "grad_scale", *_own(formula)]  # of the numbers, float64
    body = [
        "row = tl.program_id(0)",
        f"source = numbers + row * {len(columns)}",
        f"target = block + row * {row_width}",
    ]
    body += [f"x_{name} = tl.load(source + {i})" for i, name in enumerate(columns) if name != "grad_scale"]
    body += dialect.statements(statements)
    body += [
        "tl.store(target, 1.0 if skip is None else (tl.load(skip) == 0).to(tl.float32))",
        f"tl.store(target + 1, tl.load(source + {len(CHANGING)}).to(tl.float32))",
        "tl.store(target + 2, x_step.to(tl.int32).to(tl.float32, bitcast=True))",
    ]
    for i, (_, value) in enumerate(scalars):
        body.append(f"value{i} = {dialect.expression(value)}")
        body.append(f"tl.store(target + {SCALARS_AT + i}, tl.cast(value{i}, tl.float32))")
    return ["@jit", "def fill(block, numbers, skip):", *_indented(body)]


class _ScalarLoads:
    """Precedes lines by loads of the scalars that they read first. Earlier loads would occupy registers."""

    def __init__(self, scalars: Sequence[str]) -> None:
        self._lanes = {f"x_{name}": SCALARS_AT + i for i, name in enumerate(scalars)}  # of those not loaded yet

    def before(self, lines: Lines) -> Lines:
        words = set(re.findall(r"\w+", " ".join(lines)))
        first = [name for name in self._lanes if name in words]
        return [*(f"{name} = tl.load(row + {self._lanes.pop(name)})" for name in first), *lines]


def _tile(formula: Formula) -> Lines:
    """One tile: everything between reading a gradient and writing a weight, in registers."""
    statements, results = formula.body_and_results()
    dialect = _Element(dict(formula.constants))
    loads = _ScalarLoads(formula.scalar_names)
    states = range(len(formula.states))
    signs = [(i, state.signed) for i, state in enumerate(formula.states)]
    body = [
        "at = start + tl.arange(0, BLOCK)",
        "x_p = read_main(main, out, at, n, REMAINDER, FULL)",
        "x_g = load(grad, at, n, FULL).to(tl.float32) * tl.load(row + 1)",
    ]
    for i, state in enumerate(formula.states):
        options = f"BLOCK, SCHEME{i}, {state.signed}, IEEE, FULL"
        body.append(f"x_{state.name} = read_state(codes{i}, scales{i}, start, n, {options})")
    for statement in statements:
        body += loads.before(dialect.statements([statement]))
    values = [dialect.expression(result) for result in results]
    elements = elements_among(statements, ("p", "g", *(state.name for state in formula.states)))
    for i, result in enumerate(results):
        if elements.isdisjoint(read(result)):  # a scalar: broadcast it, which stores need
            values[i] = f"tl.where(at >= 0, {values[i]}, 0.0)"
    # Written before the states are computed: the main then leaves its registers.
    body += loads.before([f"new_p = {values[0]}"])
    body += [
        "step = tl.load(row + 2).to(tl.int32, bitcast=True)",
        "write_main(main, out, new_p, at, n, first, step, MAIN, OUT, REMAINDER, STOCHASTIC_ROUNDING, FULL)",
    ]
    for i in states:
        body += loads.before([f"new_{i} = {values[1 + i]}"])
    if states:
        have_scales = " or ".join(each("SCHEME# != 'plain'", states))
        kept = " & ".join(f"no_outlier(new_{i}, SCHEME{i}, {signed})" for i, signed in signs)
        dropping = [f"kept = {kept}", *each("new_# = tl.where(kept, new_#, 0.0)", states)]
        body += [f"if {have_scales}:", *_indented(dropping)]
    for i, signed in signs:
        options = f"start, n, STATE{i}, BLOCK, SCHEME{i}, {signed}, IEEE, True, FULL"
        words = f"noise_of_state(at, first, step, {i + 1}, PERIOD{i}) if PERIOD{i} else None"
        body.append(f"write_state(codes{i}, scales{i}, new_{i}, {words}, {options})")
    formats = "".join(each("STATE#: tl.constexpr, SCHEME#: tl.constexpr, PERIOD#: tl.constexpr, ", states))
    return [
        "@jit",
        f"def tile(main, out, grad, {_columns(formula)}row, start, n, first, MAIN: tl.constexpr, OUT: tl.constexpr, "
        f"{formats}REMAINDER: tl.constexpr, STOCHASTIC_ROUNDING: tl.constexpr, IEEE: tl.constexpr, "
        "BLOCK: tl.constexpr, FULL: tl.constexpr):",
        *_indented(body),
    ]


def _sweep(formula: Formula, row_width: int) -> Lines:
    """One program per chunk. It writes nothing if the scalar block says to skip the step."""
    states = range(len(formula.states))
    kept = "".join(each("STATE#, SCHEME#, PERIOD#, ", states))
    formats = each("STATE#: tl.constexpr, SCHEME#: tl.constexpr, PERIOD#: tl.constexpr, SCALE#: tl.constexpr, ", states)
    call = (
        f"tile(main, out, grad, {_columns(formula)}row, start, n, first, MAIN, OUT, {kept}"
        "REMAINDER, STOCHASTIC_ROUNDING, IEEE, BLOCK, "
    )
    body = [
        "chunk = tl.program_id(0)",
        "record = records + chunk * WIDTH",
        "main = pointer(tl.load(record + 0), MAIN, E)",
        "out = pointer(tl.load(record + 1), tl.int16 if REMAINDER else (MAIN if OUT is None else OUT), E)",
    ]
    body += each("codes# = pointer(tl.load(record + 2 + #), STATE#, E)", states)
    body += each("scales# = pointer(tl.load(record + SCALE#), tl.float32, 1)", states)
    body += [
        "grad = pointer(tl.load(grads + chunk), GRAD, E)",
        f"row = block + tl.load(record + WIDTH - 2) * {row_width}",
        "first = tl.load(record + WIDTH - 1)",
        "n = tl.where(tl.load(row) != 0.0, tl.load(record + WIDTH - 3), 0).to(tl.int32)",
        "if n == CHUNK:",
        "    for start in range(0, CHUNK, BLOCK):",
        f"        {call}True)",
        "else:",
        "    for start in range(0, n, BLOCK):",
        f"        {call}False)",
    ]
    return [
        "@jit",
        "def sweep(records, grads, block, GRAD: tl.constexpr, MAIN: tl.constexpr, OUT: tl.constexpr, "
        f"{''.join(formats)}REMAINDER: tl.constexpr, STOCHASTIC_ROUNDING: tl.constexpr, IEEE: tl.constexpr, "
        "WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr):",
        *_indented(body),
    ]


def _columns(formula: Formula) -> str:
    return "".join(each("codes#, scales#, ", range(len(formula.states))))


def _indented(lines: Sequence[str]) -> Lines:
    return each("    #", lines)


def update_(
    batches: Sequence[Batch],
    formula: Formula,
    codecs: Codecs,
    *,
    stochastic_rounding: bool = False,
    grad_scale: Scalar = 1.0,
    skip: Skip = None,
) -> None:
    """Do what `reference.update_` does, on the device of the tensors, without synchronizing; may be captured.

    One launch for the scalar block, and one of the sweep for every combination of dtypes among the works.

    Raises LayoutError for a dtype that Triton cannot sweep, and FrozenHyperError for host numbers in a capture.
    """
    launches = cut_sweeps(parts_of(batches), codecs)
    if launches is None:
        batches = in_order(batches, codecs)  # tables hold addresses only: the copies live until the launch
        launches = sweeps(batches, codecs)
    if not launches:
        return
    device = launches[0].table.grads.device
    kernels = kernels_of(formula)
    of_codecs = tuple(codecs.items())
    with launching_on(device):
        rows: list[Row] = []
        for hyper, _ in batches:
            own = [number_of(hyper, name, formula) for name in kernels.own]
            rows.append((hyper.lr, hyper.weight_decay, hyper.step, grad_scale, *own))
        block = torch.empty((len(rows), kernels.row_width), dtype=torch.float32, device=device)
        flag = None if skip is None else skip.to(device)
        kernels.fill[(len(rows),)](block, numbers_on(device, rows), flag, enable_fp_fusion=False)
        for formats, table, _ in launches:
            options = {**_options(formats, of_codecs, stochastic_rounding), **launch_options(formats, table)}
            kernels.sweep[(table.num_chunks,)](table.records, table.grads, block, **options)


@cache
def _options(
    formats: LaunchFormats, codecs: tuple[tuple[str, StateCodec], ...], stochastic_rounding: bool
) -> dict[str, Any]:
    rounds = stochastic_rounding and rounds_stochastically(formats.main)
    return state_options(formats, dict(codecs)) | {"STOCHASTIC_ROUNDING": rounds}


def state_options(formats: LaunchFormats, codecs: Codecs) -> dict[str, Any]:
    """The arguments of a sweep that describe its states."""
    options: dict[str, Any] = {}
    lane = 2 + len(codecs)  # after main, out and the states: the scales of those that have any
    for index, (codec, dtype) in enumerate(zip(codecs.values(), formats.states, strict=True)):
        options[f"STATE{index}"] = triton_dtype(dtype)
        options[f"SCHEME{index}"] = scheme(codec)
        options[f"PERIOD{index}"] = codec.noise_period if codec.stochastic else 0
        options[f"SCALE{index}"] = lane if codec.block else 0
        lane += codec.block > 0
    return options
