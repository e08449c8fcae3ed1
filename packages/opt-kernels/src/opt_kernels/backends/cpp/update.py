"""A formula in one compiled pass over memory: a call for each combination of formats, over all groups.

Formats that no sweep supports use torch operations.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from opt_kernels.backends import elements, torch_native
from opt_kernels.backends.cpp.compiler import Source, attempt
from opt_kernels.backends.cpp.threads import run
from opt_kernels.backends.cpp.translate import has_codes, source_of
from opt_kernels.backends.tables import DeviceTables
from opt_kernels.codecs import Codecs, Plain, StateCodec, scale_name, scheme_of
from opt_kernels.formulas.formula import Formula
from opt_kernels.works import Batch, Hyper, Scalar, Skip, Work

C_TYPES: Mapping[torch.dtype, str] = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # of every source
UPDATE_TYPES = {**C_TYPES, torch.float16: "half"}  # of update.h
HEADERS = ("formats.h", "update.h")
HEADERS_OF_CODES = ("formats.h", "codecs.h", "narrow.h", "integers.h", "update.h")
REMAINDER_TYPES: Mapping[torch.dtype, str] = {torch.int16: "int16_t", torch.int8: "int8_t"}
SHARE_NUMEL = 1 << 15  # minimum number of elements of a thread
CALLS = 1024  # a step has one per bucket; calls that do not fit are checked anew in every step


class Formats(NamedTuple):
    """The formats that a sweep is compiled for: the dtype of each column."""

    grad: torch.dtype
    main: torch.dtype | None  # None: the main is joined from out and remainder
    remainder: torch.dtype | None
    out: torch.dtype | None
    states: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, work: Work, names: Iterable[str]) -> "Formats":
        kept = {name: tensor.dtype for name, tensor in elements.tensors_of_main(work).items()}
        states = tuple([work.state[name].dtype for name in names])
        return cls(work.grad.dtype, kept.get("main"), kept.get("remainder"), kept.get("out"), states)

    def codec_types(self, codecs: Iterable[StateCodec]) -> tuple[str, ...] | None:
        """The types of `update.h` for states with these `codecs`; None if no sweep supports them."""
        is_main = self.main is not None or (self.remainder in REMAINDER_TYPES and self.out is torch.bfloat16)
        if not is_main or not {self.grad, self.main, self.out} <= {None, *UPDATE_TYPES}:
            return None
        types = []
        for codec, dtype in zip(codecs, self.states, strict=True):
            name = codec_type(codec, dtype)
            if name is None:
                return None
            types.append(name)
        return tuple(types)

    def macros(self, *, stochastic_rounding: bool) -> dict[str, str | int]:
        """The macros of `update.h`. A missing out gets a type that is not used."""
        main = self.remainder if self.main is None else self.main
        assert main is not None
        rounds = stochastic_rounding and elements.rounds_stochastically(self.main)
        return {
            "GRAD": UPDATE_TYPES[self.grad],
            "MAIN": REMAINDER_TYPES.get(main) or UPDATE_TYPES[main],
            "OUT": UPDATE_TYPES[self.out or torch.bfloat16],
            "HAS_OUT": int(self.out is not None),
            "STOCHASTIC_ROUNDING": int(rounds),
        }


def codec_type(codec: StateCodec, dtype: torch.dtype) -> str | None:
    """The type of `update.h` for a state of `dtype` with this `codec`, or None."""
    rounds = str(codec.stochastic).lower()
    if isinstance(codec, Plain):
        return f"Plain<{UPDATE_TYPES[dtype]}, {rounds}>" if dtype in UPDATE_TYPES else None
    scheme = scheme_of(codec)
    is_known = scheme and dtype is codec.dtype
    return f"codec_{scheme}<{str(codec.signed).lower()}, {rounds}>" if is_known else None


@cache
def sweep_source(formula: Formula, codecs: tuple[str, ...]) -> Source:
    """The source of a formula's sweep.

    Most of the time to compile a sweep without codes would go into the compiler's intrinsics that `codecs.h` includes.
    """
    parts = []
    for name in HEADERS_OF_CODES if has_codes(codecs) else HEADERS:
        parts.append(Path(__file__).with_name(name).read_text())
    return Source(formula.name, "\n".join([*parts, source_of(formula, codecs)]))


class _Sweep(NamedTuple):
    """The works of a call in one combination of formats, and their table as the C++ side reads it."""

    formats: Formats
    codecs: tuple[str, ...] | None  # types of `update.h`; None: no sweep supports them
    works: list[int]  # their numbers in the call
    before: bytes  # addresses of mains and outs, before those of gradients
    after: bytes  # addresses of the codes and scales of each state; then sizes, rows and first elements
    numel: int


@cache
def _known_sweeps() -> DeviceTables[list[_Sweep] | None]:
    """The cache of calls. Its memory is limited, because states that move add a table in every step."""

    def bytes_of(sweeps: list[_Sweep] | None) -> int:
        return sum(len(sweep.before) + len(sweep.after) for sweep in sweeps or ())

    return DeviceTables(torch.device("cpu"), capacity=CALLS, room=1 << 25, bytes_of=bytes_of)


def update_(
    batches: Sequence[Batch],
    formula: Formula,
    codecs: Codecs,
    *,
    stochastic_rounding: bool = False,
    grad_scale: Scalar = 1.0,
    skip: Skip = None,
) -> None:
    """Same as `reference.update_`, except for the last bits, on as many threads as torch uses.

    Works whose sweep cannot be compiled use torch, too. Raises LayoutError for tensors that cannot be swept.
    """
    if elements.skipped(skip):
        return
    scale = float(grad_scale)
    columns = elements.columns_of(elements.parts_of(batches), codecs)
    sweeps = _sweeps_of(columns, codecs)
    if sweeps is None:
        columns = elements.columns_of(elements.parts_of(elements.in_order(batches, codecs)), codecs)
        sweeps = _sweeps_of(columns, codecs)
    if sweeps is None:
        raise elements.LayoutError(
            "scales of a state are not contiguous; pass contiguous ones, as init_state makes them"
        )
    rows = array("f", [value for hyper, _ in batches for value in _row(formula, hyper, scale)])
    others: list[int] = []
    for sweep in sweeps:
        compiled = None
        if sweep.codecs is not None:
            macros = sweep.formats.macros(stochastic_rounding=stochastic_rounding)
            compiled = attempt(sweep_source(formula, sweep.codecs), **macros)
        if compiled is None:
            others += sweep.works
            continue
        at: Sequence[int] = columns.grads_at
        if len(sweep.works) < len(at):
            at = [at[i] for i in sweep.works]
        table = array("q", sweep.before + array("q", at).tobytes() + sweep.after)
        run(
            compiled,
            table=table.buffer_info()[0],
            num_runs=len(sweep.works),
            extra=rows.buffer_info()[0],
            total=sweep.numel,
            least=SHARE_NUMEL,
        )
    if others:
        items = columns.items(codecs)
        rest = [Batch(batches[items[i].row].hyper, [items[i].work]) for i in others]
        torch_native.update_(rest, formula, codecs, stochastic_rounding=stochastic_rounding, grad_scale=scale)


def _row(formula: Formula, hyper: Hyper, grad_scale: float) -> tuple[float, ...]:
    """`struct Row` of the formula's sweep. The step is split in two, because a float holds integers up to 2^24 only."""
    step = int(hyper.step)
    return (grad_scale, step & 0xFFFF, step >> 16, *formula.scalars_of(hyper).values())


def _sweeps_of(columns: elements.Columns, codecs: Codecs) -> list[_Sweep] | None:
    """The sweeps of a call. None if some tensor is not in row-major order."""
    return _known_sweeps().get(columns.key(codecs), lambda: _sweeps(columns, codecs), of=columns.tensors)


def _sweeps(columns: elements.Columns, codecs: Codecs) -> list[_Sweep] | None:
    items = columns.items(codecs)
    if not elements.are_in_order(items, len(codecs)):
        return None
    by_formats: dict[Formats, list[int]] = {}
    for index, item in enumerate(items):
        by_formats.setdefault(Formats.of(item.work, codecs), []).append(index)
    sweeps = []
    for formats, numbers in by_formats.items():
        types = formats.codec_types(codecs.values())
        chosen = [items[i] for i in numbers]
        for item in chosen if types is not None else ():
            elements.check_item(item, codecs, torch.device("cpu"))
        addresses = []
        for item in chosen:
            addresses.append([0 if tensor is None else tensor.data_ptr() for tensor in item.tensors])
        by_name = dict(zip(elements.names_of_columns(codecs), zip(*addresses)))
        before = [by_name["main"], by_name["out"]]
        after = []
        for name in codecs:
            after += [by_name[name], by_name.get(scale_name(name), (0,) * len(numbers))]
        numels = tuple(item.work.grad.numel() for item in chosen)
        after += [numels, tuple(item.row for item in chosen), tuple(item.work.first for item in chosen)]
        sweeps.append(_Sweep(formats, types, numbers, _joined(before), _joined(after), sum(numels)))
    return sweeps


def _joined(columns: Sequence[Sequence[int]]) -> bytes:
    return array("q", chain.from_iterable(columns)).tobytes()
