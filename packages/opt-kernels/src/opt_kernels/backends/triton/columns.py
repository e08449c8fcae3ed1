"""The works of a call of a sweep, column by column: the tensors of all works that a sweep reads at one place."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import LayoutError, Run, check_halves, run_of
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.works import Batch, Work, Works


class Call(NamedTuple):
    """All works of a call, column by column."""

    pieces: list[tuple[int, Works]]  # with their rows of the scalar block
    grads: list[Tensor]
    others: list[Tensor]
    grads_at: tuple[int, ...]  # addresses
    others_at: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.grads, *self.others)


class Item(NamedTuple):
    """One work of a call."""

    row: int
    first: int
    grad: Tensor
    columns: list[Tensor | None]
    remainder: bool


def in_order(batches: Sequence[Batch]) -> list[Batch]:
    """The works as flat runs. A gradient whose memory order differs from its main's is copied.

    Raises LayoutError if a tensor to be written has holes.
    """
    return [Batch(hyper, [_work(run_of(work)) for work in works]) for hyper, works in batches]


def pieces_of(batches: Sequence[Batch]) -> list[tuple[int, Works]]:
    return [(row, works) for row, batch in enumerate(batches) for works in uniform(batch.works)]


_FIELDS = attrgetter("grad", "main", "state", "out", "remainder", "matrix", "first")


def uniform(works: Sequence[Work]) -> list[Works]:
    """`works` as columns, grouped by whether they have a main and an out."""
    if isinstance(works, Works) or not works:
        return [works] if isinstance(works, Works) else []
    grads, mains, states, outs, remainders, matrices, firsts = zip(*map(_FIELDS, works))
    kinds = [set(map(type, column)) for column in (mains, outs)]
    if any(NoneType in types and len(types) > 1 for types in kinds):
        by_kind: dict[tuple[bool, bool], list[Work]] = {}
        for work in works:
            by_kind.setdefault((work.main is None, work.out is None), []).append(work)
        return [one for of_kind in by_kind.values() for one in uniform(of_kind)]
    return [
        Works(
            grads,
            mains=None if mains[0] is None else mains,
            states=states,
            outs=None if outs[0] is None else outs,
            remainders=None if mains[0] is not None else remainders,
            matrices=matrices,
            firsts=firsts,
        )
    ]


def _work(run: Run) -> Work:
    return Work(
        grad=run.grad, main=run.main, state=run.state, out=run.out, remainder=run.remainder, first=run.first
    )  # fmt: skip


def call_of(pieces: list[tuple[int, Works]], codecs: Mapping[str, StateCodec]) -> Call:
    """Tensors and addresses by column. Runs in every step, so it processes whole columns at a time."""
    grads: list[Tensor] = []
    others: list[Tensor] = []
    for _, works in pieces:
        grads += works.grads
        for column in _columns(works, codecs):
            if column is not None:
                others += column
    return Call(pieces, grads, others, tuple(map(Tensor.data_ptr, grads)), tuple(map(Tensor.data_ptr, others)))


def _columns(works: Works, codecs: Mapping[str, StateCodec]) -> list[Sequence[Tensor] | None]:
    """The columns of `works`: main or remainder, out, states, scales. None for an out that works do not have."""
    if works.mains is None and (works.outs is None or works.remainders is None):
        raise LayoutError("a work has no main: pass main, or out (bfloat16) and its remainder (int16)")
    columns: list[Sequence[Tensor] | None] = [works.remainders if works.mains is None else works.mains, works.outs]
    columns += [[state[name] for state in works.states] for name in codecs]
    return columns + [[state[scale_name(name)] for state in works.states] for name in codecs if codecs[name].block]


def names_of_columns(codecs: Mapping[str, StateCodec]) -> dict[str, int]:
    """Names of the columns, and the number of parameter elements per entry of each."""
    scales = {scale_name(name): codec.block for name, codec in codecs.items() if codec.block}
    return {"main": 1, "out": 1} | dict.fromkeys(codecs, 1) | scales


def items_of(call: Call, codecs: Mapping[str, StateCodec]) -> list[Item]:
    items = []
    for row, works in call.pieces:
        columns = _columns(works, codecs)
        for i, grad in enumerate(works.grads):
            of_work = [None if column is None else column[i] for column in columns]
            items.append(Item(row, 0 if works.firsts is None else works.firsts[i], grad, of_work, works.mains is None))
    return items


def lies_in_order(tensor: Tensor) -> bool:
    """Whether `tensor` is contiguous and its memory holds its values: a view with the negative bit set does not."""
    return tensor.is_contiguous() and not tensor.is_neg()


def check_item(item: Item, codecs: Mapping[str, StateCodec], device: torch.device) -> None:
    numel = item.grad.numel()
    if item.remainder:
        remainder, out = item.columns[:2]
        check_halves(Work(grad=item.grad, main=None, out=out, remainder=remainder, state={}))
    for (name, elements), tensor in zip(names_of_columns(codecs).items(), item.columns):
        if tensor is None:
            continue
        if tensor.device != device or item.grad.device != device:
            raise LayoutError(f"{name} is on {tensor.device} and a gradient on {device}; one sweep has one device")
        expected = math.ceil(numel / elements)
        if tensor.numel() != expected:
            raise LayoutError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} with a gradient of shape "
                f"{tuple(item.grad.shape)}; allowed is a contiguous tensor of {expected} elements"
            )
