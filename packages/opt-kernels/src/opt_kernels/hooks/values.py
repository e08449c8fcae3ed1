"""The hooks: modifications of the update of any rule, as values.

With g the scaled gradient, u the direction of the rule (a step of -lr u), wd the weight decay of the group and
d = lr wd, a step is performed in this order. The order of hooks in the tuple matters only within 3.

    1. gradient    g <- g - mean(g)  (CentralizeGradient),  g <- g + wd p  (CoupledDecay)
    2. rule        u and its states, from g
    3. direction   u <- u masked (CautiousUpdate); then factors, in the order given (ClipUpdateRms, RelativeUpdate), or
                   factors of rows (RowFloor); then less of its outward part (RadialBrake)
    4. decay       p <- p - d p of the rule, or CautiousDecay or LrDecoupledDecay instead
    5. weights     p <- p - lr u, or Hyperball's or RadiusPin's projection
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar


class HookError(ValueError):
    """Hooks that conflict, or that a rule, parameter or layout does not support."""


@dataclass(frozen=True, slots=True)
class Hook:
    """Base class of hooks. Class attributes declare what a hook replaces and what it needs to see."""

    decays: ClassVar[bool] = False  # replaces the weight decay of the rule
    is_elementwise: ClassVar[bool] = True  # becomes part of a formula, without an additional pass over memory
    needs_rows: ClassVar[bool] = False  # needs whole rows of a parameter
    needs_matrices: ClassVar[bool] = False  # for parameters of two or more dims
    # Sums over the parameter that it needs: fields of `opt_kernels.hooks.sums.Sums`.
    sums: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class CoupledDecay(Hook):
    """L2 regularisation: g <- g + wd p before the rule, instead of the rule's own decay."""

    decays = True


@dataclass(frozen=True, slots=True)
class CautiousDecay(Hook):
    """Cautious weight decay (Chen et al. 2025, arXiv 2510.12402): p <- p - lr wd 1(u p >= 0) p - lr u."""

    decays = True


@dataclass(frozen=True, slots=True)
class LrDecoupledDecay(Hook):
    """Decay that follows the schedule but not the peak learning rate: p <- p - (lr / max_lr) wd p - lr u.

    With eta = lr / max_lr it is line 12 of algorithm 2 of Loshchilov & Hutter 2019; torch.optim.AdamW multiplies by
    lr instead. Raises HookError unless `max_lr`, the peak of the schedule, is a number above 0.
    """

    max_lr: float
    decays = True

    def __post_init__(self) -> None:
        _check_positive(self, "max_lr", self.max_lr)


@dataclass(frozen=True, slots=True)
class CautiousUpdate(Hook):
    """Cautious optimizers (Liang et al. 2024, arXiv 2411.16085, algorithm 1 with xi = 1).

    With m = 1(u g > 0) and n the parameter's elements, u <- (n / (|m|_0 + 1)) m u. g is the scaled gradient after
    CentralizeGradient.
    """

    is_elementwise = False
    sums = ("kept",)


@dataclass(frozen=True, slots=True)
class ClipUpdateRms(Hook):
    """Update clipping (Shazeer & Stern 2018, Adafactor, arXiv 1804.04235, section 6): u <- u / max(1, RMS(u) / d).

    d is `threshold`; RMS(u) = |u| / sqrt(n) over the n elements of the whole parameter. Raises HookError unless
    `threshold` is a number above 0.
    """

    threshold: float = 1.0
    is_elementwise = False
    sums = ("u_squares",)

    def __post_init__(self) -> None:
        _check_positive(self, "threshold", self.threshold)


@dataclass(frozen=True, slots=True)
class RelativeUpdate(Hook):
    """Scale the update to the norm of the weights, so that lr is the relative step size: u <- (|p| / |u|) u.

    LAMB's layerwise adaptation (You et al. 2020, arXiv 1904.00962, algorithm 2) with phi(z) = z and Frobenius
    norms, of the direction without weight decay. As in its implementations the factor is 1 where either norm is 0.
    """

    is_elementwise = False
    sums = ("u_squares", "p_squares")


@dataclass(frozen=True, slots=True)
class RowFloor(Hook):
    """A lower bound of each row of the update, relative to the same row of the weights ("RowUpdateFloor").

    With u_i and p_i row i of the direction and of the weights before the step, and tau `ratio`,

        u_i <- u_i max(1, tau |p_i| / |u_i|),    both norms at least 1e-8

    as in the optimizer records of modded-nanogpt (track 3, where tau is 0.3825 and u comes from SOAP-Muon). A row is
    one index of the first dim; a row of zeros in u stays zero. u is the direction with the rule's scale and without
    lr. ClipUpdateRms, RelativeUpdate and Hyperball, which need the norm after it, are refused. Raises HookError unless
    `ratio` is a number above 0.
    """

    ratio: float = 0.3825
    is_elementwise = False
    needs_rows = True
    needs_matrices = True

    def __post_init__(self) -> None:
        _check_positive(self, "ratio", self.ratio)


@dataclass(frozen=True, slots=True)
class Hyperball(Hook):
    """Weights on a sphere, updates of constant norm (arXiv 2606.16899).

    With N(x) = x / |x| and the Frobenius norm, p <- R N(p - lr R N(u)). R is `radius`, or the current norm of p,
    which a step preserves: it is the norm of the initial weights and needs no state. Weight decay must be 0. N(u) is 0
    if u is 0. Raises HookError for a `radius` that is not above 0.
    """

    radius: float | None = None
    decays = True
    is_elementwise = False
    sums = ("u_squares", "p_squares", "products")
    needs_matrices = True

    def __post_init__(self) -> None:
        if self.radius is not None:
            _check_positive(self, "radius", self.radius)


@dataclass(frozen=True, slots=True)
class RadialBrake(Hook):
    """Less of the part of an update that makes the weights longer (modded-nanogpt, track 3, PR 294).

    With c = <u, p> / |p|², u <- u - (1 - `outward`) c p where c < 0, that is where -lr u points outward; inward updates
    are unchanged. Weights of zeros have no direction, and move by u. The hook of this name in Emerging-Optimizers
    scales the change of the norm after the step instead. Raises HookError unless `outward` is in [0, 1].
    """

    outward: float = 0.5  # the share that stays
    is_elementwise = False
    needs_matrices = True
    sums = ("p_squares", "products")

    def __post_init__(self) -> None:
        if not (isinstance(self.outward, int | float) and 0 <= self.outward <= 1):
            raise HookError(f"RadialBrake: outward={self.outward!r} is not allowed; pass a share in [0, 1]")


@dataclass(frozen=True, slots=True)
class RadiusPin(Hook):
    """The norm of the weights follows the radial part of updates only (modded-nanogpt, track 3, PR 294).

    A step along the sphere lengthens the weights by its curvature. With rho = |p| - lr <u, p> / |p|, the norm that a
    step of any length would have to first order, p <- rho (p - lr u) / |p - lr u|, and decay as without the hook:
    - d p, with p before the step. Weights of zeros move by u.
    """

    is_elementwise = False
    needs_matrices = True
    sums = ("u_squares", "p_squares", "products")


@dataclass(frozen=True, slots=True)
class CentralizeGradient(Hook):
    """Gradient centralisation (Yong et al. 2020, arXiv 2004.01461): subtract from each row of g its mean.

    The mean is over all dims except the first; gradients of fewer than two dims are unchanged. If rows span ranks,
    `get_optimizer` adds up float64 row sums in one all-reduce before the rules run, and the mean may differ by one
    rounding from that of one process; the drop-in optimizers refuse such DTensors.
    """

    is_elementwise = False
    needs_rows = True


Hooks = tuple[Hook, ...]
GivenHooks = Sequence[Hook] | Mapping[str, Sequence[Hook]]
"""Hooks for all rules, or by the names of rules."""


def _check_positive(hook: Hook, name: str, value: float) -> None:
    if not (isinstance(value, int | float) and 0 < value < math.inf):
        raise HookError(f"{type(hook).__name__}: {name}={value!r} is not allowed; pass a number above 0")
