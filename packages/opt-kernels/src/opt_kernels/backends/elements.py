"""Common to all elementwise sweeps: flat views of works, access to the main, and works as columns.

A call of a sweep processes whole columns and creates no object per tensor, because it runs in every step.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from types import NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.memory import is_dense
from opt_kernels.codecs import StateCodec, narrow, scale_name
from opt_kernels.works import Batch, Work, Works


class Run(NamedTuple):
    """The tensors of a work in one order of elements: flat, (n,), unless `dense_run_of` created it."""

    grad: Tensor  # (n,)
    main: Tensor | None  # (n,)
    out: Tensor | None  # (n,)
    remainder: Tensor | None  # (n,)
    state: Mapping[str, Tensor]  # (n,) each, except block scales
    first: int = 0  # number of the first element


class LayoutError(ValueError):
    """Tensors of a work that cannot be traversed in one order of elements."""


def check_halves(work: Work) -> None:
    """Raise LayoutError for a work without a main unless it has a bfloat16 out and an int16 or int8 remainder."""
    if work.main is None:
        dtypes = [None if tensor is None else tensor.dtype for tensor in (work.out, work.remainder)]
        if dtypes[0] is not torch.bfloat16 or dtypes[1] not in narrow.REMAINDERS:
            raise LayoutError(
                f"a work has neither a main nor its two halves: out is {dtypes[0]} and remainder {dtypes[1]}; "
                "pass main, or out (torch.bfloat16) and its remainder (torch.int16 or torch.int8)"
            )


def skipped(skip: Tensor | None) -> bool:
    """Whether the sweep must write nothing."""
    return skip is not None and bool(skip)


def run_of(work: Work, codes: Sequence[str] = ()) -> Run:
    """`work` as flat runs. The states in `codes` must have one element per element of the parameter.

    Raises LayoutError if a tensor to be written has holes, another order or another number of elements.
    """
    check_halves(work)
    anchor = work.main if work.main is not None else work.out
    assert anchor is not None
    _same_shape(work.grad, anchor, "grad")
    is_readable = _same_order(work.grad, anchor) and not work.grad.is_neg()  # as it lies in memory
    grad = work.grad if is_readable else torch.empty_like(anchor, dtype=work.grad.dtype)
    if grad is not work.grad:
        grad.copy_(work.grad)
    # Block scales are one number a block: another length than the anchor's, and always flat.
    state = {
        name: flat(tensor, anchor, name) if name in codes or tensor.shape == anchor.shape else tensor
        for name, tensor in work.state.items()
    }
    return Run(
        flat(grad, anchor, "grad"),
        None if work.main is None else flat(work.main, anchor, "main"),
        None if work.out is None else flat(work.out, anchor, "out"),
        None if work.remainder is None else flat(work.remainder, anchor, "remainder"),
        state,
        work.first,
    )


def dense_run_of(work: Work, codes: Sequence[str], scales: Sequence[str]) -> Run:
    """`work` with only these states, all in one order of elements; in its own shape if that is contiguous.

    For sweeps that accept any shape, because a view costs as much as launching an operation.
    """
    check_halves(work)
    # Fused sweeps traverse memory and ignore strides.
    grad = work.grad
    state = work.state
    shape = grad.shape
    if len(state) != len(codes) + len(scales):
        state = {name: state[name] for name in (*codes, *scales)}
    if not grad.is_contiguous() or grad.is_neg():
        return run_of(replace(work, state=state), codes)
    for tensor in (work.main, work.out, work.remainder, *[state[name] for name in codes]):
        if tensor is not None and not (tensor.is_contiguous() and tensor.shape == shape and not tensor.is_neg()):
            return run_of(replace(work, state=state), codes)
    return Run(grad, work.main, work.out, work.remainder, state, work.first)


def compute_dtype(run: Run | Work) -> torch.dtype:
    """The compute dtype: float64 if the main is float64, else float32."""
    return torch.float64 if run.main is not None and run.main.dtype is torch.float64 else torch.float32


def read_main(run: Run) -> Tensor:
    """A copy of the main in its compute dtype, joined from `out` and `remainder` if there is no main."""
    if run.main is not None:
        return run.main.to(compute_dtype(run), copy=True)
    assert run.out is not None
    assert run.remainder is not None
    return narrow.join(run.out, run.remainder)


def write_main_(run: Run, value: Tensor, *, stochastic_step: int | None = None) -> None:
    """Write `value` to the main and the out, or split it into `out` and `remainder`.

    With `stochastic_step`, the step, a bfloat16 main is rounded stochastically.
    """
    if run.main is not None:
        if stochastic_step is not None and rounds_stochastically(run):
            narrow.round_(run.main, value, first=run.first, step=stochastic_step)
        else:
            run.main.copy_(value)
        if run.out is not None:
            run.out.copy_(value)
        return
    assert run.out is not None
    assert run.remainder is not None
    narrow.split_(run.out, run.remainder, value)


def rounds_stochastically(run: Run) -> bool:
    """Whether stochastic rounding applies to the main. Raises ValueError for a main that it does not support."""
    if run.main is not None and run.main.dtype is torch.float16:
        raise ValueError(
            "stochastic_rounding=True with a float16 main: only bfloat16 is rounded "
            "stochastically; keep a float32 main of float16 parameters, or pass stochastic_rounding=False"
        )
    return run.main is not None and run.main.dtype is torch.bfloat16


def scaled_grad(run: Run, scale: float) -> Tensor:
    """The gradient in the compute dtype, times `scale`: a new tensor."""
    dtype = compute_dtype(run)
    if run.grad.dtype is dtype:
        return run.grad * scale
    wide = run.grad.to(dtype)
    return wide if scale == 1.0 else wide.mul_(scale)


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
    return all(a == b for size, a, b in zip(anchor.shape, tensor.stride(), anchor.stride()) if size > 1)


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
        if mains is None or (works.mains is None and (works.outs is None or NoneType in set(map(type, mains)))):
            raise LayoutError(
                "a work has neither a main nor its two halves; pass main, or out (torch.bfloat16) and its remainder "
                "(torch.int16 or torch.int8)"
            )
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
        expected = math.ceil(grad.numel() / elements)
        is_scale = elements > 1
        if tensor.numel() != expected or (is_scale and tensor.dtype is not torch.float32):
            raise LayoutError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} with a "
                f"gradient of shape {tuple(grad.shape)}; allowed is a contiguous tensor of {expected} elements"
                f"{', torch.float32' * is_scale}"
            )
