"""What an optimizer keeps of parameters between steps, and the entries of their groups.

For drop-in optimizers, and for packages that update pieces of parameters on several ranks. These differ in two answers:
what a write by other code means (`writes`), and whether an entry of a group may change (`GroupEntries`).
"""

from opt_kernels.params.count import Count
from opt_kernels.params.entries import (
    CHOICES,
    FIXED,
    HELD,
    HOOKS,
    NEUTRAL,
    RULE,
    SCHEDULED,
    WEIGHT_DECAY,
    Group,
    GroupEntries,
    Groups,
    check_rate,
    frozen,
    read_hyper,
)
from opt_kernels.params.main import (
    FP16,
    MAIN,
    REMAINDER,
    CodedMain,
    Main,
    MainColumns,
    MainFormat,
    encode_again_,
    init_kept,
    make_main,
    values_of,
)
from opt_kernels.params.writes import (
    FollowingMains,
    Marks,
    Writes,
    are_unwritten,
    follow_write_,
    followed,
    has_foreign_write,
    overlapping,
)

__all__ = [
    "CHOICES", "FIXED", "FP16", "HELD", "HOOKS", "MAIN", "NEUTRAL", "REMAINDER", "RULE", "SCHEDULED", "WEIGHT_DECAY",
    "CodedMain", "Count", "FollowingMains", "Group", "GroupEntries", "Groups", "Main", "MainColumns", "MainFormat",
    "Marks", "Writes", "are_unwritten", "check_rate", "encode_again_", "follow_write_", "followed", "frozen",
    "has_foreign_write", "init_kept", "make_main", "overlapping", "read_hyper", "values_of",
]  # fmt: skip
