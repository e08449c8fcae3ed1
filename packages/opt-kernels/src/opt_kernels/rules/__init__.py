"""The rules, and what a rule is (`base`).

For packages that choose rules and call them.
"""

from opt_kernels.rules.adaptive_muon import AdaptiveMuonRule, Lines, SecondMoment
from opt_kernels.rules.base import (
    GRAD_SQUARES,
    WEIGHTS,
    MatrixRule,
    Needs,
    Rule,
    build_rule,
    init_state,
    reads_weights,
    sums_gradients,
    sums_over_blocks,
    update_dtype,
)
from opt_kernels.rules.elementwise import SGD, Adam, ElementwiseRule, Lion, elementwise
from opt_kernels.rules.muon import MuonRule
from opt_kernels.rules.muown import MuownRule
from opt_kernels.rules.soap import Order, SOAPRule
from opt_kernels.rules.soap_muon import SOAPMuonRule
from opt_kernels.works import NamedChoice

__all__ = [
    "GRAD_SQUARES", "SGD", "WEIGHTS", "Adam", "AdaptiveMuonRule", "ElementwiseRule", "Lines", "Lion", "MatrixRule",
    "MuonRule", "MuownRule", "NamedChoice", "Needs", "Order", "Rule", "SOAPMuonRule", "SOAPRule", "SecondMoment",
    "build_rule", "elementwise", "init_state", "reads_weights", "sums_gradients", "sums_over_blocks", "update_dtype",
]  # fmt: skip
