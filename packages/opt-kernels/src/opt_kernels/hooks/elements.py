"""An elementwise rule with elementwise hooks: again an elementwise rule, of a transformed formula."""

from dataclasses import dataclass, fields

from opt_kernels.formulas.formula import Formula
from opt_kernels.hooks.compose import with_hook
from opt_kernels.hooks.values import Hooks
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.works import Hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedElements(ElementwiseRule):
    """`rule` with `hooks` in its one sweep; made by `with_hooks`."""

    rule: ElementwiseRule
    hooks: Hooks

    @property
    def name(self) -> str:
        """The rule's own: a checkpoint is of the rule, whatever its hooks."""
        return self.rule.name

    def in_float64(self) -> ElementwiseRule:
        return with_hooks(self.rule.in_float64(), self.hooks)

    def formula_at(self, hyper: Hyper) -> Formula:
        return _composed(self.rule.formula_at(hyper), self.hooks)


def with_hooks(rule: ElementwiseRule, hooks: Hooks) -> HookedElements:
    """`rule` with elementwise hooks. Raises HookError for a rule that they cannot be added to."""
    of_rule = {field.name: getattr(rule, field.name) for field in fields(ElementwiseRule)}
    return HookedElements(**of_rule | {"formula": _composed(rule.formula, hooks)}, rule=rule, hooks=hooks)


def _composed(formula: Formula, hooks: Hooks) -> Formula:
    for hook in hooks:
        formula = with_hook(formula, hook)
    return formula
