"""Hooks around the update of any rule, as values: cautious and decoupled weight decay, update clipping, norms, ...

`values` says what each does and in which order, `hooked` puts them on a rule. Elementwise ones become part of the
rule's formula (`compose`); those that see norms take the direction through a buffer (`measured`, `sums`,
`factors`).
"""

from opt_kernels.hooks.hooked import bare, hooked, hooks_of, shape_problem
from opt_kernels.hooks.measured import HookedUpdate
from opt_kernels.hooks.values import (
    CautiousDecay,
    CautiousUpdate,
    CentralizeGradient,
    ClipUpdateRms,
    CoupledDecay,
    GivenHooks,
    Hook,
    HookError,
    Hooks,
    Hyperball,
    LrDecoupledDecay,
    RelativeUpdate,
    RowFloor,
    checked,
    described,
)

__all__ = [
    "CautiousDecay", "CautiousUpdate", "CentralizeGradient", "ClipUpdateRms", "CoupledDecay", "GivenHooks", "Hook",
    "HookError", "HookedUpdate", "Hooks", "Hyperball", "LrDecoupledDecay", "RelativeUpdate", "RowFloor", "bare",
    "checked", "described", "hooked", "hooks_of", "shape_problem",
]  # fmt: skip
