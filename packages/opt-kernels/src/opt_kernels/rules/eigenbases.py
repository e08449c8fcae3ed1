"""Base class of SOAP and SOAP-Muon: Shampoo's preconditioner, a factor for each side of a matrix and its eigenbasis."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend
from opt_kernels.backends.elements import skipped
from opt_kernels.matrices import access
from opt_kernels.matrices.orthogonal_basis import Eigenbasis, cholesky, eigenbasis, householder
from opt_kernels.precision import MatmulPrecision, fp32_products
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import NOT_SPLIT, Hyper, MatrixSpec, NamedChoice, Skip, StateKind, States, StateSpec, Task

LEFT = "L"
RIGHT = "R"


class Order(NamedChoice):
    """The order of a step of SOAP, and with it how bases are updated."""

    PAPER = "paper"  # update in the previous bases, then factors, then bases; the first step only finds the bases
    MEGATRON = "megatron"  # factors, then bases, then the update in them; from the first step


class Turned(NamedTuple):
    """The change of the basis of one side."""

    rotation: Tensor  # (batch, n, n): Q_newᵀ Q_old
    order: Tensor  # (batch, n): the old vector that each new one came from


@dataclass(frozen=True, slots=True, kw_only=True)
class EigenbasisRule(WholeMatrices):
    """A rule that transforms gradients G (m, n) in the eigenbases of Shampoo's factors.

    A final class has `name`, `moments` (the names of its states in the parameter's shape) and `direct_`. Factors and
    bases are the states `L`, `Q_L` and for KL `eigvals_L`; R likewise. Rows that `MatrixSpec.split_rows` splits into
    separate matrices have states of their own.

    With b = shampoo_beta and b_t = 1 - (1 - b) / (1 - bᵗ), or b_t = b without `corrects_bias`, at step t:

        plain   L <- L + (1 - b_t)(GGᵀ - L)                               R likewise with GᵀG
        KL      L <- L + (1 - b_t)(G Q_R max(λ_R, eps)⁻¹ Q_Rᵀ Gᵀ / n - L)   R likewise with Q_L, λ_L, m

    Both updates use the previous bases and eigenvalues. A side without a factor counts as the identity. Before the
    first step eigenvalues are 1 with order "paper", so that both sides begin as the identity, and 0 with order
    "megatron", as in Megatron-Core: there the first factors are GGᵀ / (n eps) and GᵀG / (m eps).

    Bases and eigenvalues are computed from factors scaled by powers of two, so that their norms neither overflow nor
    vanish.

    Plain: Gupta et al., arXiv 1802.09568, as a moving average; KL: Lin et al., arXiv 2509.03378.
    """

    shampoo_beta: float = 0.95
    power_iterations: int = 1
    max_precond_dim: int | None = 10_000  # a longer side has no factor; None: every side has
    one_sided: bool = False  # only the shorter side has a factor; the left where both are equally long
    backend: str | None = None  # "reference", "torch"; None: by device

    def __post_init__(self) -> None:
        check_backend(self.backend, self.name)
        if not 0.0 <= self.shampoo_beta < 1.0:
            raise ValueError(f"shampoo_beta is {self.shampoo_beta}, but must be in [0, 1); 0.95 is usual")
        for name in ("power_iterations", "max_precond_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]: ...

    @abstractmethod
    def direct_(self, states: access.PartStates, grads: Tensor, hyper: Hyper) -> Tensor:
        """The directions of gradients (batch, m, n) of one part. Updates moments, factors and bases."""

    def finished(self, directions: Tensor) -> Tensor:
        """The updates for directions (batch, m, n) of one part."""
        return directions

    use_kl_shampoo = False
    order = Order.PAPER  # `PAPER` sorts a basis before it is rotated, `MEGATRON` after
    corrects_bias = False

    @property
    def keeps_null_spaces(self) -> bool:
        """False: rounding errors replace eigenvectors of vanishing eigenvalues, as in Megatron-Core."""
        return False

    # --- states -----------------------------------------------------------------------------------------------------

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The moments, and the states of both sides. `sides` returns the sides that a parameter has."""
        optional = self.one_sided or self.max_precond_dim is not None
        specs = [StateSpec(name=name, whole=True) for name in self.moments]
        for side, dim, other in ((LEFT, -2, -1), (RIGHT, -1, -2)):
            of_side = StateSpec(
                name=side, kind=StateKind.MATRIX, dims=(dim,), whole=True, optional=optional, by_part=True
            )
            specs += [of_side, replace(of_side, name=f"Q_{side}")]
            if self.use_kl_shampoo:
                specs.append(replace(of_side, name=f"eigvals_{side}", kind=StateKind.REDUCED, dims=(other,)))
        return tuple(specs)

    def sides(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The sides of matrices of this shape (..., m, n) that have a factor."""
        m, n = shape[-2:]
        sizes = {LEFT: m, RIGHT: n}
        if self.one_sided:
            del sizes[RIGHT if m <= n else LEFT]
        limit = self.max_precond_dim
        return tuple(side for side, size in sizes.items() if limit is None or size <= limit)

    def shapes(self, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Shapes of the factors, bases and eigenvalues of one matrix (m, n)."""
        of_sides = [spec for spec in self.state_specs if spec.by_part and spec.name.endswith(self.sides(shape))]
        return {spec.name: spec.shape_for(shape) or () for spec in of_sides}

    def init_state(self, main: Tensor, matrix: MatrixSpec = NOT_SPLIT) -> States:
        """Zero moments and factors, identity bases and the first eigenvalues, of each matrix of a stack and each part.

        Raises MatrixError for a parameter that is not a matrix.
        """
        access.check_shape(main.shape)
        state = {name: torch.zeros_like(main, dtype=torch.float32) for name in self.moments}
        batch = main.shape[:-2]
        of_parts = [self._fresh(part, batch, main.device) for part in access.parts_of(matrix, main.shape)]
        if matrix.split_rows:
            return state | access.joined(of_parts, len(batch))
        for name, value in of_parts[0].items():
            state[name] = value.squeeze(len(batch))
        return state

    def _fresh(self, part: access.Part, batch: Sequence[int], device: torch.device) -> States:
        """(*batch, num_matrices, *shape) of one part."""
        state = {}
        for name, shape in self.shapes(part.shape).items():
            value = torch.zeros((*batch, part.num_matrices, *shape), dtype=torch.float32, device=device)
            if name.startswith("Q_"):
                value.diagonal(dim1=-2, dim2=-1).fill_(1.0)
            elif name.startswith("eigvals") and self.order is Order.PAPER:
                value.fill_(1.0)
            state[name] = value
        return state

    # --- a step -----------------------------------------------------------------------------------------------------

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Skip) -> Tensor:
        """The updates for gradients. Writes the states; none if `skip`, where the updates are zeros."""
        hyper, work = tasks[0]
        self.check_whole(work)
        if skipped(skip):
            return torch.zeros_like(inputs)
        shapes = [self.shapes(part.shape) for part in access.parts_of(work.matrix, inputs.shape)]
        states = access.states_by_part(tasks, elements=self.moments, shapes=shapes, dtype=inputs.dtype)
        grads = access.split(inputs, work.matrix)
        # In TF32 the bases would lose four digits of orthogonality, and every later step uses them.
        with fp32_products(MatmulPrecision.HIGHEST):
            directions = [self.direct_(of_part, grad, hyper) for of_part, grad in zip(states, grads, strict=True)]
        updates = [self.finished(direction) for direction in directions]
        return access.join(updates, work.matrix, inputs.shape)

    def factors(self, states: access.PartStates, grads: Tensor, hyper: Hyper) -> dict[str, Tensor]:
        """L and R after gradients (batch, m, n). Raises MatrixError if one is not finite; nothing of this part is
        written."""
        eps = float(hyper.eps)
        weight = 1.0 - self.shampoo_beta
        if self.corrects_bias:
            weight /= 1.0 - self.shampoo_beta ** int(hyper.step)
        factors = {}
        for side in self.sides(grads.shape):
            update = self._of_grads(states, side, grads, eps)
            factors[side] = states.load(side).lerp(update, weight)
        if not all(bool(factor.isfinite().all()) for factor in factors.values()):
            raise access.MatrixError(
                f"a factor of SOAP overflowed, or a gradient is not finite: the largest element of these gradients is "
                f"{float(grads.abs().max()):.3g}; factors have squares of gradients in {grads.dtype}, divided by eps="
                f"{eps:g} for KL; gradients must be finite and below about 1e18 (1e13 for KL); the matrix is unchanged"
            )
        return factors

    def _of_grads(self, states: access.PartStates, side: str, grads: Tensor, eps: float) -> Tensor:
        """What the gradients contribute to the factor of one side: GGᵀ, for KL with the other factor's inverse."""
        if side == LEFT:
            seen = grads
            other = RIGHT
        else:
            seen = grads.mT
            other = LEFT
        scale = 1.0 / seen.shape[-1] if self.use_kl_shampoo else 1.0
        if not self.use_kl_shampoo or other not in self.sides(grads.shape):
            return scale * (seen @ seen.mT)
        basis = states.load(f"Q_{other}")
        values = states.load(f"eigvals_{other}").clamp_min(eps)
        if self.order is Order.MEGATRON:
            # The order of its products: the first factors of a matrix that is not square have a null space, whose
            # basis follows from rounding errors.
            weights = scale * values.reciprocal()
            inverse = (basis * weights.unsqueeze(-2)) @ basis.mT
            return seen @ inverse @ seen.mT
        half = (seen @ basis) * values.rsqrt().unsqueeze(-2)
        return scale * (half @ half.mT)

    def turn_(self, states: access.PartStates, factors: Mapping[str, Tensor], *, first: bool) -> dict[str, Turned]:
        """Update the bases to the eigenvectors of the factors: first by eigh, later by power iteration."""
        moved = {}
        for side, factor in factors.items():
            old = states.load(f"Q_{side}")
            largest = factor.abs().amax((-2, -1), keepdim=True)
            exponent = torch.frexp(largest).exponent
            exponent = exponent.to(factor.dtype)  # of integers, torch 2.6 makes powers in the default dtype
            factor = torch.ldexp(factor, -exponent)
            if first:
                basis = eigenbasis(factor)
                order = torch.arange(factor.shape[-1], dtype=torch.int64, device=factor.device)
                order = order.expand(factor.shape[:-1])
            else:
                basis, order = self._followed(factor, old)
            states.store_(f"Q_{side}", basis.vectors)
            if self.use_kl_shampoo:
                states.store_(f"eigvals_{side}", torch.ldexp(basis.values, exponent.squeeze(-1)))
            moved[side] = Turned(basis.vectors.mT @ old, order)
        return moved

    def _followed(self, factor: Tensor, old: Tensor) -> tuple[Eigenbasis, Tensor]:
        """Move the basis `old` (batch, n, n) towards the eigenbasis of `factor`, with eigenvalues in descending
        order."""
        # Adding a multiple of the identity changes no eigenvector. Without it, rounding errors of the others replace
        # the eigenvectors of vanishing eigenvalues.
        floor: float | Tensor = 0.0
        if self.keeps_null_spaces:
            floor = torch.finfo(factor.dtype).eps * torch.linalg.matrix_norm(factor, keepdim=True)
        sorts_first = self.order is Order.PAPER
        product = factor @ old + floor * old
        order = (old * product).sum(-2).argsort(-1, descending=True)
        if sorts_first:
            product = _columns(product, order)
        vectors = self._orthonormalised(product)
        for _ in range(self.power_iterations - 1):
            vectors = self._orthonormalised(factor @ vectors + floor * vectors)
        values = ((vectors.mT @ factor) * vectors.mT).sum(-1)
        if not sorts_first:
            order = values.argsort(-1, descending=True)
            values = values.gather(-1, order)
            vectors = _columns(vectors, order)
        return Eigenbasis(values, vectors), order

    def _orthonormalised(self, columns: Tensor) -> Tensor:
        """By CholeskyQR2 on unit columns, which are matrix products; by LAPACK's Householder where rounding errors
        count."""
        if self.backend == "reference" or not self.keeps_null_spaces:
            return householder(columns)
        return cholesky(columns)


def reordered(x: Tensor, turned: Mapping[str, Turned]) -> Tensor:
    """`x` (batch, m, n) with rows and columns in the order of the vectors of the new bases."""
    for side in (LEFT, RIGHT):
        if side in turned:
            x = x.gather(-2, turned[side].order.unsqueeze(-1).expand_as(x))
        x = x.mT  # the right side is the left one of the transpose
    return x


def into_basis(states: access.PartStates, x: Tensor, sides: Sequence[str]) -> Tensor:
    """Q_Lᵀ X Q_R for matrices (batch, m, n); a side without a basis is left unchanged."""
    if LEFT in sides:
        x = states.load("Q_L").mT @ x
    if RIGHT in sides:
        x = x @ states.load("Q_R")
    return x


def out_of_basis(states: access.PartStates, x: Tensor, sides: Sequence[str]) -> Tensor:
    """Q_L X Q_Rᵀ, the inverse of `into_basis`."""
    if LEFT in sides:
        x = states.load("Q_L") @ x
    if RIGHT in sides:
        x = x @ states.load("Q_R").mT
    return x


def _columns(matrices: Tensor, order: Tensor) -> Tensor:
    """The columns of `matrices` (batch, n, n) in `order` (batch, n)."""
    return matrices.gather(-1, order.unsqueeze(-2).expand_as(matrices))
