"""The drop-in optimizers of elementwise rules, one per formula in the registry. Type checkers read their signatures
in `catalogue.pyi`.
"""

from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.nadam import NADAM
from opt_kernels.formulas.registry import FORMULAS
from opt_kernels.formulas.sgd import SGD as SGD_FORMULA
from opt_kernels.optim.drop_ins import drop_in
from opt_kernels.optim.formula_optimizer import MomentumOptimizer, NAdamOptimizer

globals().update({formula.title: drop_in(formula) for formula in FORMULAS.values()})
Adam = drop_in(ADAM, decoupled_weight_decay=False)
AdamW = drop_in(ADAM, "AdamW", choices={"decoupled_weight_decay": True}, weight_decay=1e-2)
NAdam = drop_in(NADAM, base=NAdamOptimizer)
SGD = drop_in(SGD_FORMULA, base=MomentumOptimizer)

__all__ = ["AdamW", *(formula.title for formula in FORMULAS.values())]
