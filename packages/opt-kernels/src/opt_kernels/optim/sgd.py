"""Drop-in SGD."""

import torch
from torch import Tensor

from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.rules.sgd import SGD as SGDRule


class SGD(RuleOptimizer):
    """SGD with torch.optim.SGD's arguments and state_dict; with a momentum of 0 it keeps no buffer.

    `dampening` and `nesterov` are those of every group; lr, momentum and weight decay are each group's own, but a
    momentum above 0 needs one here. `mains`, `max_norm`: as in `AdamW`. Raises ValueError for an option that is not
    allowed.
    """

    fixed = ("dampening", "nesterov")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        mains: str = "param",
        momentum_buffer_dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        backend: str | None = None,
    ) -> None:
        rule = SGDRule(
            momentum_buffer=momentum != 0,
            momentum_buffer_dtype=momentum_buffer_dtype,
            nesterov=nesterov,
            dampening=dampening,
            backend=backend,
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, rule, defaults, mains=mains, max_norm=max_norm)

    def _check_group(self, group: ParamGroup) -> None:
        super()._check_group(group)
        if group["momentum"] and not self.rule.codecs:
            raise ValueError(
                f"momentum={group['momentum']!r} in a group of an SGD that was built without; build it with a momentum "
                "above 0, and give 0 to the groups that are to have none"
            )
