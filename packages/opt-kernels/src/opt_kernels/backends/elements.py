"""Common to all elementwise sweeps: flat views of works, access to the main, and works as columns.

A call of a sweep processes whole columns and creates no object per tensor, because it runs in every step.
"""

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from opt_kernels.codecs import Codecs, narrow, scale_name
from opt_kernels.works import Batch, Skip, Work, Works


class LayoutError(ValueError):
    """Tensors of a work that cannot be traversed in one order of elements."""


def halves(work: Work) -> tuple[Tensor, Tensor]:
    """The upper and lower halves of the values of a work without a main. Raises LayoutError unless these are a bfloat16
    out and an int16 or int8 remainder."""
    upper = work.out
    lower = work.remainder
    if upper is None or lower is None or upper.dtype is not torch.bfloat16 or lower.dtype not in narrow.REMAINDERS:
        dtypes = [None if tensor is None else tensor.dtype for tensor in (upper, lower)]
        raise LayoutError(
            f"a work has neither a main nor its two halves: out is {dtypes[0]} and remainder {dtypes[1]}; "
            "pass main, or out (torch.bfloat16) and its remainder (torch.int16 or torch.int8)"
        )
    return upper, lower


def tensors_of_main(work: Work) -> dict[str, Tensor]:
    """What `write_main_` writes: the main, the out and the remainder, of those that there are."""
    given = {"main": work.main, "out": work.out, "remainder": work.remainder}
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def anchor_of(work: Work) -> Tensor:
    """The tensor whose layout the others have: the main, or its upper half. Raises the error of `halves`."""
    return halves(work)[0] if work.main is None else work.main


def skipped(skip: Skip) -> bool:
    """Whether the sweep must write nothing."""
    return skip is not None and bool(skip)


def run_of(work: Work, codes: Collection[str]) -> Work:
    """`work` with flat tensors (n,) in one order of elements; block scales stay. The states in `codes` must have one
    element per element of the parameter.

    Raises LayoutError if a tensor to be written has holes, another order or another number of elements.
    """
    anchor = anchor_of(work)
    _same_shape(work.grad, anchor, "grad")
    grad = work.grad
    if not _same_order(grad, anchor) or grad.is_neg():  # it cannot be read as it lies in memory
        grad = torch.empty_like(anchor, dtype=grad.dtype).copy_(grad)
    # Block scales are one number a block: another length than the anchor's, and always flat.
    state = dict(work.state)
    for name, tensor in work.state.items():
        if name in codes or tensor.shape == anchor.shape:
            state[name] = flat(tensor, anchor, name)
    changed: dict[str, Any] = {"state": state, "grad": flat(grad, anchor, "grad")}
    for name, tensor in tensors_of_main(work).items():
        changed[name] = flat(tensor, anchor, name)
    return replace(work, **changed)


def dense_run_of(work: Work, codes: Collection[str], scales: Collection[str]) -> Work:
    """`work` with only these states, all in one order of elements; in its own shape if that is contiguous.

    For sweeps that accept any shape, because a view costs as much as launching an operation.
    """
    if len(work.state) != len(codes) + len(scales):
        work = replace(work, state={name: work.state[name] for name in (*codes, *scales)})
    # Fused sweeps traverse memory and ignore strides.
    anchor = anchor_of(work)
    states = [work.state[name] for name in codes]
    for tensor in (work.grad, *tensors_of_main(work).values(), *states):
        if tensor.shape != anchor.shape or not lies_in_order(tensor):
            return run_of(work, codes)
    return work


def compute_dtype(work: Work) -> torch.dtype:
    """The compute dtype: float64 if the main is float64, else float32."""
    if work.main is not None and work.main.dtype is torch.float64:
        return torch.float64
    return torch.float32


def read_main(work: Work, *, copy: bool = False) -> Tensor:
    """The main in its compute dtype: the tensor itself if it has this dtype and no `copy` is needed, else a new one."""
    if work.main is not None:
        return work.main.to(compute_dtype(work), copy=copy)
    return narrow.join(*halves(work))


def write_main_(work: Work, value: Tensor, words: Tensor | None = None) -> None:
    """Write `value` to the main and the out, or split it into `out` and `remainder`.

    With noise `words`, a bfloat16 main is rounded stochastically.
    """
    if work.main is None:
        narrow.split_(*halves(work), value)
        return
    if words is not None:
        narrow.round_(work.main, value, words)
    else:
        work.main.copy_(value)
    if work.out is not None:
        work.out.copy_(value)


def rounds_stochastically(main: torch.dtype | None) -> bool:
    """Whether stochastic rounding applies to mains of this dtype. Raises LayoutError if it does not support them."""
    if main is torch.float16:
        raise LayoutError(
            "stochastic_rounding=True with a float16 main: only bfloat16 is rounded stochastically; keep a float32 "
            "main of float16 parameters, or pass stochastic_rounding=False"
        )
    return main is torch.bfloat16


def scaled_grad(work: Work, scale: float) -> Tensor:
    """The gradient in the compute dtype, times `scale`: a new tensor."""
    dtype = compute_dtype(work)
    if work.grad.dtype is dtype:
        return work.grad * scale
    wide = work.grad.to(dtype)
    if scale == 1.0:
        return wide
    return wide.mul_(scale)


def flat(tensor: Tensor, anchor: Tensor, name: str) -> Tensor:
    """`tensor` as a view (n,), in the memory order of the anchor's elements.

    Raises LayoutError for another shape or order, for holes, and for a tensor with its negative bit set.
    """
    if tensor.is_neg():
        raise LayoutError(
            f"{name} of shape {tuple(tensor.shape)} is a view with its negative bit set, so values written to its "
            "memory would be read with the opposite sign; pass tensor.resolve_neg()"
        )
    if tensor.is_contiguous() and anchor.is_contiguous() and tensor.shape == anchor.shape:
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    _same_shape(tensor, anchor, name)
    if not _same_order(tensor, anchor) or not is_dense(anchor):
        raise LayoutError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()} where its parameter has "
            f"{anchor.stride()}; allowed are equal strides without holes; make the parameter contiguous"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without holes or overlaps. True for empty tensors."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def in_memory_order(tensor: Tensor) -> Tensor:
    """Its elements as (n,) in any order: a view if they are dense, else a copy."""
    if tensor.is_contiguous() or not is_dense(tensor):
        return tensor.contiguous().view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _same_shape(tensor: Tensor, anchor: Tensor, name: str) -> None:
    """Raise LayoutError if `tensor` has another shape, because a sweep would access memory outside of it."""
    if tensor.shape != anchor.shape:
        raise LayoutError(
            f"{name} has shape {tuple(tensor.shape)} where its parameter has {tuple(anchor.shape)}; pass equal shapes; "
            "if a parameter was replaced by one of another shape, delete its state"
        )


def _same_order(tensor: Tensor, anchor: Tensor) -> bool:
    """Whether tensors of one shape have equal strides. Strides of dims of size 1 do not matter."""
    if tensor.is_contiguous() and anchor.is_contiguous():
        return True
    for size, stride, wanted in zip(anchor.shape, tensor.stride(), anchor.stride()):
        if size > 1 and stride != wanted:
            return False
    return True


class Item(NamedTuple):
    """One work of a call."""

    row: int  # of the hyper-parameter table
    work: Work
    tensors: list[Tensor | None]  # in the order of `names_of_columns`; a remainder is in the column of the main


Parts: TypeAlias = list[tuple[int, Works]]
"""Works with the same kinds of tensors, each with their row of the hyper-parameter table."""


class Columns(NamedTuple):
    """The tensors of a call, and their addresses. What `key` identifies is derived once from its `items`."""

    parts: Parts
    grads: list[Tensor]
    others: list[Tensor]  # of each part: mains or remainders, outs, states, scales
    grads_at: tuple[int, ...]  # addresses
    others_at: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.grads, *self.others)

    def key(self, codecs: Codecs) -> Hashable:
        """Identifies the kinds of all tensors, and the places of all except the gradients, which move."""
        kinds = []
        for row, works in self.parts:
            has_none = (works.mains is None, works.outs is None)
            kinds.append((row, len(works), has_none, works.firsts))
        return self.others_at, tuple(kinds), tuple(codecs.items())

    def items(self, codecs: Codecs) -> list[Item]:
        """All works."""
        _, _, *names = names_of_columns(codecs)
        found = []
        for row, works in self.parts:
            for work in works:
                main = work.remainder if work.main is None else work.main
                states = [work.state[name] for name in names]
                found.append(Item(row, work, [main, work.out, *states]))
        return found


def parts_of(batches: Sequence[Batch]) -> Parts:
    """The works as columns, by their row of the hyper-parameter table and by whether they have a main and an out."""
    return [(row, works) for row, batch in enumerate(batches) for works in uniform(batch.works)]


_FIELDS = attrgetter("grad", "main", "state", "out", "remainder", "matrix", "first")


def uniform(works: Sequence[Work]) -> list[Works]:
    """`works` as columns, grouped by whether they have a main and an out."""
    if isinstance(works, Works):
        return [works]
    by_kind: dict[tuple[bool, bool], list[Work]] = {}
    for work in works:
        by_kind.setdefault((work.main is None, work.out is None), []).append(work)
    return [in_columns(of_kind) for of_kind in by_kind.values()]


def in_columns(works: Sequence[Work]) -> Works:
    """`works` as columns. All of them have a main, or none has, and so for out."""
    grads, mains, states, outs, remainders, matrices, firsts = zip(*map(_FIELDS, works))
    columns = Works(grads, mains=mains, states=states, outs=outs, matrices=matrices, firsts=firsts)
    if mains[0] is None:
        columns.mains = None
        columns.remainders = remainders
    if outs[0] is None:
        columns.outs = None
    return columns


def in_order(batches: Sequence[Batch], codes: Collection[str]) -> list[Batch]:
    """The works as flat runs. A gradient whose memory order differs from its main's is copied. `codes` are states that
    must have one element per element of the parameter.

    Raises LayoutError if a tensor to be written has holes.
    """
    return [Batch(hyper, [run_of(work, codes) for work in works]) for hyper, works in batches]


def columns_of(parts: Parts, codecs: Codecs) -> Columns:
    """The tensors and addresses of a call. Raises LayoutError for works without a main that miss one of its halves."""
    grads: list[Tensor] = []
    others: list[Tensor] = []
    states = (*codecs, *block_scales(codecs))
    for _, works in parts:
        mains = works.mains
        if mains is None:
            mains = works.remainders or ()
            if works.outs is None or len(mains) < len(works) or NoneType in set(map(type, mains)):
                for work in works:
                    halves(work)  # raises
        grads += works.grads
        others += mains
        others += works.outs or ()
        for name in states:
            others += map(itemgetter(name), works.states)
    grads_at = tuple(map(Tensor.data_ptr, grads))
    others_at = tuple(map(Tensor.data_ptr, others))
    return Columns(parts, grads, others, grads_at, others_at)


def names_of_columns(codecs: Codecs) -> dict[str, int]:
    """Names of the columns except the gradient, and the number of parameter elements per entry of each."""
    return dict.fromkeys(("main", "out", *codecs), 1) | block_scales(codecs)


def block_scales(codecs: Codecs) -> dict[str, int]:
    """Names of the states that hold block scales, and the number of elements per scale."""
    return {scale_name(name): codec.block for name, codec in codecs.items() if codec.block}


def lies_in_order(tensor: Tensor) -> bool:
    """Whether `tensor` is contiguous and its memory holds its values: a view with the negative bit set does not."""
    return tensor.is_contiguous() and not tensor.is_neg()


def are_in_order(items: Sequence[Item], num_states: int) -> bool:
    """Whether all tensors are contiguous, and those with an entry per element have the shape of their gradient."""
    for item in items:
        grad = item.work.grad
        if not lies_in_order(grad):
            return False
        for column, tensor in enumerate(item.tensors):
            if tensor is None:
                continue
            is_scale = column >= 2 + num_states
            if not lies_in_order(tensor) or not (is_scale or tensor.shape == grad.shape):
                return False
    return True


def check_item(item: Item, codecs: Codecs, device: torch.device) -> None:
    """Raise LayoutError unless a sweep on `device` can update contiguous tensors of a work."""
    anchor_of(item.work)  # raises for a work without one
    grad = item.work.grad
    for (name, elements), tensor in zip(names_of_columns(codecs).items(), item.tensors):
        if tensor is None:
            continue
        if tensor.device != device or grad.device != device:
            raise LayoutError(f"{name} is on {tensor.device} and a gradient on {grad.device}; one sweep has one device")
        expected = math.ceil(grad.numel() / elements)
        is_scale = elements > 1
        if tensor.numel() != expected or (is_scale and tensor.dtype is not torch.float32):
            wanted = f"{expected} elements{', torch.float32' * is_scale}"
            raise LayoutError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} with a "
                f"gradient of shape {tuple(grad.shape)}; allowed is a contiguous tensor of {wanted}"
            )
