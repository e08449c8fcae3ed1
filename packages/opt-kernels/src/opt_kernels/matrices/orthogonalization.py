"""Orthogonalisation by the Newton-Schulz iteration: the polar factor of a matrix, with matrix products only.

Contents: the formula; the division of a schedule into segments; the iteration in few large batched products, by
segments; precision and tensor-parallel modes (`Orthogonalization`). The schedules stand in `coefficients`.

The steps of a segment are computed from the Gram matrix R = XXᵀ and multiply only (m, m) matrices. X (m, n) is read
twice per segment: to form R, and to apply the product of the steps. The longer X is, the more this saves. But R has the
squares of the singular values: rounding leaves its small eigenvalues with an error of one unit, possibly negative, and
every step multiplies the error by a². If it nears 1, the iteration diverges. The segment must end before that; then X
is updated and R is recomputed. (Gram-Newton-Schulz, Dao-AILab 2026, restarts at fixed steps in fp16; here the cuts
depend on the schedule and the dtype.)
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import Backend, parse_backend, version
from opt_kernels.matrices.access import Cut
from opt_kernels.matrices.coefficients import (
    NOT_IN_16_BITS,
    Coefficients,
    CoefficientType,
    Schedule,
    largest_eigenvalue,
    narrow_steps,
    schedule,
)
from opt_kernels.matrices.muon import EPS, Inputs, PostNorm, PreNorm
from opt_kernels.matrices.syrk import dense_product
from opt_kernels.precision import MatmulPrecision, fp32_products
from opt_kernels.works import AllReduce, NamedChoice, Scalar

__all__ = [
    "EPS", "MatmulPrecision", "Orthogonalization", "TpMode", "cut", "newton_schulz", "reference_newton_schulz",
]  # fmt: skip


Product = Callable[..., Tensor]
"""A version of `matrices.syrk.symmetric_product`."""
AOL_RANGE = 0.8  # largest singular value after the rescaling: below 0.884, where aol's first polynomial turns negative


def reference_newton_schulz(
    x: Tensor,  # (batch, m, n) any float dtype, read only
    *,
    segments: Sequence[Schedule],  # the steps; where they are cut makes no difference to the formula
    dtype: torch.dtype = torch.float64,  # of the iteration
    eps: float = EPS,
    product: Product = dense_product,
    all_reduce: AllReduce | None = None,  # sums over the ranks that hold the other columns of x
    rescale_rows: bool = False,  # see `row_scales`
) -> Tensor:
    """Approximate the polar factor UVᵀ of x = USVᵀ: every singular value s becomes p(s / ‖x‖_F).

    p is the composition of the steps' odd polynomials s <- a s + b s³ + c s⁵ (Keller Jordan, Muon, 2024; Bernstein and
    Newhouse, arXiv 2409.20325). Returns a new tensor (batch, m, n) in `dtype`. The norm is at least `eps`, so a zero
    matrix stays zero. With `rescale_rows`, p acts on the singular values of the rescaled matrix instead.
    """
    x = x.to(dtype)
    total = all_reduce or (lambda summed: summed)
    squares = total(x.square().sum((-2, -1), keepdim=True))
    x = x / squares.sqrt().clamp_min(eps)
    if rescale_rows:
        x = x * row_scales(total(product(x, x.mT)))
    for a, b, c in chain.from_iterable(segments):
        gram = total(product(x, x.mT))
        x = a * x + (b * gram + c * product(gram, gram)) @ x
    return x


def row_scales(gram: Tensor) -> Tensor:
    """AOL's scale of each row of X, from XXᵀ (batch, m, m): (batch, m, 1), in fp32 at least.

    With d_i = (Σ_j |XXᵀ|_ij)^(-1/2), no singular value of diag(d) X is above 1 (Prach and Lampert, arXiv 2208.03160;
    before Newton-Schulz in Turbo-Muon, arXiv 2512.04632), and few are far below 1. A matrix of rank one, or with
    orthogonal rows, reaches 1, where the set's first polynomial is negative. The scales returned here are therefore
    multiplied by `AOL_RANGE`.
    """
    wide = gram.to(torch.promote_types(gram.dtype, torch.float32))
    sums = wide.abs().sum(-1, keepdim=True)
    smallest = torch.finfo(gram.dtype).smallest_normal
    return AOL_RANGE * sums.clamp_min(smallest).rsqrt()


# An eigenvalue of R that consists of rounding errors, of a unit times the largest eigenvalue, may grow to about this
# before the polynomials stop contracting it. In bf16, two steps of the quintic set reach 1.02 and are about as accurate
# as one step at a time. Three steps are less accurate; the second and third of polar_express, which reach 3.9, lift
# values to 1.95.
GROWTH_LIMIT = 1.05
# Also below the limit, each step of a segment multiplies the error of R's small eigenvalues. With these lengths the
# error is at most five times that of one step at a time, for every set, and on Gaussian matrices about twice at most.
LONGEST_NARROW = 3
LONGEST = 2
HALVED = 0.625  # the work of a symmetric product of which only blocks up to the diagonal are computed


@cache
def cut(schedule: Schedule, *, rows: int, cols: int, dtype: torch.dtype, symmetric: bool) -> tuple[Schedule, ...]:
    """The cheapest division of `schedule` into segments that are accurate enough in `dtype`.

    `rows` is the side whose Gram matrix is formed. `symmetric`: whether symmetric products cost less than others.
    Segments of one step each are the plain iteration, which is always allowed, and cheapest for a square matrix.
    """
    unit = torch.finfo(dtype).eps / 2
    is_narrow = dtype.itemsize == 2
    longest = LONGEST_NARROW if is_narrow else LONGEST
    best: list[tuple[float, tuple[Schedule, ...]]] = [(0.0, ())]  # best[i]: cost and segments of the first i steps
    for end in range(1, len(schedule) + 1):
        candidates = []
        for start in range(end - 1, max(end - longest, 0) - 1, -1):
            segment = schedule[start:end]
            error = unit * largest_eigenvalue(schedule[:start]) if is_narrow else unit
            if len(segment) > 1 and growth(segment) * error > GROWTH_LIMIT:
                break
            cost, before = best[start]
            cost += _cost(segment, ratio=cols / max(rows, 1), symmetric=symmetric)
            candidates.append((cost, (*before, segment)))
        best.append(min(candidates, key=lambda candidate: candidate[0]))
    return best[-1][1]


def growth(segment: Schedule) -> float:
    """The factor by which the steps multiply the smallest eigenvalues of the Gram matrix."""
    return prod(a * a for a, _, _ in segment)


def _cost(segment: Schedule, *, ratio: float, symmetric: bool) -> float:
    """The multiplications of a segment, in units of m³, for a matrix of m rows and ratio · m columns."""
    # Products of (m, m): R² where needed, one for the factor after the first step, two for R before the last.
    small_products = sum(step.c != 0.0 for step in segment) + 3 * (len(segment) - 1)
    half = HALVED if symmetric else 1.0
    return half * ratio + half * small_products + ratio


def newton_schulz(
    x: Tensor,  # (batch, m, n) any float dtype, read only
    *,
    segments: Sequence[Schedule],  # the steps, divided by `cut`
    dtype: torch.dtype = torch.float32,  # of the iteration
    eps: float = EPS,
    product: Product | None = None,  # None: the symmetric one that suits the device
    all_reduce: AllReduce | None = None,  # sums over the ranks that hold the other columns of x
    normalised: bool = False,  # x is over its norm already
    rescale_rows: bool = False,
) -> Tensor:
    """`reference_newton_schulz`, up to rounding.

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
            wide = gram.to(torch.promote_types(dtype, torch.float32))
            gram = all_reduce(wide).to(dtype)
        if rescale_rows and number == 0:
            scales = row_scales(gram)
            x = (x * scales).to(dtype)
            scaled = scales * gram * scales.mT
            gram = scaled.to(dtype)
        factor = _factor(gram, segment, product, is_start=number == 0)
        spare = torch.empty_like(x) if spare is None else spare
        before = x
        x = dense_product(factor.rest, before, added=before, beta=factor.identity, out=spare)
        spare = None if before is given else before
    return x


class _Factor(NamedTuple):
    """A product of steps, identity · I + rest.

    The identity is stored separately: in a narrow dtype, adding it to the diagonal would round away most of `rest`.
    """

    identity: float
    rest: Tensor  # (batch, m, m), symmetric


def _normalised(x: Tensor, *, dtype: torch.dtype, eps: float, all_reduce: AllReduce | None) -> Tensor:
    """x divided by its Frobenius norm, a new tensor of `dtype`.

    The norm is computed in at least fp32, because a narrow sum of squares stops growing after a few thousand terms.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    norm = _norm(x, all_reduce)
    # Ranks that share matrices have the same norms. On a device the host would have to wait for them.
    has_overflowed = all_reduce is None
    if x.device.type == "cpu":
        has_overflowed = bool(norm.isinf().any())
    if has_overflowed:
        scales = torch.where(norm.isinf(), 2.0**-64, torch.ones_like(norm))
        x = x * scales
        norm = _norm(x, all_reduce)
    return torch.div(x, norm.clamp_min(eps), out=torch.empty_like(x, dtype=dtype))


def _norm(x: Tensor, all_reduce: AllReduce | None) -> Tensor:
    """The Frobenius norm of every whole matrix, (batch, 1, 1); infinite in fp32 above 1.8e19: squares overflow."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    if all_reduce is None:
        return norm
    return all_reduce(norm.square()).sqrt()


def _factor(gram: Tensor, segment: Schedule, product: Product, *, is_start: bool) -> _Factor:
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


def _step(gram: Tensor, step: Coefficients, product: Product, *, around_one: bool) -> _Factor:
    """aI + bR + cR² as qI + Y. The product R² is not computed if c is zero.

    Before the first step the eigenvalues of R are far below 1, and q = a. Later they are close to 1, where the terms
    cancel: a is 3, but the sum is 1. Then E = R - I is used: (a + b + c)I + (b + 2c)E + cE², whose last two terms
    vanish there. This reduces the error of three steps on one Gram matrix to a tenth.
    """
    a, b, c = step
    if not around_one:
        if c == 0.0:
            return _Factor(a, b * gram)
        return _Factor(a, product(gram, gram, alpha=c, added=gram, beta=b))
    shifted = gram.clone()
    shifted.diagonal(dim1=-2, dim2=-1).sub_(1.0)
    slope = b + 2.0 * c
    identity = a + b + c
    if c == 0.0:
        return _Factor(identity, slope * shifted)
    return _Factor(identity, product(shifted, shifted, alpha=c, added=shifted, beta=slope))


def _times(left: _Factor, right: _Factor, product: Product) -> _Factor:
    """(qI + Y)(rI + Z) = qr I + (rY + qZ + YZ)."""
    rest = product(left.rest, right.rest, added=left.rest, beta=right.identity)
    rest.add_(right.rest, alpha=left.identity)
    return _Factor(left.identity * right.identity, rest)


class TpMode(NamedChoice):
    """How a matrix that tensor parallelism shards is orthogonalised."""

    BLOCKWISE = "blockwise"  # each rank its own block: no communication; the update depends on the number of ranks
    DUPLICATED = "duplicated"  # gathered and done whole: bit for bit the update of one process
    DISTRIBUTED = "distributed"  # on blocks, with Gram matrices summed over ranks: the same update up to rounding

    @classmethod
    def _missing_(cls, value: object) -> "NamedChoice":
        """Read "layer_sharded", Megatron-LM's name for a mode in which each matrix has an owner, as `DUPLICATED`."""
        return cls.DUPLICATED if value == "layer_sharded" else super()._missing_(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalization:
    """The polar factor of matrices, by Newton-Schulz, between the normalisations that Muon's variants add:

        x <- x / norms of its rows                  with pre_norm
        O <- Newton-Schulz(x)
        O <- O / norms of its rows, columns, ...    with post_norm
        O <- <O, x> O                               with nuclear_scale: <O, x> is about the nuclear norm of x

    Blocks of the mode "blockwise" are matrices of their own.
    """

    schedule: Schedule
    eps: float = EPS  # lower bound of the norm that a matrix is divided by
    fp32_matmul_prec: MatmulPrecision = MatmulPrecision.MEDIUM
    use_syrk: bool = True
    tp_mode: TpMode = TpMode.BLOCKWISE
    rescale_rows: bool = False  # AOL's, before the first step
    pre_norm: PreNorm = PreNorm.NONE
    post_norm: PostNorm = PostNorm.NONE
    nuclear_scale: bool = False
    backend: str | None = None

    @classmethod
    def of(cls, rule: Any) -> "Orthogonalization":
        """That of a rule with the options of Newton-Schulz, `coefficient_type` and so on; its other fields from those
        of the rule, where it has them.

        Raises ValueError for a set that 16-bit rounding would make diverge, with the precision "medium"; and for AOL's
        in parts that are not gathered.
        """
        kind = rule.coefficient_type
        steps = schedule(kind, num_steps=rule.num_ns_steps, custom=rule.custom_coefficients)
        is_refused = kind in NOT_IN_16_BITS or (kind is CoefficientType.CUSTOM and narrow_steps(steps) is None)
        if is_refused and rule.fp32_matmul_prec is MatmulPrecision.MEDIUM:
            raise ValueError(
                f"coefficient_type '{kind}' with fp32_matmul_prec 'medium': 16-bit rounding carries singular values "
                "out of the range where its steps converge, and updates could be of any size; set fp32_matmul_prec "
                "(muon_fp32_matmul_prec in OptimizerConfig) to 'high' or 'highest', or choose other coefficients"
            )
        if kind is CoefficientType.AOL and getattr(rule, "tp_mode", None) is TpMode.DISTRIBUTED:
            raise ValueError(
                "coefficient_type 'aol' with tp_mode 'distributed': it rescales the rows of the side that is not cut, "
                "which need not be the shorter one; set tp_mode (muon_tp_mode) to 'duplicated', or choose other "
                "coefficients"
            )
        known = {field.name for field in fields(cls)} & {field.name for field in fields(rule)}
        common = {name: getattr(rule, name) for name in known}
        return cls(schedule=steps, rescale_rows=kind is CoefficientType.AOL, **common)

    def __call__(
        self,
        x: Tensor,  # (batch, rows, cols) float32 or float64, read only: this rank's part
        cut: Cut | None = None,
        *,
        normalised: bool = False,  # x has the form that `inputs` describes
    ) -> Tensor:
        """The orthogonalised matrices, or this rank's part of them, (batch, rows, cols) of x's dtype."""
        if self.tp_mode is TpMode.BLOCKWISE:
            cut = None
        if cut is None or self.tp_mode is TpMode.DISTRIBUTED:
            return self._orthogonalised(x, cut, normalised=normalised)
        whole = cut.ranks.all_gather(x, x.dim() + cut.dim)
        done = self._orthogonalised(whole, None)
        part = x.shape[cut.dim]
        first = cut.ranks.rank * part
        return done.narrow(cut.dim, first, part)

    def inputs(self, dtype: torch.dtype, device: torch.device, cut: Cut | None) -> Inputs:
        """The form of x that saves another pass for its norm. `dtype` is the compute dtype."""
        norms = (self.pre_norm, self.post_norm)
        has_norms = self.nuclear_scale or norms != (PreNorm.NONE, PostNorm.NONE)
        is_gathered = cut is not None and self.tp_mode is TpMode.DUPLICATED
        if has_norms or is_gathered:
            # What stands before or after Newton-Schulz must see x with its norm, unrounded. A gathered x is normalised
            # on every rank: a norm summed over ranks may differ in its last bit.
            return Inputs(dtype, False)
        all_reduce = None
        if cut is not None and self.tp_mode is TpMode.DISTRIBUTED:
            all_reduce = cut.ranks.all_reduce
        return Inputs(self._dtype(dtype, device), True, all_reduce, self.eps)

    def _orthogonalised(self, x: Tensor, cut: Cut | None, *, normalised: bool = False) -> Tensor:
        """Orthogonalise matrices, or parts of matrices, with what stands before and after Newton-Schulz."""
        if self.pre_norm is PreNorm.ROWS:
            x = x / self._norms(x, (-1,), cut)
        done = self._oriented(x, cut, normalised=normalised)
        for dims in self.post_norm.dims:
            done = done / self._norms(done, dims, cut)
        if self.post_norm is PostNorm.FROBENIUS:
            side: Scalar = min(x.shape[-2:])  # the smaller one of whole matrices
            if cut is not None:  # ranks may have parts of unequal size
                part = torch.full((), x.shape[cut.dim], dtype=torch.float64, device=x.device)
                side = cut.ranks.all_reduce(part).clamp_max(x.shape[-3 - cut.dim]).to(x.dtype)
            done = done * side**0.5
        if self.nuclear_scale:
            products = (done.double() * x).sum((-2, -1), keepdim=True)
            if cut is not None:
                products = cut.ranks.all_reduce(products)
            done = done * products.to(done.dtype)
        return done

    def _norms(self, x: Tensor, dims: tuple[int, ...], cut: Cut | None) -> Tensor:
        """The norms over `dims` of whole matrices, kept as dims of size 1, at least `eps`. Computed in float64: squares
        do not overflow, and sums over ranks are those of one rank."""
        norms: Tensor = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float64)
        if cut is not None and cut.dim in dims:
            norms = cut.ranks.all_reduce(norms.square()).sqrt()
        return norms.clamp_min(self.eps).to(x.dtype)

    def _oriented(self, x: Tensor, shared: Cut | None, *, normalised: bool) -> Tensor:
        """Orthogonalise with the Gram matrix of the shorter side, or of the one that is not cut: ranks must store
        columns, so that their Gram matrices add up to that of the whole."""
        transpose = x.shape[-2] > x.shape[-1]
        all_reduce = None
        if shared is not None:
            transpose = shared.dim == -2
            all_reduce = shared.ranks.all_reduce
        wide = x
        if transpose:
            wide = x.mT.contiguous()
        dtype = self._dtype(x.dtype, x.device)
        common: dict[str, Any] = {"eps": self.eps, "all_reduce": all_reduce, "rescale_rows": self.rescale_rows}
        if parse_backend(self.backend) is Backend.REFERENCE:
            done = reference_newton_schulz(wide, segments=(self.schedule,), **common)
        else:
            rows, cols = wide.shape[-2:]
            steps = self.schedule
            if dtype.itemsize == 2:
                steps = narrow_steps(steps) or steps
            segments = cut(steps, rows=rows, cols=cols, dtype=dtype, symmetric=self.use_syrk)
            product = dense_product
            if self.use_syrk:
                product = version("syrk", "symmetric_product", backend=self.backend, tensors=[x])
            # Products of 16 or 64 bits do not depend on the setting.
            with fp32_products(self.fp32_matmul_prec) if dtype is torch.float32 else nullcontext():
                done = newton_schulz(
                    wide, segments=segments, dtype=dtype, product=product, normalised=normalised, **common
                )
        done = done.to(x.dtype)
        return done.mT if transpose else done

    def dtype_of_products(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        """Return the dtype of the last products of a call on tensors of `dtype`; it holds the result exactly."""
        return dtype if parse_backend(self.backend) is Backend.REFERENCE else self._dtype(dtype, device)

    def _dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        if dtype is torch.float64 or self.fp32_matmul_prec is not MatmulPrecision.MEDIUM:
            return dtype
        return torch.float16 if device.type == "cuda" else torch.bfloat16
