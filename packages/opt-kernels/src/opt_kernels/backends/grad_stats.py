"""Statistics of gradients in one sweep: norm, non-finite elements and zeros."""

from collections.abc import Sequence

from torch import Tensor

from opt_kernels.backends.dispatch import version
from opt_kernels.backends.reference.grad_stats import GradStats

__all__ = ["GradStats", "grad_stats"]


def grad_stats(
    grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0, backend: str | None = None
) -> GradStats:
    """Statistics of `grads` (any shapes, any float dtypes, read only), by the version for their device.

    For a `norm_type` other than 2, `sum_of_squares` is the sum of |g|^norm_type; for infinity, the maximum of |g|.
    Raises ValueError unless `norm_type` is above 0, and BackendError for a `backend` that is not available.
    """
    sweep = version("grad_stats", "grad_stats", backend=backend, tensors=grads)
    stats: GradStats = sweep(grads, count_zeros=count_zeros, norm_type=norm_type)
    return stats
