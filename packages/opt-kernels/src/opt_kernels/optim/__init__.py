"""Drop-in torch.optim.Optimizers over the rules."""

from opt_kernels.optim.adam import Adam, AdamW
from opt_kernels.optim.adaptive_muon import AdaptiveMuon
from opt_kernels.optim.base import RuleOptimizer
from opt_kernels.optim.lion import Lion
from opt_kernels.optim.muon import Muon
from opt_kernels.optim.sgd import SGD
from opt_kernels.optim.soap import SOAP
from opt_kernels.optim.state import StateDictError

__all__ = ["SGD", "SOAP", "Adam", "AdamW", "AdaptiveMuon", "Lion", "Muon", "RuleOptimizer", "StateDictError"]
