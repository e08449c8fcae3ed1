"""Newton-Schulz by its formula: step by step, with full products."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from opt_kernels.matrices.newton_schulz.coefficients import Schedule
from opt_kernels.matrices.syrk.reference import symmetric_product

AOL_RANGE = 0.8  # largest singular value after the rescaling: below 0.884, where aol's first polynomial turns negative
EPS = 1e-15  # as in Megatron-Core; far below any gradient, so that clipping cannot push a momentum under it


def newton_schulz(
    x: Tensor,  # (batch, m, n) any float dtype, read only
    *,
    segments: Sequence[Schedule],  # the steps; where they are cut makes no difference to the formula
    dtype: torch.dtype = torch.float64,  # of the iteration
    eps: float = EPS,
    product: Callable[..., Tensor] = symmetric_product,
    all_reduce: Callable[[Tensor], Tensor] | None = None,  # sums over the ranks that hold the other columns of x
    rescale_rows: bool = False,  # see `row_scales`
) -> Tensor:
    """Approximate the polar factor UVᵀ of x = USVᵀ: every singular value s becomes p(s / ‖x‖_F).

    p is the composition of the steps' odd polynomials s <- a s + b s³ + c s⁵ (Keller Jordan, Muon, 2024; Bernstein and
    Newhouse, arXiv 2409.20325). Returns a new tensor (batch, m, n) in `dtype`. The norm is at least `eps`, so a zero
    matrix stays zero. With `rescale_rows`, p acts on the singular values of the rescaled matrix instead.
    """
    x = x.to(dtype)
    squares = x.square().sum((-2, -1), keepdim=True)
    x = x / (squares if all_reduce is None else all_reduce(squares)).sqrt().clamp_min(eps)
    if rescale_rows:
        gram = product(x, x.mT)
        x = x * row_scales(gram if all_reduce is None else all_reduce(gram))
    for a, b, c in chain.from_iterable(segments):
        gram = product(x, x.mT)
        gram = gram if all_reduce is None else all_reduce(gram)
        x = a * x + (b * gram + c * product(gram, gram)) @ x
    return x


def row_scales(gram: Tensor) -> Tensor:
    """AOL's scale of each row of X, from XXᵀ (batch, m, m): (batch, m, 1), in fp32 at least.

    With d_i = (Σ_j |XXᵀ|_ij)^(-1/2), no singular value of diag(d) X is above 1 (Prach and Lampert, arXiv 2208.03160;
    before Newton-Schulz in Turbo-Muon, arXiv 2512.04632), and few are far below 1. A matrix of rank one, or with
    orthogonal rows, reaches 1, where the set's first polynomial is negative. The scales returned here are therefore
    multiplied by `AOL_RANGE`.
    """
    sums = gram.to(torch.promote_types(gram.dtype, torch.float32)).abs().sum(-1, keepdim=True)
    return AOL_RANGE * sums.clamp_min(torch.finfo(gram.dtype).smallest_normal).rsqrt()
