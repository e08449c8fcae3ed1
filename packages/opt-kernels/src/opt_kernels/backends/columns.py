"""The works of a call of a sweep, column by column: the tensors of all works that a sweep reads or writes at one place.

Runs in every step, so it processes whole columns and creates no object per tensor.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import LayoutError, check_halves, run_of
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.works import Batch, Work, Works


class Columns(NamedTuple):
    """The tensors of a call, and their addresses."""

    parts: list[tuple[int, Works]]  # works with the same kinds of tensors, and their row of the hyper-parameter table
    grads: list[Tensor]
    others: list[Tensor]  # of each part: mains or remainders, outs, states, scales
    grads_at: tuple[int, ...]  # addresses
    others_at: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.grads, *self.others)

    def key(self, codecs: Mapping[str, StateCodec]) -> Hashable:
        """Identifies the kinds of all tensors, and the places of all except the gradients, which move."""
        kinds = tuple([(row, len(w), w.mains is None, w.outs is None, w.firsts) for row, w in self.parts])
        return self.others_at, kinds, tuple(codecs.items())

    def works(self) -> Iterator[tuple[int, Work]]:
        """All works with their rows."""
        return ((row, work) for row, works in self.parts for work in works)


def parts_of(batches: Sequence[Batch]) -> list[tuple[int, Works]]:
    """The works as columns, by their row of the hyper-parameter table and by whether they have a main and an out."""
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
        return [columns for of_kind in by_kind.values() for columns in uniform(of_kind)]
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


def in_order(batches: Sequence[Batch], codes: Sequence[str] = ()) -> list[Batch]:
    """The works as flat runs. A gradient whose memory order differs from its main's is copied. `codes` are states that
    must have one element per element of the parameter.

    Raises LayoutError if a tensor to be written has holes.
    """
    return [Batch(hyper, [Work(**run_of(work, codes)._asdict()) for work in works]) for hyper, works in batches]


def columns_of(parts: list[tuple[int, Works]], codecs: Mapping[str, StateCodec]) -> Columns:
    """The tensors and addresses of a call. Raises LayoutError for works without a main that miss one of its halves."""
    grads: list[Tensor] = []
    others: list[Tensor] = []
    scaled = [scale_name(name) for name, codec in codecs.items() if codec.block]
    for _, works in parts:
        mains = works.remainders if works.mains is None else works.mains
        if mains is None or (works.mains is None and works.outs is None):
            raise LayoutError("a work has no main: pass main, or out (bfloat16) and its remainder (int16)")
        grads += works.grads
        others += mains
        others += works.outs or ()
        for name in (*codecs, *scaled):
            others += map(itemgetter(name), works.states)
    return Columns(parts, grads, others, tuple(map(Tensor.data_ptr, grads)), tuple(map(Tensor.data_ptr, others)))


def names_of_columns(codecs: Mapping[str, StateCodec]) -> dict[str, int]:
    """Names of the columns except the gradient, and the number of parameter elements per entry of each."""
    scales = {scale_name(name): codec.block for name, codec in codecs.items() if codec.block}
    return {"main": 1, "out": 1} | dict.fromkeys(codecs, 1) | scales


def tensors_of(work: Work, codecs: Mapping[str, StateCodec]) -> list[Tensor | None]:
    """The tensors of a work in the order of `names_of_columns`. A remainder is in the column of the main."""
    _, _, *names = names_of_columns(codecs)
    return [work.remainder if work.main is None else work.main, work.out, *(work.state[name] for name in names)]


def lies_in_order(tensor: Tensor) -> bool:
    """Whether `tensor` is contiguous and its memory holds its values: a view with the negative bit set does not."""
    return tensor.is_contiguous() and not tensor.is_neg()


def are_in_order(columns: Columns, codecs: Mapping[str, StateCodec]) -> bool:
    """Whether all tensors are contiguous, and those with an entry per element have the shape of their gradient."""
    return all(map(lies_in_order, columns.tensors)) and all(
        tensor is None or tensor.shape == work.grad.shape
        for _, work in columns.works()
        for tensor in tensors_of(work, codecs)[: 2 + len(codecs)]
    )


def check_work(work: Work, codecs: Mapping[str, StateCodec], device: torch.device) -> None:
    """Raise LayoutError unless a sweep on `device` can update contiguous tensors of `work`."""
    check_halves(work)
    grad = work.grad
    for (name, elements), tensor in zip(names_of_columns(codecs).items(), tensors_of(work, codecs)):
        if tensor is None:
            continue
        if tensor.device != device or grad.device != device:
            raise LayoutError(f"{name} is on {tensor.device} and a gradient on {grad.device}; one sweep has one device")
        expected, is_scale = math.ceil(grad.numel() / elements), elements > 1
        if tensor.numel() != expected or (is_scale and tensor.dtype is not torch.float32):
            raise LayoutError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} with a "
                f"gradient of shape {tuple(grad.shape)}; allowed is a contiguous tensor of {expected} elements"
                f"{', torch.float32' * is_scale}"
            )
