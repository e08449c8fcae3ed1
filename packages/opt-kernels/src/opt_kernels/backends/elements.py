"""Common to all elementwise sweeps: flat views of works, and access to the main."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.codecs import remainder as remainder_reference
from opt_kernels.codecs import rounding as rounding_reference
from opt_kernels.works import Work


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
        if dtypes[0] is not torch.bfloat16 or dtypes[1] not in remainder_reference.REMAINDERS:
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
    grad, state = work.grad, work.state
    shape = grad.shape
    if len(state) != len(codes) + len(scales):
        state = {name: state[name] for name in (*codes, *scales)}
    if not grad.is_contiguous() or grad.is_neg():
        return run_of(replace(work, state=state), codes)
    for tensor in (work.main, work.out, work.remainder, *[state[name] for name in codes]):
        if tensor is not None and not (tensor.is_contiguous() and tensor.shape == shape and not tensor.is_neg()):
            return run_of(replace(work, state=state), codes)
    return Run(grad, work.main, work.out, work.remainder, state, work.first)


def compute_dtype(run: Run) -> torch.dtype:
    """The compute dtype of a run: float64 if the main is float64, else float32."""
    return torch.float64 if run.main is not None and run.main.dtype is torch.float64 else torch.float32


def read_main(run: Run) -> Tensor:
    """A copy of the main in its compute dtype, joined from `out` and `remainder` if there is no main."""
    if run.main is not None:
        return run.main.to(compute_dtype(run), copy=True)
    assert run.out is not None
    assert run.remainder is not None
    return remainder_reference.join(run.out, run.remainder)


def write_main_(run: Run, value: Tensor, *, stochastic_step: int | None = None) -> None:
    """Write `value` to the main and the out, or split it into `out` and `remainder`.

    With `stochastic_step`, the step, a bfloat16 main is rounded stochastically.
    """
    if run.main is not None:
        if stochastic_step is not None and rounds_stochastically(run):
            rounding_reference.round_(run.main, value, first=run.first, step=stochastic_step)
        else:
            run.main.copy_(value)
        if run.out is not None:
            run.out.copy_(value)
        return
    assert run.out is not None
    assert run.remainder is not None
    remainder_reference.split_(run.out, run.remainder, value)


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
    return run.grad * scale if run.grad.dtype is dtype else run.grad.to(dtype).mul_(scale)


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
