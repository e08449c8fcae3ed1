"""Drop-in torch.optim.Optimizers over the rules."""

from opt_kernels.optim import catalogue
from opt_kernels.optim.adaptive_muon import NAMO, AdaptiveMuon, NorMuon
from opt_kernels.optim.base import RuleOptimizer
from opt_kernels.optim.catalogue import *  # noqa: F403
from opt_kernels.optim.drop_ins import drop_in
from opt_kernels.optim.formula_optimizer import FormulaOptimizer
from opt_kernels.optim.muon import Muon, MuonH
from opt_kernels.optim.soap import SOAP, SOAPMuon
from opt_kernels.optim.state import StateDictError

__all__ = [
    "NAMO",
    "SOAP",
    "AdaptiveMuon",
    "FormulaOptimizer",
    "Muon",
    "MuonH",
    "NorMuon",
    "RuleOptimizer",
    "SOAPMuon",
    "StateDictError",
]
__all__ += ["drop_in", *catalogue.__all__]
