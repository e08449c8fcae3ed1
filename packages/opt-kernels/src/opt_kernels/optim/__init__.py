"""Drop-in replacements for torch.optim optimizers, one class per rule."""

from opt_kernels.optim import catalogue, matrix_catalogue
from opt_kernels.optim.base import RuleOptimizer
from opt_kernels.optim.catalogue import *  # noqa: F403
from opt_kernels.optim.drop_ins import drop_in
from opt_kernels.optim.formula_optimizer import FormulaOptimizer
from opt_kernels.optim.matrix_catalogue import *  # noqa: F403
from opt_kernels.optim.state import StateDictError

__all__ = ["FormulaOptimizer", "RuleOptimizer", "StateDictError", "drop_in"]
__all__ += catalogue.__all__
__all__ += matrix_catalogue.__all__
