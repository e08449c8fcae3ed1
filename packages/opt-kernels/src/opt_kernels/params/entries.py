"""Names of entries of parameter groups, and what every optimizer makes of them."""

from collections.abc import Mapping

HELD = ("params", "param_ids", "param_names")  # list the parameters of the group
RULE = "optimizer"  # names the rule; groups of torch's optimizers have none
HOOKS = "hooks"  # a group's own hooks; in a state_dict, a record of them
CHOICES = "choices"  # records the structure of the rule: ("maximize=False", ...)
WEIGHT_DECAY = "weight_decay"
SCHEDULED = ("lr", WEIGHT_DECAY)  # read in every step, and changed too often to be compared
FIXED = (RULE, "name", "is_expert_parallel", "clip_grad", HOOKS)
"""Entries that decide how parameters are laid out, clipped and updated."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "foreach": (None, False, True),
    "fused": (None, False, True),
    "capturable": (None, False),
    "differentiable": (None, False),
    "amsgrad": (None, False),
    "maximize": (None, False),
}
"""Arguments of torch.optim that choose an implementation, and the values that are accepted without effect."""
