"""Drop-in SGD."""

from dataclasses import replace

import torch
from torch import Tensor

from opt_kernels.dtensor import local
from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.optim.params import for_dtype
from opt_kernels.optim.roster import Member, Sweep
from opt_kernels.optim.state import STEP
from opt_kernels.rules.base import Rule
from opt_kernels.rules.sgd import SGD as SGDRule
from opt_kernels.works import Batch

MOMENTUM = "momentum_buffer"


class SGD(RuleOptimizer):
    """SGD with torch.optim.SGD's arguments and state_dict; parameters of groups with a momentum of 0 have no buffer.

    `dampening` and `nesterov` are those of every group; lr, momentum and weight decay are each group's own. `mains`,
    `max_norm`, `foreach`, `fused`: as in `AdamW`. Raises ValueError for an option that is not allowed.
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
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        rule = SGDRule(
            momentum_buffer=momentum != 0,
            momentum_buffer_dtype=momentum_buffer_dtype,
            nesterov=nesterov,
            dampening=dampening,
            backend=backend,
        )
        self._buffered = replace(rule, momentum_buffer=True)
        self._plain = replace(rule, momentum_buffer=False, nesterov=False)
        self._have_momentum: list[bool] = []  # of each group, at the last step
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        flags = {"maximize": maximize, "foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, rule, defaults, mains=mains, max_norm=max_norm, flags=flags)

    def rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        """With a buffer where the group has a momentum, or had one when the parameter's state was made."""
        has_buffer = bool(group["momentum"]) or MOMENTUM in self.state.get(param, {})
        return for_dtype(self._buffered if has_buffer else self._plain, param)

    def __getstate__(self) -> dict[str, object]:
        own = {"_buffered": self._buffered, "_plain": self._plain, "_have_momentum": []}
        return super().__getstate__() | own

    def _batches(self) -> dict[Sweep, list[Batch]]:
        have_momentum = [bool(group["momentum"]) for group in self.param_groups]
        if have_momentum != self._have_momentum:
            self._roster, self._have_momentum = None, have_momentum
        return super()._batches()

    def _enrolled(self, place: int, group: int, param: Tensor, first: int) -> Member:
        """With a buffer of zeros where the group's momentum was set after the parameter's first step."""
        state, of_group = self.state[param], self.param_groups[group]
        if state and of_group["momentum"] and MOMENTUM not in state:
            if of_group["dampening"] and float(state[STEP]):
                raise ValueError(
                    f"momentum={of_group['momentum']!r} with dampening={of_group['dampening']!r} was set after the "
                    "first step, and torch does not dampen the first gradient of a buffer; set the momentum before the "
                    "first step, or build the optimizer with dampening=0"
                )
            state.update(self.rule_of(of_group, param).init_state(local(param).detach()))
        return super()._enrolled(place, group, param, first)
