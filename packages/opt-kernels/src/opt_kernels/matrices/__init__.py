"""Operations on whole matrices: orthogonalisation, symmetric products, eigenbases, and stacks of equal shapes.

For packages that pass the options of matrix rules, or scale gradients of matrices as these rules do.
"""

from opt_kernels.matrices.muon import Decay
from opt_kernels.matrices.newton_schulz import CoefficientType
from opt_kernels.matrices.orthogonalization import MatmulPrecision, ScaleMode, TpMode
from opt_kernels.matrices.stacks import scaled_grads, squares_in_float64, stacks

__all__ = [
    "CoefficientType", "Decay", "MatmulPrecision", "ScaleMode", "TpMode", "scaled_grads", "squares_in_float64",
    "stacks",
]  # fmt: skip
