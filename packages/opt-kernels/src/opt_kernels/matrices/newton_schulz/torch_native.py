"""Newton-Schulz in few large products: batched, by segments on the Gram matrix, each product rounded once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import version
from opt_kernels.matrices.newton_schulz.coefficients import Coefficients, Schedule
from opt_kernels.matrices.newton_schulz.reference import EPS


def newton_schulz(
    x: Tensor,  # (batch, m, n) any float dtype, read only
    *,
    segments: Sequence[Schedule],  # the steps, cut as `segments.cut` allows
    dtype: torch.dtype = torch.float32,  # of the iteration
    eps: float = EPS,
    product: Callable[..., Tensor] | None = None,  # None: the symmetric one that suits the device
    all_reduce: Callable[[Tensor], Tensor] | None = None,  # sums over the ranks that hold the other columns of x
    normalised: bool = False,  # x is over its norm already
) -> Tensor:
    """What `reference.newton_schulz` says, up to rounding.

    The Gram matrix is summed over ranks once a segment; all of a segment's other products are of (m, m) matrices, which
    every rank has.
    """
    product = product or version("syrk", "symmetric_product", backend=None, tensors=[x])
    given = x
    x = x.to(dtype) if normalised else _normalised(x, dtype=dtype, eps=eps, all_reduce=all_reduce)
    spare = None  # an x of two segments ago: to allocate one takes as long as a tenth of the products
    for segment in segments:
        gram = product(x, x.mT)
        if all_reduce is not None:
            # Summed in fp32: the partial sums of a narrow Gram matrix would be rounded once a rank.
            gram = all_reduce(gram.to(torch.promote_types(dtype, torch.float32))).to(dtype)
        factor = _factor(gram, segment, product)
        spare, before = torch.empty_like(x) if spare is None else spare, x
        x = torch.baddbmm(before, factor.rest, before, beta=factor.identity, out=spare)
        spare = None if before is given else before
    return x


class _Factor(NamedTuple):
    """A product of steps, identity · I + rest.

    The identity is kept aside: added to the diagonal it would be most of a narrow number, and round the rest away.
    """

    identity: float
    rest: Tensor  # (batch, m, m), symmetric


def _normalised(x: Tensor, *, dtype: torch.dtype, eps: float, all_reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """x over its Frobenius norm, computed in at least fp32: a narrow sum of squares stops growing after a few thousand.

    A new tensor of `dtype`.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if all_reduce is not None:
        norm = all_reduce(norm.square()).sqrt()
    return torch.div(x, norm.clamp_min(eps), out=torch.empty_like(x, dtype=dtype))


def _factor(gram: Tensor, segment: Schedule, product: Callable[..., Tensor]) -> _Factor:
    """The product of a segment's steps, from the Gram matrix R before the first of them.

    Each step is aI + Z with Z = bR + cR², and leaves R <- (aI + Z) R (aI + Z). All of these are polynomials of one
    matrix: they commute, and so every product of two is symmetric.
    """
    factor = None
    for i, (a, b, c) in enumerate(segment):
        z = _odd_part(gram, Coefficients(a, b, c), product)
        factor = _Factor(a, z) if factor is None else _times(factor, a, z, product)
        if i + 1 < len(segment):
            half_way = product(gram, z, added=gram, beta=a)
            gram = product(z, half_way, added=half_way, beta=a)
    assert factor is not None, "a segment has at least one step"
    return factor


def _odd_part(gram: Tensor, step: Coefficients, product: Callable[..., Tensor]) -> Tensor:
    """bR + cR²; without the product where c is zero."""
    if step.c == 0.0:
        return step.b * gram
    return product(gram, gram, alpha=step.c, added=gram, beta=step.b)


def _times(factor: _Factor, a: float, z: Tensor, product: Callable[..., Tensor]) -> _Factor:
    """(qI + Y)(aI + Z) = qa I + (aY + qZ + YZ)."""
    rest = product(factor.rest, z, added=factor.rest, beta=a).add_(z, alpha=factor.identity)
    return _Factor(factor.identity * a, rest)
