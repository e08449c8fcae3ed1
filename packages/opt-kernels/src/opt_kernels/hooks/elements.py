"""An elementwise rule with elementwise hooks: again an elementwise rule, of a transformed formula."""

from dataclasses import dataclass

import torch

from opt_kernels.formulas.formula import Formula
from opt_kernels.hooks.compose import with_hook
from opt_kernels.hooks.values import Hooks
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.works import Hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedElements(ElementwiseRule):
    """`rule` with `hooks` in its one sweep. Raises HookError for a rule that they cannot be added to."""

    rule: ElementwiseRule
    hooks: Hooks

    @property
    def formula(self) -> Formula:
        return self._with_hooks(self.rule.formula)

    def formula_at(self, hyper: Hyper) -> Formula:
        return self._with_hooks(self.rule.formula_at(hyper))

    def dtype_of(self, state: str) -> torch.dtype:
        return self.rule.dtype_of(state)

    @property
    def name(self) -> str:
        """The rule's own: a checkpoint is of the rule, whatever its hooks."""
        return self.rule.name

    @property
    def stochastic_rounding(self) -> bool:  # type: ignore[override]  # here the rule's field
        return self.rule.stochastic_rounding

    @property
    def backend(self) -> str | None:  # type: ignore[override]  # here the rule's field
        return self.rule.backend

    def _with_hooks(self, formula: Formula) -> Formula:
        for hook in self.hooks:
            formula = with_hook(formula, hook)
        return formula
