"""Drop-in torch.optim.Optimizers over the rules."""

from opt_kernels.optim import catalogue
from opt_kernels.optim.adaptive_muon import AdaptiveMuon
from opt_kernels.optim.base import RuleOptimizer
from opt_kernels.optim.catalogue import *  # noqa: F403
from opt_kernels.optim.drop_ins import drop_in
from opt_kernels.optim.formula_optimizer import FormulaOptimizer
from opt_kernels.optim.muon import Muon
from opt_kernels.optim.soap import SOAP
from opt_kernels.optim.state import StateDictError

__all__ = ["SOAP", "AdaptiveMuon", "FormulaOptimizer", "Muon", "RuleOptimizer", "StateDictError", "drop_in"]
__all__ += catalogue.__all__
