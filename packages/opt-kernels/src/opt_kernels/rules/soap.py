"""SOAP: Adam in the slowly turning eigenbasis of Shampoo's preconditioner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import check_backend, version
from opt_kernels.backends.elements import skipped
from opt_kernels.choice import Choice
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.muon.reference import decay_of
from opt_kernels.matrices.orthogonal_basis import reference
from opt_kernels.matrices.orthogonal_basis.reference import Eigenbasis
from opt_kernels.matrices.stacks import MatrixError, matrix_dim, read_main, write_main_
from opt_kernels.precision import MatmulPrecision, fp32_products
from opt_kernels.rules.base import Needs, update_in_phases_
from opt_kernels.works import Batch, Hyper, StateKind, StateSpec, Task, Work


class Orthonormalization(Choice):
    """How a turned basis is made orthonormal again."""

    CHOLESKY = "cholesky"  # CholeskyQR2 on unit columns: matrix products; Householder where it would be inaccurate
    HOUSEHOLDER = "householder"  # LAPACK's QR


@dataclass(frozen=True, slots=True, kw_only=True)
class SOAP:
    """SOAP (Vyas et al., arXiv 2409.11321), by default with KL-Shampoo's factors (Lin et al., arXiv 2509.03378).

    Of `Hyper`: lr, weight_decay, step t, betas, eps. For a gradient G (m, n), with b = shampoo_beta and
    b_t = 1 - (1 - b) / (1 - bᵗ), a step is, in the paper's order:

        exp_avg, exp_avg_sq <- Adam's, of Q_Lᵀ G Q_R;  U = Adam's update of them, t - 1 the count of its steps
        p <- p - lr wd p - lr Q_L U Q_Rᵀ
        plain   L <- L + (1 - b_t)(GGᵀ - L)                              R likewise with GᵀG
        KL      L <- L + (1 - b_t)(G Q_R max(λ_R, eps)⁻¹ Q_Rᵀ Gᵀ / n - L)  R likewise with Q_L, λ_L, m
        every `precondition_frequency` steps: Q_L, λ_L and Q_R, λ_R become the eigenvectors and values of L and R,
                found by eigh at the first step, then by `power_iterations` of Q <- orthonormalise(L Q);
                exp_avg is turned into the new basis, exp_avg_sq follows the order of its vectors

    The first step only finds the bases: p and the moments stay. A gradient in the basis found from itself is diagonal
    but for rounding: Adam would make a step of that noise, and then divide by second moments that are next to zero. For
    the same reason every gradient is projected before it turns the bases (the reference projects after).

    The host reads the step and the skip flag: this rule cannot be captured in a CUDA graph. Fused rows are not split.
    Raises ValueError for options out of range; `update_` raises MatrixError for what is no whole single matrix.
    """

    use_kl_shampoo: bool = True
    shampoo_beta: float = 0.95
    precondition_frequency: int = 1
    power_iterations: int = 1
    orthonormalization: Orthonormalization = Orthonormalization.CHOLESKY
    backend: str | None = None  # "reference", "torch"; None: by device

    def __post_init__(self) -> None:
        check_backend(self.backend, "orthogonal_basis")
        if not 0.0 <= self.shampoo_beta < 1.0:
            raise ValueError(f"shampoo_beta is {self.shampoo_beta}, but must be in [0, 1); 0.95 is usual")
        for name, value in (
            ("precondition_frequency", self.precondition_frequency),
            ("power_iterations", self.power_iterations),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")

    @property
    def name(self) -> str:
        return "soap"

    @property
    def needs(self) -> Needs:
        return Needs.MATRICES

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """All state is stored as it is."""
        return {}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        specs = [
            StateSpec(name="exp_avg", whole=True),  # in the basis
            StateSpec(name="exp_avg_sq", whole=True),  # in the basis
            StateSpec(name="L", kind=StateKind.MATRIX, dims=(-2,), whole=True),
            StateSpec(name="R", kind=StateKind.MATRIX, dims=(-1,), whole=True),
            StateSpec(name="Q_L", kind=StateKind.MATRIX, dims=(-2,), whole=True),
            StateSpec(name="Q_R", kind=StateKind.MATRIX, dims=(-1,), whole=True),
        ]
        if self.use_kl_shampoo:
            specs.append(StateSpec(name="eigvals_L", kind=StateKind.REDUCED, dims=(-1,), whole=True))
            specs.append(StateSpec(name="eigvals_R", kind=StateKind.REDUCED, dims=(-2,), whole=True))
        return tuple(specs)

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """Zero moments and factors; the basis and eigenvalues of the identity. Raises MatrixError for no 2-D `main`."""
        _check_shape(main.shape)
        m, n = main.shape
        state = {name: torch.zeros_like(main, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        for side, size in (("L", m), ("R", n)):
            state[side] = torch.zeros(size, size, dtype=torch.float32, device=main.device)
            state[f"Q_{side}"] = torch.eye(size, dtype=torch.float32, device=main.device)
            if self.use_kl_shampoo:
                state[f"eigvals_{side}"] = torch.ones(size, dtype=torch.float32, device=main.device)
        return state

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        if skipped(skip):
            return
        for batch in batches:
            update_in_phases_(self, [batch], grad_scale=grad_scale, skip=None)

    @property
    def tp_mode(self) -> None:
        """It needs whole matrices."""
        return None

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Nothing: gradients are transformed as they are."""

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """Q_L U Q_Rᵀ of gradients; zeros at the first step. Updates moments, factors and bases."""
        _check_whole(tasks[0].work)
        updates = torch.zeros_like(inputs)
        if skipped(skip):
            return updates
        # In TF32 the bases lose four digits of their orthogonality, and every later step is taken in them.
        with fp32_products(MatmulPrecision.HIGHEST):
            return self._transformed(_Stack(tasks, inputs.dtype), inputs, updates, tasks[0].hyper)

    def _transformed(self, stack: "_Stack", inputs: Tensor, updates: Tensor, hyper: Hyper) -> Tensor:
        step = int(hyper.step)
        if step > 1:
            left, right = stack.load("Q_L"), stack.load("Q_R")
            updates = left @ _adam_(stack, left.mT @ inputs @ right, hyper) @ right.mT
        _update_factors_(self, stack, inputs, hyper)
        if (step - 1) % self.precondition_frequency == 0:
            _turn_(self, stack, first=step == 1)
        return updates

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """p <- p - lr wd p - lr update, but at the first step."""
        hyper, work = task
        if int(hyper.step) == 1 or skipped(skip):
            return
        main = read_main(work)
        write_main_(work, main - hyper.lr * (decay_of(main, hyper.weight_decay) + update), None)


class _Stack:
    """The states of works of one shape as stacked copies, loaded by name and stored back."""

    def __init__(self, tasks: Sequence[Task], dtype: torch.dtype) -> None:
        self._tasks = tasks
        self._dtype = dtype

    def load(self, name: str) -> Tensor:
        """(len(tasks), *shape of the state)."""
        return torch.stack([work.state[name].to(self._dtype) for _, work in self._tasks])

    def store_(self, name: str, values: Tensor) -> None:
        for value, (_, work) in zip(values, self._tasks):
            work.state[name].copy_(value)


def _check_whole(work: Work) -> None:
    _check_shape(work.grad.shape)
    group = work.matrix.tensor_parallel
    if matrix_dim(work) is not None and group is not None and group.size > 1:
        raise MatrixError(
            f"SOAP needs whole matrices, but dim {work.matrix.partition_dim} of this one is cut over {group.size} "
            "tensor-parallel ranks; gather it before the rule, or use Muon with tp_mode 'distributed'"
        )


def _check_shape(shape: torch.Size) -> None:
    if len(shape) != 2:
        raise MatrixError(
            f"a parameter of shape {tuple(shape)} is not a single matrix, and SOAP keeps a factor for each of two "
            "sides; give it an elementwise rule, or view it as (rows, cols)"
        )


def _update_factors_(rule: SOAP, stack: _Stack, grads: Tensor, hyper: Hyper) -> None:
    """L and R, both from the bases and eigenvalues of before."""
    weight = (1.0 - rule.shampoo_beta) / (1.0 - rule.shampoo_beta ** int(hyper.step))
    seen = {"L": grads, "R": grads.mT}  # from each side
    for side, other in (("L", "R"), ("R", "L")):
        half, scale = seen[side], 1.0
        if rule.use_kl_shampoo:
            inverse_root = stack.load(f"eigvals_{other}").clamp_min(hyper.eps).rsqrt()
            half = (half @ stack.load(f"Q_{other}")) * inverse_root.unsqueeze(-2)
            scale = 1.0 / half.shape[-1]
        stack.store_(side, stack.load(side).lerp(scale * (half @ half.mT), weight))


def _turn_(rule: SOAP, stack: _Stack, *, first: bool) -> None:
    """Moves the bases to the factors of now, and the moments with them."""
    exp_avg, exp_avg_sq = stack.load("exp_avg"), stack.load("exp_avg_sq")
    for side in ("L", "R"):
        factor, old = stack.load(side), stack.load(f"Q_{side}")
        turned = _found(rule, factor) if first else _followed(rule, factor, old)
        rotation = turned.basis.vectors.mT @ old
        # The right side is the left side of the transpose.
        exp_avg = (rotation @ exp_avg).mT
        exp_avg_sq = exp_avg_sq.gather(-2, turned.order.unsqueeze(-1).expand_as(exp_avg_sq)).mT
        stack.store_(f"Q_{side}", turned.basis.vectors)
        if rule.use_kl_shampoo:
            stack.store_(f"eigvals_{side}", turned.basis.values)
    stack.store_("exp_avg", exp_avg)
    stack.store_("exp_avg_sq", exp_avg_sq)


class _Turned(NamedTuple):
    """A new basis, and which of the old vectors each of its vectors came from."""

    basis: Eigenbasis
    order: Tensor  # (batch, n)


def _found(rule: SOAP, factor: Tensor) -> _Turned:
    """The eigenbasis of `factor` (batch, n, n), from nothing."""
    eigenbasis = version("orthogonal_basis", "eigenbasis", backend=rule.backend, tensors=[factor])
    order = torch.arange(factor.shape[-1], device=factor.device).expand(factor.shape[:-1])
    return _Turned(eigenbasis(factor), order)


def _followed(rule: SOAP, factor: Tensor, old: Tensor) -> _Turned:
    """The basis `old` (batch, n, n), sorted and brought nearer to the eigenbasis of `factor`."""
    # A multiple of the identity turns no eigenvector. It keeps those of vanishing eigenvalues where they are, which
    # would be replaced by the rounding errors of the others.
    floor = torch.finfo(factor.dtype).eps * torch.linalg.matrix_norm(factor, keepdim=True)
    product = factor @ old + floor * old
    order = (old * product).sum(-2).argsort(-1, descending=True)
    vectors = _orthonormalised(rule, product.gather(-1, order.unsqueeze(-2).expand_as(product)))
    for _ in range(rule.power_iterations - 1):
        vectors = _orthonormalised(rule, factor @ vectors + floor * vectors)
    return _Turned(Eigenbasis((vectors * (factor @ vectors)).sum(-2), vectors), order)


def _orthonormalised(rule: SOAP, columns: Tensor) -> Tensor:
    if rule.orthonormalization is Orthonormalization.HOUSEHOLDER:
        return reference.orthonormalised(columns)
    orthonormalised = version("orthogonal_basis", "orthonormalised", backend=rule.backend, tensors=[columns])
    result: Tensor = orthonormalised(columns)
    return result


def _adam_(stack: _Stack, grads: Tensor, hyper: Hyper) -> Tensor:
    """Adam's update for gradients in the basis; updates the moments."""
    beta1, beta2 = hyper.betas
    exp_avg = stack.load("exp_avg").lerp_(grads, 1.0 - beta1)
    exp_avg_sq = stack.load("exp_avg_sq").mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
    stack.store_("exp_avg", exp_avg)
    stack.store_("exp_avg_sq", exp_avg_sq)
    step = int(hyper.step) - 1  # the first found the bases
    root = exp_avg_sq.div_(1.0 - beta2**step).sqrt_().add_(hyper.eps)
    return exp_avg.div_(1.0 - beta1**step).div_(root)
