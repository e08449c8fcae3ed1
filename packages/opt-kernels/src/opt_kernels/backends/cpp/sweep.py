"""Calls of an update sweep in C++ for batches of works: one per combination of formats, over all groups."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import CDLL
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import Source, attempt
from opt_kernels.backends.cpp.threads import run
from opt_kernels.backends.cpp.translate import has_codes, source_of
from opt_kernels.backends.elements import LayoutError, Run, check_halves, run_of
from opt_kernels.codecs import Companded, Plain, Root, Scaled, StateCodec, scale_name
from opt_kernels.formulas.formula import Formula
from opt_kernels.works import Batch, Hyper, Work, Works

C_TYPES: Mapping[torch.dtype, str] = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # of every source
UPDATE_TYPES = {**C_TYPES, torch.float16: "half"}  # of update.h
HEADERS = ("formats.h", "update.h")
HEADERS_OF_CODES = ("formats.h", "codecs.h", "narrow.h", "integers.h", "update.h")
REMAINDER_TYPES: Mapping[torch.dtype, str] = {torch.int16: "int16_t", torch.int8: "int8_t"}
SHARE_NUMEL = 1 << 15  # minimum number of elements of a thread

_DTYPE, _SHAPE, _IS_CPU = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")


class Formats(NamedTuple):
    """The formats that a sweep is compiled for: the dtype of each column."""

    grad: torch.dtype
    main: torch.dtype | None  # None: the main is joined from out and remainder
    remainder: torch.dtype | None
    out: torch.dtype | None
    states: tuple[torch.dtype, ...]

    def codec_types(self, codecs: Iterable[StateCodec]) -> tuple[str, ...] | None:
        """The types of `update.h` for states with these `codecs`; None if no sweep supports them."""
        given = (self.grad, self.main, self.out)
        is_main = self.main is not None or (self.remainder in REMAINDER_TYPES and self.out is torch.bfloat16)
        if not is_main or not all(dtype is None or dtype in UPDATE_TYPES for dtype in given):
            return None
        types = [codec_type(codec, dtype) for codec, dtype in zip(codecs, self.states, strict=True)]
        known = tuple(one for one in types if one is not None)
        return known if len(known) == len(types) else None

    def macros(self, *, stochastic_rounding: bool) -> dict[str, str | int]:
        """The macros of `update.h`. A missing out gets a type that is not used."""
        main = self.remainder if self.main is None else self.main
        assert main is not None
        return {
            "GRAD": UPDATE_TYPES[self.grad],
            "MAIN": {**UPDATE_TYPES, **REMAINDER_TYPES}[main],
            "OUT": "bfloat16" if self.out is None else UPDATE_TYPES[self.out],
            "HAS_OUT": int(self.out is not None),
            "STOCHASTIC_ROUNDING": int(stochastic_rounding and self.main is torch.bfloat16),
        }


def codec_type(codec: StateCodec, dtype: torch.dtype) -> str | None:
    """The type of `update.h` for a state of `dtype` with this `codec`, or None."""
    if isinstance(codec, Plain):
        return f"Plain<{UPDATE_TYPES[dtype]}>" if dtype in UPDATE_TYPES else None
    if dtype is not codec.dtype:
        return None
    match codec:
        case Scaled(dtype=torch.float16, block=128, exponent=15, signed=signed):
            return f"ScaledHalf<{str(signed).lower()}>"
        case Scaled(dtype=torch.float8_e4m3fn, block=128, exponent=8, signed=signed):
            return f"ScaledE4M3<{str(signed).lower()}>"
        case Scaled(dtype=torch.float8_e5m2, block=128, exponent=15, signed=signed):
            return f"ScaledE5M2<{str(signed).lower()}>"
        case Companded(block=128):
            return "Companded"
        case Root(block=128):
            return "Root"
    return None


@cache
def sweep_source(formula: Formula, codecs: tuple[str, ...]) -> Source:
    """The source of a formula's sweep.

    Most of the time to compile a sweep without codes would go into the compiler's intrinsics that `codecs.h` includes.
    """
    headers = [Path(__file__).with_name(name) for name in (HEADERS_OF_CODES if has_codes(codecs) else HEADERS)]
    return Source(formula.name, "\n".join((*(header.read_text() for header in headers), source_of(formula, codecs))))


class Columns(NamedTuple):
    """The tensors of works in one combination of formats, column by column.

    A step over thousands of small parameters spends its time on the host; here a column takes one call.
    """

    grads: Sequence[Tensor]
    mains: Sequence[Tensor]  # or remainders
    outs: Sequence[Tensor] | None
    states: Sequence[Sequence[Tensor]]
    scales: Sequence[Sequence[Tensor] | None]  # of each state; None: its codec has none
    firsts: Sequence[int]

    def all(self) -> Iterator[Sequence[Tensor]]:
        """The columns with one element per element of the parameter, the gradients first."""
        yield self.grads
        yield self.mains
        if self.outs is not None:
            yield self.outs
        yield from self.states

    def are_flat(self) -> bool:
        """Whether all tensors of a work are contiguous, of one shape, without their negative bit."""
        # Not by a list of shapes: thousands of new tuples set off the garbage collector, which takes milliseconds.
        return all(
            all(map(Tensor.is_contiguous, column))
            and not any(map(Tensor.is_neg, column))
            and (column is self.grads or all(map(Tensor.is_same_size, column, self.grads)))
            for column in self.all()
        )


class Runs(NamedTuple):
    """The runs of works in one combination of formats: the fields of `struct Run`, except its row, in columns."""

    formats: Formats
    # Addresses of mains, outs, gradients, and of the codes and scales of each state; then numel and first.
    fields: list["array[int]"]
    numel: int
    tensors: Columns  # kept alive until the call, because the fields are addresses


class _Call:
    """The runs of one combination of formats, as the C++ side reads them."""

    def __init__(self, num_states: int) -> None:
        self._fields: list[array[int]] = [array("q") for _ in range(6 + 2 * num_states)]
        self._numel = 0
        self._kept: list[Columns] = []  # keeps the tensors alive
        self.works: list[tuple[int, Sequence[Work]]] = []  # with their rows of the table of hyper-parameters

    def add(self, runs: Runs, works: Sequence[Work], row: int) -> None:
        """Add the runs of `works`, which use `row` of the table of hyper-parameters."""
        *addresses, numels, firsts = runs.fields
        rows = array("q", [row]) * len(numels)
        for into, values in zip(self._fields, (*addresses, numels, rows, firsts), strict=True):
            into.extend(values)
        self._numel += runs.numel
        self._kept.append(runs.tensors)
        self.works.append((row, works))

    def run(self, compiled: CDLL, rows: "array[float]") -> None:
        """Sweep all runs, on as many threads as torch uses."""
        table = array("q", b"".join(self._fields))
        run(
            compiled,
            table=table.buffer_info()[0],
            num_runs=len(self._fields[0]),
            extra=rows.buffer_info()[0],
            total=self._numel,
            least=SHARE_NUMEL,
        )


def update_(
    batches: Sequence[Batch],
    formula: Formula,
    codecs: Mapping[str, StateCodec],
    *,
    grad_scale: float,
    stochastic_rounding: bool = False,
) -> list[Batch]:
    """Sweep every work in CPU memory whose formats a sweep supports. Return the works that were not swept.

    These include works whose sweep could not be compiled.
    """
    calls: dict[tuple[Formats, tuple[str, ...]], _Call] = {}
    others = []
    for index, (hyper, works) in enumerate(batches):
        for formats, same, found in _by_formats(works, codecs):
            types = formats.codec_types(codecs.values())
            if types is None or (stochastic_rounding and formats.main is torch.float16):
                others.append(Batch(hyper, same))
            else:
                call = calls.setdefault((formats, types), _Call(len(codecs)))
                call.add(_runs(formats, same, found, codecs), same, index)
    if not calls:
        return others
    rows = array("f", [value for hyper, _ in batches for value in _row(formula, hyper, grad_scale)])
    for (formats, types), call in calls.items():
        compiled = attempt(sweep_source(formula, types), **formats.macros(stochastic_rounding=stochastic_rounding))
        if compiled is None:
            others += [Batch(batches[index].hyper, same) for index, same in call.works]
        else:
            call.run(compiled, rows)
    return others


def _row(formula: Formula, hyper: Hyper, grad_scale: float) -> tuple[float, ...]:
    """`struct Row` of the formula's sweep. The step is split in two, because a float holds integers up to 2^24 only."""
    step = int(hyper.step)
    return (grad_scale, step & 0xFFFF, step >> 16, *formula.scalars_of(hyper).values())


def _by_formats(
    works: Sequence[Work], codecs: Mapping[str, StateCodec]
) -> Iterator[tuple[Formats, Sequence[Work], Columns]]:
    """`works` by their formats, with their tensors as columns."""
    if isinstance(works, Works) and works:
        columns = _columns(works, codecs)
        if all(len(set(map(_DTYPE, column))) == 1 for column in columns.all()):
            yield _formats(works[0], codecs), works, columns
            return
    found: dict[Formats, list[Work]] = {}
    for work in works:
        found.setdefault(_formats(work, codecs), []).append(work)
    for formats, same in found.items():
        yield formats, same, _columns(same, codecs)


def _runs(formats: Formats, works: Sequence[Work], columns: Columns, codecs: Mapping[str, StateCodec]) -> Runs:
    """The runs of works in CPU memory."""
    flat = _checked(columns, works, codecs)
    return Runs(formats, _fields(flat), sum(map(Tensor.numel, flat.grads)), flat)


def _fields(columns: Columns) -> list["array[int]"]:
    numels = list(map(Tensor.numel, columns.grads))
    nothing = [0] * len(numels)
    values: list[Iterable[int]] = [
        map(Tensor.data_ptr, columns.mains),
        nothing if columns.outs is None else map(Tensor.data_ptr, columns.outs),
        map(Tensor.data_ptr, columns.grads),
    ]
    for codes, scales in zip(columns.states, columns.scales, strict=True):
        values += [map(Tensor.data_ptr, codes), nothing if scales is None else map(Tensor.data_ptr, scales)]
    return [array("q", value) for value in (*values, numels, columns.firsts)]


def _formats(work: Work, names: Iterable[str]) -> Formats:
    main, remainder, out, state = work.main, work.remainder, work.out, work.state
    return Formats(
        work.grad.dtype,
        None if main is None else main.dtype,
        None if remainder is None else remainder.dtype,
        None if out is None else out.dtype,
        tuple([state[name].dtype for name in names]),
    )


def _checked(columns: Columns, works: Sequence[Work], codecs: Mapping[str, StateCodec]) -> Columns:
    """`columns` as flat tensors, checked, because a call passes addresses only.

    Raises LayoutError for tensors that cannot be swept.
    """
    for work in works if works[0].main is None else ():
        check_halves(work)
    if not columns.are_flat():
        columns = _columns([run_of(work, tuple(codecs)) for work in works], codecs)
    for column in (*columns.all(), *(scales for scales in columns.scales if scales is not None)):
        if not all(map(_IS_CPU, column)):
            devices = sorted({str(tensor.device) for tensor in column})
            raise LayoutError(
                f"backend='cpp' with tensors on {devices}: it sweeps CPU memory, and one sweep has one device"
            )
    for (name, codec), scales in zip(codecs.items(), columns.scales, strict=True):
        if scales is None or _are_scales(scales, columns.grads, codec.block):
            continue
        for grad, scale in zip(columns.grads, scales):
            expected = -(-grad.numel() // codec.block)
            if scale.shape != (expected,) or scale.dtype is not torch.float32 or not scale.is_contiguous():
                raise LayoutError(
                    f"{scale_name(name)} is {scale.dtype} of shape {tuple(scale.shape)} for {grad.numel()} elements; "
                    f"allowed is contiguous torch.float32 of shape ({expected},), as init_state makes it"
                )
    return columns


def _are_scales(scales: Sequence[Tensor], grads: Sequence[Tensor], block: int) -> bool:
    return (
        list(map(_SHAPE, scales)) == [(-(-numel // block),) for numel in map(Tensor.numel, grads)]
        and set(map(_DTYPE, scales)) <= {torch.float32}
        and all(map(Tensor.is_contiguous, scales))
    )


def _columns(works: Sequence[Work | Run], codecs: Mapping[str, StateCodec]) -> Columns:
    """The columns of works that have the same kinds of tensors."""
    firsts: Sequence[int] | None
    if isinstance(works, Works):
        mains = works.remainders if works.mains is None else works.mains
        grads, outs, states, firsts = works.grads, works.outs, works.states, works.firsts
    else:
        mains = [main for work in works if (main := work.remainder if work.main is None else work.main) is not None]
        outs = [work.out for work in works if work.out is not None] or None
        grads, states = [work.grad for work in works], [work.state for work in works]
        firsts = [work.first for work in works]
    assert mains is not None
    return Columns(
        grads,
        mains,
        outs,
        [[state[name] for state in states] for name in codecs],
        [[state[scale_name(name)] for state in states] if codecs[name].block else None for name in codecs],
        [0] * len(grads) if firsts is None else firsts,
    )
