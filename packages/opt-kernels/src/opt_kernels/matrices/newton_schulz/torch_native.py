"""Newton-Schulz in few large batched products, by segments on the Gram matrix. Each product is rounded once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import version
from opt_kernels.matrices.newton_schulz.coefficients import Coefficients, Schedule
from opt_kernels.matrices.newton_schulz.reference import EPS, row_scales


def newton_schulz(
    x: Tensor,  # (batch, m, n) any float dtype, read only
    *,
    segments: Sequence[Schedule],  # the steps, cut as `segments.cut` allows
    dtype: torch.dtype = torch.float32,  # of the iteration
    eps: float = EPS,
    product: Callable[..., Tensor] | None = None,  # None: the symmetric one that suits the device
    all_reduce: Callable[[Tensor], Tensor] | None = None,  # sums over the ranks that hold the other columns of x
    normalised: bool = False,  # x is over its norm already
    rescale_rows: bool = False,
) -> Tensor:
    """`reference.newton_schulz`, up to rounding.

    The Gram matrix is summed over ranks once per segment. All other products of a segment multiply (m, m) matrices,
    which every rank has.
    """
    product = product or version("syrk", "symmetric_product", backend=None, tensors=[x])
    given = x
    x = x.to(dtype) if normalised else _normalised(x, dtype=dtype, eps=eps, all_reduce=all_reduce)
    spare = None  # memory of an earlier x, reused: allocating takes a tenth of the time of the products
    for number, segment in enumerate(segments):
        gram = product(x, x.mT)
        if all_reduce is not None:
            # Summed in fp32, because partial sums in a narrow dtype would be rounded once per rank.
            gram = all_reduce(gram.to(torch.promote_types(dtype, torch.float32))).to(dtype)
        if rescale_rows and number == 0:
            scales = row_scales(gram)
            x, gram = (x * scales).to(dtype), (scales * gram * scales.mT).to(dtype)
        factor = _factor(gram, segment, product, is_start=number == 0)
        spare, before = torch.empty_like(x) if spare is None else spare, x
        x = torch.baddbmm(before, factor.rest, before, beta=factor.identity, out=spare)
        spare = None if before is given else before
    return x


class _Factor(NamedTuple):
    """A product of steps, identity · I + rest.

    The identity is stored separately: in a narrow dtype, adding it to the diagonal would round away most of `rest`.
    """

    identity: float
    rest: Tensor  # (batch, m, m), symmetric


def _normalised(x: Tensor, *, dtype: torch.dtype, eps: float, all_reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """x divided by its Frobenius norm, a new tensor of `dtype`.

    The norm is computed in at least fp32, because a narrow sum of squares stops growing after a few thousand terms.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if all_reduce is not None:
        norm = all_reduce(norm.square()).sqrt()
    return torch.div(x, norm.clamp_min(eps), out=torch.empty_like(x, dtype=dtype))


def _factor(gram: Tensor, segment: Schedule, product: Callable[..., Tensor], *, is_start: bool) -> _Factor:
    """The product of a segment's steps, from the Gram matrix R before the first of them.

    Each step is qI + Y, and sets R <- (qI + Y) R (qI + Y). All of these are polynomials of one matrix, so they commute,
    and the product of any two is symmetric.
    """
    factor = None
    for i, step in enumerate(segment):
        of_step = _step(gram, step, product, around_one=i > 0 or not is_start)
        factor = of_step if factor is None else _times(factor, of_step, product)
        if i + 1 < len(segment):
            half_way = product(gram, of_step.rest, added=gram, beta=of_step.identity)
            gram = product(of_step.rest, half_way, added=half_way, beta=of_step.identity)
    assert factor is not None, "a segment has at least one step"
    return factor


def _step(gram: Tensor, step: Coefficients, product: Callable[..., Tensor], *, around_one: bool) -> _Factor:
    """aI + bR + cR² as qI + Y. The product R² is not computed if c is zero.

    Before the first step the eigenvalues of R are far below 1, and q = a. Later they are close to 1, where the terms
    cancel: a is 3, but the sum is 1. Then E = R - I is used: (a + b + c)I + (b + 2c)E + cE², whose last two terms
    vanish there. This reduces the error of three steps on one Gram matrix to a tenth.
    """
    a, b, c = step
    if not around_one:
        return _Factor(a, b * gram if c == 0.0 else product(gram, gram, alpha=c, added=gram, beta=b))
    shifted = gram.clone()
    shifted.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    slope = b + 2.0 * c
    rest = slope * shifted if c == 0.0 else product(shifted, shifted, alpha=c, added=shifted, beta=slope)
    return _Factor(a + b + c, rest)


def _times(left: _Factor, right: _Factor, product: Callable[..., Tensor]) -> _Factor:
    """(qI + Y)(rI + Z) = qr I + (rY + qZ + YZ)."""
    rest = product(left.rest, right.rest, added=left.rest, beta=right.identity).add_(right.rest, alpha=left.identity)
    return _Factor(left.identity * right.identity, rest)
