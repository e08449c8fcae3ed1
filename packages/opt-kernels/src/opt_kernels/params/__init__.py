"""What an optimizer keeps of parameters between steps, and the entries of their groups.

For drop-in optimizers, and for packages that update pieces of parameters on several ranks.
"""

from opt_kernels.params.entries import CHOICES, FIXED, HELD, HOOKS, NEUTRAL, RULE, SCHEDULED, WEIGHT_DECAY

__all__ = ["CHOICES", "FIXED", "HELD", "HOOKS", "NEUTRAL", "RULE", "SCHEDULED", "WEIGHT_DECAY"]
