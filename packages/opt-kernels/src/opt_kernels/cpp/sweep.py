"""From batches of works to calls of an update sweep in C++: one per combination of formats, over all groups."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import CDLL
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.codecs import Plain, StateCodec
from opt_kernels.cpp.compiler import attempt
from opt_kernels.cpp.threads import run
from opt_kernels.ops.elements import HostHyper, LayoutError, Run, on_host, run_of
from opt_kernels.rules.base import Batch, Work, Works

C_TYPES: Mapping[torch.dtype, str] = {torch.float32: "float", torch.bfloat16: "bfloat16"}
MOST_STATES = 2
SHARE_NUMEL = 1 << 15  # elements that are worth waking a thread for

_DTYPE, _SHAPE, _IS_CPU = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")


class Formats(NamedTuple):
    """What a sweep is compiled for: in what each column is stored."""

    grad: torch.dtype
    main: torch.dtype | None  # None: the main is joined from out and remainder
    out: torch.dtype | None
    states: tuple[torch.dtype, ...]

    @property
    def is_known(self) -> bool:
        """Whether the sweeps can be compiled for them."""
        given = (self.grad, self.main, self.out, *self.states)
        is_main = self.main is not None or self.out is torch.bfloat16
        return is_main and all(dtype is None or dtype in C_TYPES for dtype in given)

    @property
    def macros(self) -> dict[str, str | int]:
        """As `elements.h` asks for them; what is not there gets a type that nobody reads."""
        states = [C_TYPES[dtype] for dtype in self.states] + ["float"] * MOST_STATES
        return {
            "GRAD": C_TYPES[self.grad],
            "MAIN": "int16_t" if self.main is None else C_TYPES[self.main],
            "OUT": "bfloat16" if self.out is None else C_TYPES[self.out],
            "HAS_OUT": int(self.out is not None),
            "NUM_STATES": len(self.states),
            "STATE0": states[0],
            "STATE1": states[1],
        }


class Columns(NamedTuple):
    """The tensors of works in one combination of formats, column by column.

    A step over thousands of small parameters is spent on going over them: here a column takes one call.
    """

    grads: Sequence[Tensor]
    mains: Sequence[Tensor]  # or remainders
    outs: Sequence[Tensor] | None
    states: Sequence[Sequence[Tensor]]

    def all(self) -> Iterator[Sequence[Tensor]]:
        """The columns that are there, the gradients first."""
        yield self.grads
        yield self.mains
        if self.outs is not None:
            yield self.outs
        yield from self.states

    def are_flat(self) -> bool:
        """Whether all tensors of a work have their elements in one order, without holes, as they lie in memory."""
        shapes = list(map(_SHAPE, self.grads))
        return all(
            all(map(Tensor.is_contiguous, column))
            and not any(map(Tensor.is_neg, column))
            and list(map(_SHAPE, column)) == shapes
            for column in self.all()
        )


class _Call:
    """The runs of one combination of formats, as the C++ side reads them: the fields of `struct Run` in columns."""

    def __init__(self) -> None:
        self._fields: list[array[int]] = [array("q") for _ in range(5 + MOST_STATES)]
        self._kept: list[Columns] = []  # the fields are addresses only: this keeps them valid
        self._numel = 0
        self.works: list[tuple[int, Sequence[Work]]] = []  # with their rows of the table of hyper-parameters

    def add(self, columns: Columns, works: Sequence[Work], row: int) -> None:
        """The flat columns of `works`; `row` of the table of hyper-parameters goes with them."""
        self.works.append((row, works))
        numels = list(map(Tensor.numel, columns.grads))
        nothing = [0] * len(numels)
        states = [map(Tensor.data_ptr, state) for state in columns.states] + [nothing] * MOST_STATES
        values = (
            map(Tensor.data_ptr, columns.mains),
            nothing if columns.outs is None else map(Tensor.data_ptr, columns.outs),
            map(Tensor.data_ptr, columns.grads),
            *states[:MOST_STATES],
            numels,
            [row] * len(numels),
        )
        for into, value in zip(self._fields, values, strict=True):
            into.extend(value)
        self._kept.append(columns)
        self._numel += sum(numels)

    def run(self, compiled: CDLL, rows: "array[float]") -> None:
        """Sweeps all runs, on as many threads as torch uses."""
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
    source: Path,
    codecs: Mapping[str, StateCodec],
    row_of: Callable[[HostHyper], Sequence[float]],  # the fields of the source's `Row`
    *,
    rounds_by_chance: bool = False,
    **macros: int,
) -> list[Batch]:
    """Sweeps every work whose tensors are float32, bfloat16 and remainders in CPU memory; returns the others.

    With `rounds_by_chance`, works whose main is not float32 are among the others; so are those whose sweep cannot be
    compiled here.
    """
    if not all(isinstance(codec, Plain) for codec in codecs.values()):
        return list(batches)
    names = list(codecs)
    calls: dict[Formats, _Call] = {}
    others = []
    for index, (hyper, works) in enumerate(batches):
        for formats, same, columns in _by_formats(works, names):
            if not formats.is_known or (rounds_by_chance and formats.main not in (None, torch.float32)):
                others.append(Batch(hyper, same))
                continue
            calls.setdefault(formats, _Call()).add(_checked(columns, same, names), same, index)
    rows = array("f", [value for hyper, _ in batches for value in row_of(on_host(hyper))])
    for formats, call in calls.items():
        compiled = attempt(source, **formats.macros | macros)
        if compiled is None:
            others += [Batch(batches[index].hyper, same) for index, same in call.works]
        else:
            call.run(compiled, rows)
    return others


def _by_formats(works: Sequence[Work], names: Sequence[str]) -> Iterator[tuple[Formats, Sequence[Work], Columns]]:
    """`works` by what they are stored in, and their tensors."""
    if isinstance(works, Works) and works:
        columns = _columns(works, names)
        if all(len(set(map(_DTYPE, column))) == 1 for column in columns.all()):
            yield _formats(works[0], names), works, columns
            return
    found: dict[Formats, list[Work]] = {}
    for work in works:
        found.setdefault(_formats(work, names), []).append(work)
    for formats, same in found.items():
        yield formats, same, _columns(same, names)


def _formats(work: Work, names: Sequence[str]) -> Formats:
    main, out, state = work.main, work.out, work.state
    return Formats(
        work.grad.dtype,
        None if main is None else main.dtype,
        None if out is None else out.dtype,
        tuple([state[name].dtype for name in names]),
    )


def _checked(columns: Columns, works: Sequence[Work], names: Sequence[str]) -> Columns:
    """`columns`, flat: a call has addresses only, and takes nothing on trust.

    Raises LayoutError for what cannot be walked.
    """
    if not columns.are_flat():
        columns = _columns([run_of(work, names) for work in works], names)
    for column in columns.all():
        if not all(map(_IS_CPU, column)):
            devices = sorted({str(tensor.device) for tensor in column})
            raise LayoutError(
                f"backend='cpp' with tensors on {devices}: it sweeps CPU memory, and one sweep has one device"
            )
    return columns


def _columns(works: Sequence[Work | Run], names: Sequence[str]) -> Columns:
    """Of works alike in which tensors they have."""
    if isinstance(works, Works):
        mains = works.remainders if works.mains is None else works.mains
        grads, outs, states = works.grads, works.outs, works.states
    else:
        mains = [main for work in works if (main := work.remainder if work.main is None else work.main) is not None]
        outs = [work.out for work in works if work.out is not None] or None
        grads, states = [work.grad for work in works], [work.state for work in works]
    assert mains is not None
    return Columns(grads, mains, outs, [[state[name] for state in states] for name in names])
