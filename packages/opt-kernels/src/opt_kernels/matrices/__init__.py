"""Operations on whole matrices: orthogonalisation, symmetric products, eigenbases, and stacks of equal shapes.

For packages that pass the options of matrix rules, or scale gradients of matrices as these rules do, and for matrix
rules from outside.
"""

from opt_kernels.matrices.access import assign_, join, scaled_grads, split, squares_in_float64, stacks
from opt_kernels.matrices.coefficients import CoefficientType, schedule
from opt_kernels.matrices.muon import Decay, PostNorm, PreNorm, ScaleMode
from opt_kernels.matrices.orthogonalization import MatmulPrecision, Orthogonalization, TpMode

__all__ = [
    "CoefficientType", "Decay", "MatmulPrecision", "Orthogonalization", "PostNorm", "PreNorm", "ScaleMode", "TpMode",
    "assign_", "join", "scaled_grads", "schedule", "split", "squares_in_float64", "stacks",
]  # fmt: skip
