"""The public names of this package.

`opt_kernels.NAME` imports this module at the first use of a name, so that `import opt_kernels` alone is fast.
"""

from opt_kernels import optim
from opt_kernels.backends.dispatch import BackendError, grad_stats
from opt_kernels.codecs.codec import CodecError
from opt_kernels.formulas import Choice, Formula, FormulaError, Number, NumberError, State
from opt_kernels.hooks import (
    CautiousDecay,
    CautiousUpdate,
    CentralizeGradient,
    ClipUpdateRms,
    CoupledDecay,
    HookError,
    Hyperball,
    LrDecoupledDecay,
    RadialBrake,
    RadiusPin,
    RelativeUpdate,
    RowFloor,
    hooked,
)
from opt_kernels.matrices.access import MatrixError
from opt_kernels.optim import *  # noqa: F403
from opt_kernels.rules.base import MatrixRule, Needs, Rule, RuleStateError
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import Batch, Hyper, MatrixSpec, StateKind, StateSpec, TensorParallel, Work, Works

__all__ = [
    "BackendError", "Batch", "CautiousDecay", "CautiousUpdate", "CentralizeGradient", "Choice", "ClipUpdateRms",
    "CodecError", "CoupledDecay", "Formula", "FormulaError", "HookError", "Hyper", "Hyperball", "LrDecoupledDecay",
    "MatrixError", "MatrixRule", "MatrixSpec", "Needs", "Number", "NumberError", "RadialBrake", "RadiusPin",
    "RelativeUpdate", "RowFloor", "Rule", "RuleStateError", "State", "StateKind", "StateSpec", "TensorParallel",
    "WholeMatrices", "Work", "Works", "grad_stats", "hooked",
]  # fmt: skip
__all__ += optim.__all__
