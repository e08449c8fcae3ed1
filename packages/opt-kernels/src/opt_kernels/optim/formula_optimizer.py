"""`FormulaOptimizer`: base class of the drop-in optimizers of elementwise rules."""

from collections.abc import Collection, Mapping
from inspect import Signature
from typing import Any, ClassVar

from torch import Tensor

from opt_kernels.formulas.formula import Formula
from opt_kernels.hooks import check_unread
from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.optim.groups import HOOKS, ParamGroup, bound_arguments
from opt_kernels.optim.hooks import checked_hooks, with_hooks
from opt_kernels.rules.elementwise import ElementwiseRule, elementwise

FLAGS = ("foreach", "capturable", "differentiable", "fused")  # arguments of torch.optim that choose an implementation


class FormulaOptimizer(RuleOptimizer):
    """An optimizer whose rule is a formula. `drop_in` generates the classes, and `__signature__` their arguments."""

    fixed: ClassVar[tuple[str, ...]] = ("maximize",)
    formula: ClassVar[Formula]
    __signature__: ClassVar[Signature]

    def __init__(self, params: Params, lr: float | Tensor | None = None, *args: Any, **options: Any) -> None:
        given = (params,) if lr is None else (params, lr)
        values = bound_arguments(type(self), type(self).__signature__, *given, *args, **options)
        numbers = {number.name: values[number.name] for number in self.formula.numbers}
        self.formula.check_numbers(numbers)
        rule = self.rule_with(values)
        kept = {name: values.get(name, value) for name, value in rule.formula.constants if name in self.fixed}
        super().__init__(
            values["params"],
            rule,
            {**numbers, **kept, "maximize": rule.maximize},
            mains=values["mains"],
            max_norm=values["max_norm"],
            hooks=values["hooks"],
            flags={name: values[name] for name in FLAGS if name in values},
        )

    def rule_with(self, values: Mapping[str, Any]) -> ElementwiseRule:
        """The rule for these arguments."""
        numbers = {number.name for number in self.formula.numbers}
        others = {"params", "mains", "max_norm", "hooks", *FLAGS, *numbers}
        # As in torch, None leaves a choice at its default.
        options = {name: value for name, value in values.items() if name not in others and value is not None}
        return elementwise(self.formula, **options | {"maximize": bool(values["maximize"])})

    def add_param_group(self, param_group: ParamGroup) -> None:
        """As for every drop-in. Also refuses numbers that the formula never reads, see `Formula.check_unread`."""
        if isinstance(param_group, dict):
            values = {**self.defaults, **param_group}
            self.formula.check_numbers(values)
            check_unread(with_hooks(self.rule, checked_hooks(values.get(HOOKS, self.hooks))), values)
        super().add_param_group(param_group)

    def _check_read(self, group: ParamGroup, names: Collection[str]) -> None:
        values = {name: group[name] for name in names if name in group}
        check_unread(with_hooks(self.rule, checked_hooks(group.get(HOOKS, self.hooks))), values)

    def _check_group(self, group: ParamGroup) -> None:
        self.formula.check_numbers(group)
        super()._check_group(group)
