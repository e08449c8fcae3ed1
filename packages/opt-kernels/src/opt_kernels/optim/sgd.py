"""Drop-in SGD: creates momentum buffers only for groups with momentum, also if momentum is set later."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from opt_kernels.dtensor import local
from opt_kernels.optim.checked import for_dtype
from opt_kernels.optim.formula_optimizer import FormulaOptimizer
from opt_kernels.optim.groups import ParamGroup
from opt_kernels.optim.rows import Member, Sweep
from opt_kernels.optim.state import STEP
from opt_kernels.rules.base import Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.rules.sgd import SGD as sgd_rule
from opt_kernels.works import Batch

MOMENTUM = "momentum_buffer"


class MomentumOptimizer(FormulaOptimizer):
    """SGD. Parameters of groups with momentum 0 have no buffer."""

    rule: ElementwiseRule
    _have_momentum: tuple[bool, ...] = ()  # whether each group had momentum in the last step

    def rule_with(self, values: Mapping[str, Any]) -> ElementwiseRule:
        rule = super().rule_with(values)
        buffered = values["momentum"] != 0
        checked = sgd_rule(momentum_buffer=buffered, nesterov=values["nesterov"], dampening=values["dampening"])
        return replace(rule, formula=checked.formula)

    def rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        """The rule with a momentum buffer if the group has momentum, or had it when the state was created."""
        has_buffer = bool(group["momentum"]) or MOMENTUM in self.state.get(param, {})
        formula = self.rule.formula.with_constants(has_momentum=has_buffer)
        return for_dtype(replace(self.rule, formula=formula), param)

    def _batches(self, made: Tensor | None = None) -> dict[Sweep, list[Batch]]:
        have_momentum = tuple(bool(group["momentum"]) for group in self.param_groups)
        if have_momentum != self._have_momentum:
            self._forget_rows()
            self._have_momentum = have_momentum
        return super()._batches(made)

    def _member_of(self, position: int, group: int, param: Tensor, first: int) -> Member:
        """Add a buffer of zeros if the momentum of the group was set after the first step of the parameter."""
        state, of_group = self.state[param], self.param_groups[group]
        if state and of_group["momentum"] and MOMENTUM not in state:
            if of_group["dampening"] and float(state[STEP]):
                raise ValueError(
                    f"momentum={of_group['momentum']!r} with dampening={of_group['dampening']!r} was set after the "
                    "first step: a new buffer would start with a dampened gradient, unlike in torch; set the momentum "
                    "before the first step, or build the optimizer with dampening=0"
                )
            state.update(self.rule_of(of_group, param).init_state(local(param).detach()))
        return super()._member_of(position, group, param, first)
