"""Shampoo's preconditioner of a matrix: a factor for each side and its eigenbasis, updated by power iteration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import version
from opt_kernels.choice import NamedChoice
from opt_kernels.matrices.orthogonal_basis import reference
from opt_kernels.matrices.orthogonal_basis.reference import Eigenbasis
from opt_kernels.matrices.parts import Part, PartStates, joined, parts_of
from opt_kernels.works import NOT_SPLIT, MatrixSpec, StateKind, StateSpec

LEFT, RIGHT = "L", "R"


class Orthonormalization(NamedChoice):
    """How a basis is orthonormalised after a power iteration."""

    CHOLESKY = "cholesky"  # CholeskyQR2 on unit columns: matrix products; Householder where it would be inaccurate
    HOUSEHOLDER = "householder"  # LAPACK's QR


class Turned(NamedTuple):
    """The change of the basis of one side."""

    rotation: Tensor  # (batch, n, n): Q_newᵀ Q_old
    order: Tensor  # (batch, n): the old vector that each new one came from


@dataclass(frozen=True, slots=True, kw_only=True)
class Shampoo:
    """The factors of gradients G (m, n) and their eigenbases, in states `L`, `Q_L` and for KL `eigvals_L`; R likewise.

    With b = beta and b_t = 1 - (1 - b) / (1 - bᵗ), at step t:

        plain   L <- L + (1 - b_t)(GGᵀ - L)                               R likewise with GᵀG
        KL      L <- L + (1 - b_t)(G Q_R max(λ_R, eps)⁻¹ Q_Rᵀ Gᵀ / n - L)   R likewise with Q_L, λ_L, m

    Both updates use the previous bases and eigenvalues. A side without a factor counts as the identity.
    Plain: Gupta et al., arXiv 1802.09568, as a moving average; KL: Lin et al., arXiv 2509.03378.
    """

    beta: float
    use_kl: bool
    power_iterations: int
    orthonormalization: Orthonormalization
    sorts_first: bool  # True: sort a basis before rotating it; False: after
    max_dim: int | None  # a longer side has no factor
    one_sided: bool  # only the shorter side has a factor; the left where both are equally long
    backend: str | None

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The states of both sides. `sides` returns the sides that a parameter has."""
        optional = self.one_sided or self.max_dim is not None
        kept: dict[str, Any] = {"whole": True, "optional": optional, "by_part": True}
        specs = []
        for side, dim, other in ((LEFT, -2, -1), (RIGHT, -1, -2)):
            for name in (side, f"Q_{side}"):
                specs.append(StateSpec(name=name, kind=StateKind.MATRIX, dims=(dim,), **kept))
            if self.use_kl:
                specs.append(StateSpec(name=f"eigvals_{side}", kind=StateKind.REDUCED, dims=(other,), **kept))
        return tuple(specs)

    def sides(self, shape: Sequence[int]) -> tuple[str, ...]:
        """The sides of matrices of this shape (..., m, n) that have a factor."""
        m, n = shape[-2:]
        found = ((LEFT if m <= n else RIGHT),) if self.one_sided else (LEFT, RIGHT)
        sizes = {LEFT: m, RIGHT: n}
        return tuple(side for side in found if self.max_dim is None or sizes[side] <= self.max_dim)

    def shapes(self, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Shapes of the states of one matrix (m, n)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for side in self.sides(shape):
            size = shape[0] if side == LEFT else shape[1]
            shapes |= {side: (size, size), f"Q_{side}": (size, size)}
            shapes |= {f"eigvals_{side}": (size,)} if self.use_kl else {}
        return shapes

    def init_state(self, main: Tensor, spec: MatrixSpec = NOT_SPLIT) -> dict[str, Tensor]:
        """Zero factors, and the basis and eigenvalues of the identity, of each matrix of a stack, and of each part."""
        batch = main.shape[:-2]
        of_parts = [self._fresh(part, batch, main.device) for part in parts_of(spec, main.shape)]
        if spec.split_rows:
            return joined(of_parts, len(batch))
        return {name: value.squeeze(len(batch)) for name, value in of_parts[0].items()}

    def _fresh(self, part: Part, batch: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """(*batch, num_matrices, *shape) of one part."""
        state = {}
        for name, shape in self.shapes(part.shape).items():
            value = 1.0 if name.startswith("eigvals") else 0.0
            state[name] = torch.full((*batch, part.num_matrices, *shape), value, dtype=torch.float32, device=device)
            if name.startswith("Q_"):
                state[name].diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return state

    def update_factors_(self, states: PartStates, grads: Tensor, *, step: int, eps: float) -> None:
        """Write L and R for gradients (batch, m, n)."""
        weight = (1.0 - self.beta) / (1.0 - self.beta**step)
        sides = self.sides(grads.shape)
        halves = {side: self._half(states, side, grads, eps) for side in sides}
        for side in sides:
            half = halves[side]
            scale = 1.0 / half.shape[-1] if self.use_kl else 1.0
            states.store_(side, states.load(side).lerp(scale * (half @ half.mT), weight))

    def _half(self, states: PartStates, side: str, grads: Tensor, eps: float) -> Tensor:
        """A square root of the update of one factor: G or its transpose, for KL times the other factor's inverse
        root."""
        seen, other = (grads, RIGHT) if side == LEFT else (grads.mT, LEFT)
        if not self.use_kl or other not in self.sides(grads.shape):
            return seen
        inverse_root = states.load(f"eigvals_{other}").clamp_min(eps).rsqrt()
        return (seen @ states.load(f"Q_{other}")) * inverse_root.unsqueeze(-2)

    def turn_(self, states: PartStates, shape: Sequence[int], *, first: bool) -> dict[str, Turned]:
        """Update the bases to the eigenvectors of the factors: first by eigh, later by power iteration."""
        moved = {}
        for side in self.sides(shape):
            factor, old = states.load(side), states.load(f"Q_{side}")
            basis, order = self._found(factor) if first else self._followed(factor, old)
            states.store_(f"Q_{side}", basis.vectors)
            if self.use_kl:
                states.store_(f"eigvals_{side}", basis.values)
            moved[side] = Turned(basis.vectors.mT @ old, order)
        return moved

    def _found(self, factor: Tensor) -> tuple[Eigenbasis, Tensor]:
        eigenbasis = version("orthogonal_basis", "eigenbasis", backend=self.backend, tensors=[factor])
        order = torch.arange(factor.shape[-1], device=factor.device).expand(factor.shape[:-1])
        return eigenbasis(factor), order

    def _followed(self, factor: Tensor, old: Tensor) -> tuple[Eigenbasis, Tensor]:
        """Move the basis `old` (batch, n, n) towards the eigenbasis of `factor`, with eigenvalues in descending
        order."""
        # Adding a multiple of the identity changes no eigenvector. Without it, rounding errors of the others would
        # replace the eigenvectors of vanishing eigenvalues.
        floor = torch.finfo(factor.dtype).eps * torch.linalg.matrix_norm(factor, keepdim=True)
        product = factor @ old + floor * old
        order = (old * product).sum(-2).argsort(-1, descending=True)
        vectors = self._orthonormalised(_columns(product, order) if self.sorts_first else product)
        for _ in range(self.power_iterations - 1):
            vectors = self._orthonormalised(factor @ vectors + floor * vectors)
        values = (vectors * (factor @ vectors)).sum(-2)
        if not self.sorts_first:
            order = values.argsort(-1, descending=True)
            values, vectors = values.gather(-1, order), _columns(vectors, order)
        return Eigenbasis(values, vectors), order

    def _orthonormalised(self, columns: Tensor) -> Tensor:
        if self.orthonormalization is Orthonormalization.HOUSEHOLDER:
            return reference.orthonormalised(columns)
        orthonormalised = version("orthogonal_basis", "orthonormalised", backend=self.backend, tensors=[columns])
        result: Tensor = orthonormalised(columns)
        return result


def into_basis(states: PartStates, x: Tensor, sides: Sequence[str]) -> Tensor:
    """Q_Lᵀ X Q_R for matrices (batch, m, n); a side without a basis is left unchanged."""
    x = states.load("Q_L").mT @ x if LEFT in sides else x
    return x @ states.load("Q_R") if RIGHT in sides else x


def out_of_basis(states: PartStates, x: Tensor, sides: Sequence[str]) -> Tensor:
    """Q_L X Q_Rᵀ, the inverse of `into_basis`."""
    x = states.load("Q_L") @ x if LEFT in sides else x
    return x @ states.load("Q_R").mT if RIGHT in sides else x


def _columns(matrices: Tensor, order: Tensor) -> Tensor:
    """The columns of `matrices` (batch, n, n) in `order` (batch, n)."""
    return matrices.gather(-1, order.unsqueeze(-2).expand_as(matrices))
