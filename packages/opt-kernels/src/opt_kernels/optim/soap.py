"""Drop-in SOAP."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from opt_kernels.hooks import GivenHooks
from opt_kernels.optim.base import Params
from opt_kernels.optim.matrices import MatrixOptimizer
from opt_kernels.rules.soap import SOAP as SOAPRule
from opt_kernels.rules.soap import Order, Orthonormalization


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al., arXiv 2409.11321) for matrices, and with `scalar_optimizer` Adam or Lion for the others.

    Its state is 2 (m² + n²) numbers larger than Adam's for a matrix (m, n), without the sides that `max_precond_dim`
    and `one_sided` leave out: keep embeddings out of it. `order="megatron"` takes Megatron-Core's steps. The options
    are those of `opt_kernels.rules.soap.SOAP`, by their names. Raises ValueError for an option that is not allowed.
    """

    def __init__(
        self,
        params: Params | nn.Module,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        use_kl_shampoo: bool = True,
        shampoo_beta: float = 0.95,
        precondition_frequency: int = 1,
        power_iterations: int = 1,
        orthonormalization: str = "cholesky",
        order: str = "paper",
        max_precond_dim: int | None = 10_000,
        one_sided: bool = False,
        scalar_optimizer: str | None = None,
        scalar_options: Mapping[str, Any] | None = None,
        mains: str = "param",
        max_norm: float | None = None,
        backend: str | None = None,
        hooks: GivenHooks = (),
    ) -> None:
        rule = SOAPRule(
            use_kl_shampoo=use_kl_shampoo,
            shampoo_beta=shampoo_beta,
            precondition_frequency=precondition_frequency,
            power_iterations=power_iterations,
            orthonormalization=Orthonormalization(orthonormalization),
            order=Order(order),
            max_precond_dim=max_precond_dim,
            one_sided=one_sided,
            backend=backend,
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            rule,
            defaults,
            scalar_optimizer=scalar_optimizer,
            scalar_options=scalar_options,
            mains=mains,
            max_norm=max_norm,
            backend=backend,
            hooks=hooks,
        )
