"""Hooks: modifications of the update of any rule, such as cautious weight decay, update clipping or norms.

`values` defines the hooks and their order, `hooked` applies them to a rule. Elementwise hooks become part of the rule's
formula (`compose`). Hooks that need norms write the direction to a buffer first (`measured`, `sums`).
"""

from opt_kernels.hooks.hooked import (
    bare,
    check_numbers,
    check_unread,
    checked,
    described,
    hooked,
    hooks_of,
    reads_weight_decay,
    shape_problem,
)
from opt_kernels.hooks.measured import Begun, HookedUpdate
from opt_kernels.hooks.sums import NUM_SUMS, RowMeans, SpannedRows, add_row_sums_
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
    RadialBrake,
    RadiusPin,
    RelativeUpdate,
    RowFloor,
)

__all__ = [
    "NUM_SUMS", "Begun", "CautiousDecay", "CautiousUpdate", "CentralizeGradient", "ClipUpdateRms", "CoupledDecay",
    "GivenHooks", "Hook", "HookError", "HookedUpdate", "Hooks", "Hyperball", "LrDecoupledDecay", "RadialBrake",
    "RadiusPin", "RelativeUpdate", "RowFloor", "RowMeans", "SpannedRows", "add_row_sums_", "bare", "check_numbers",
    "check_unread", "checked", "described", "hooked", "hooks_of", "reads_weight_decay", "shape_problem",
]  # fmt: skip
