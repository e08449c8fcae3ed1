"""One sweep over gradients: their norm, whether they are finite, how many are zero."""

from collections.abc import Sequence

from torch import Tensor

from opt_kernels.backends.dispatch import version
from opt_kernels.backends.reference.grad_stats import GradStats

__all__ = ["GradStats", "grad_stats"]


def grad_stats(
    grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0, backend: str | None = None
) -> GradStats:
    """Statistics of `grads` (any shapes, any float dtypes, read only), by the version that suits their device.

    `sum_of_squares` is the sum of |g|^norm_type where that is not 2, and the maximum of |g| where it is infinity.
    Raises ValueError for a `norm_type` not above 0, and BackendError for a `backend` that cannot be had.
    """
    sweep = version("grad_stats", "grad_stats", backend=backend, tensors=grads)
    stats: GradStats = sweep(grads, count_zeros=count_zeros, norm_type=norm_type)
    return stats
