"""`CheckedOptimizer`: chooses the rule of each parameter, and checks parameters and groups, also between steps."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from opt_kernels.backends.memory import is_dense
from opt_kernels.dtensor import Span, is_dtensor, local, spans
from opt_kernels.hooks import GivenHooks
from opt_kernels.optim import groups
from opt_kernels.optim.on_device import check_capturable
from opt_kernels.optim.state import Mains, init_main, is_narrow
from opt_kernels.quantized.adapters import is_quantized
from opt_kernels.rules.adaptive_muon import AdaptiveMuonRule
from opt_kernels.rules.base import ElementwiseRule, Rule
from opt_kernels.rules.muon import MuonRule
from opt_kernels.rules.soap import SOAPRule
from opt_kernels.works import MatrixSpec


class CheckedOptimizer(torch.optim.Optimizer, ABC):
    """Choose the rule of each parameter, and check its group. Subclasses restrict their groups by overriding checks."""

    # Options that torch.optim has in each group, and that must be equal in all groups here.
    fixed: ClassVar[tuple[str, ...]] = ()
    # Entries of groups, in addition to hooks, that are read only when a parameter takes its first step.
    structural: ClassVar[tuple[str, ...]] = ()
    # Entries of groups that schedulers may set to any number.
    scheduled: ClassVar[tuple[str, ...]] = groups.SCHEDULED

    rule: Rule
    mains: Mains
    hooks: GivenHooks  # of groups without hooks of their own
    capturable: bool
    _entries: groups.GroupEntries | None  # of the groups in the last step; None: not built yet

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that may update its parameters."""
        return (self.rule,)

    def rule_of(self, group: groups.ParamGroup, param: Tensor) -> Rule:
        """The rule that updates `param`, without hooks. It is the same in every step."""
        return for_dtype(self.rule, param)

    def matrix_of(self, group: groups.ParamGroup, param: Tensor) -> MatrixSpec:
        """How a matrix rule treats `param`."""
        return MatrixSpec()

    def add_param_group(self, param_group: groups.ParamGroup) -> None:
        """Add a group, as in torch. Raises ValueError for a parameter that cannot be updated, and for an option that is
        unknown, not allowed, or equal in all groups by definition."""
        if isinstance(param_group, dict):  # torch raises for anything else
            groups.check_keys(
                param_group, {*self.defaults, groups.HOOKS, *(("capturable",) if self.capturable else ())}
            )
            self._check_group(self.defaults | param_group)
        if self._entries is not None:
            self._adopt_changes()
        super().add_param_group(param_group)
        try:
            groups.check_distinct(self.param_groups[-1]["params"])
            for param in self.param_groups[-1]["params"]:
                self._check_param(self.param_groups[-1], param)
            groups.check_apart([param for group in self.param_groups for param in group["params"]])
        except ValueError:
            del self.param_groups[-1]
            raise
        if self._entries is not None:
            self._entries.accept(self.param_groups)

    def _check_group(self, group: groups.ParamGroup) -> None:
        """Raise ValueError for a group that this optimizer does not support."""
        groups.check_options(group)
        groups.check_fixed(group, self.defaults, self.fixed)
        groups.check_names(groups.checked_hooks(group.get(groups.HOOKS, ())), self.rules)

    def _adopt_changes(self) -> None:
        """Let entries of groups that changed since the last step take effect. Raises ValueError for a change that is
        not supported, and for an entry that was removed."""
        assert self._entries is not None
        changes = self._entries.changes(self.param_groups)
        if not changes:
            return
        flags = groups.NEUTRAL.keys() - self.defaults.keys() - {"capturable"}  # torch.compile sets this one in groups
        for number, before, names in changes:
            group = self.param_groups[number]
            groups.check_flags({name: group[name] for name in names & flags})
            self._check_group(group)
            self._check_read(group, names)
            if not names.isdisjoint((groups.HOOKS, *self.structural)):
                self._check_changed(group, {**self.defaults, **before})
                for param in group["params"]:
                    self._check_param(group, param)
                self._forget_rows()
        self._entries.accept(self.param_groups)

    def _new_entries(self) -> groups.GroupEntries:
        return groups.GroupEntries(list(self.defaults), self.param_groups, scheduled=self.scheduled)

    @abstractmethod
    def _forget_rows(self) -> None:
        """Forget what was derived from the groups and the rules of their parameters."""

    def _check_read(self, group: groups.ParamGroup, names: Collection[str]) -> None:
        """Raise ValueError if entries of a group that were changed, `names`, would have no effect."""

    def _check_changed(self, group: groups.ParamGroup, before: groups.ParamGroup) -> None:
        """Raise ValueError if existing states are of no use with changed structural entries."""

    def _check_loaded(self, own: groups.ParamGroup, loaded: groups.ParamGroup) -> None:
        """Raise ValueError if state saved with the group options `loaded` cannot be used with the options `own`."""

    def _check_param(self, group: groups.ParamGroup, param: Tensor) -> None:
        """Raise ValueError for a parameter that cannot be updated."""
        if is_lazy(param):
            return  # its shape is not known yet
        rule = self._hooked_rule_of(group, param)
        check_param(param, rule, self.mains)
        if self.capturable:
            check_capturable(param, rule)
        groups.check_param_hooks(param, rule, group)

    def _check_effects(self) -> None:
        """Raise ValueError if `mains` or `stochastic_rounding` was given, but has no effect on any parameter."""
        pairs = [(self.rule_of(group, param), param) for group in self.param_groups for param in group["params"]]
        if any(is_lazy(param) for _, param in pairs):
            return
        dtypes = ", ".join(sorted({str(param.dtype) for _, param in pairs}))
        if self.mains is not Mains.PARAM and not any(is_narrow(param) for _, param in pairs):
            raise ValueError(
                f"mains={self.mains.value!r} has no effect: all parameters are {dtypes}, and only narrower ones have "
                "separate mains; convert the model (model.bfloat16()), or leave mains at 'param'"
            )
        asked = [(rule, param) for rule, param in pairs if getattr(rule, "stochastic_rounding", False)]
        if asked and not any(rounds_stochastically(rule, self.mains, param) for rule, param in asked):
            raise ValueError(
                f"stochastic_rounding=True has no effect: parameters are {dtypes}, with mains={self.mains.value!r}; "
                "only bfloat16 parameters with mains='param' are rounded stochastically. Convert the model "
                "(model.bfloat16()), or leave it at False"
            )

    def _hooked_rule_of(self, group: groups.ParamGroup, param: Tensor) -> Rule:
        """The rule that updates `param`, with its hooks."""
        return groups.with_hooks(self.rule_of(group, param), group.get(groups.HOOKS, self.hooks))


def for_dtype(rule: Rule, param: Tensor) -> Rule:
    """`rule` for the dtype of `param`: as in torch.optim, float64 parameters have float64 instead of float32 states.

    Triton and C++ sweeps do not support float64, so the torch backend is used unless another one is set.
    """
    if param.dtype is not torch.float64:
        return rule
    if isinstance(rule, ElementwiseRule):
        return rule.in_float64()
    if not isinstance(rule, MuonRule):
        return rule
    kept = [field.name for field in fields(rule) if field.name.endswith("_dtype")]
    wide: dict[str, Any] = {name: torch.float64 for name in kept if getattr(rule, name) is torch.float32}
    return replace(rule, backend=rule.backend or "torch", **wide)


def rounds_stochastically(rule: Rule, mains: Mains, param: Tensor) -> bool:
    """Whether `param` is rounded stochastically. The noise of an element depends on its number."""
    return bool(getattr(rule, "stochastic_rounding", False)) and mains is Mains.PARAM and param.dtype is torch.bfloat16


def spans_of(rule: Rule, mains: Mains, param: Tensor) -> tuple[Span, ...]:
    """The local elements of `param` in spans of consecutive indices, for stochastic rounding."""
    return (spans(param) or ()) if rounds_stochastically(rule, mains, param) else (Span(0, param.numel(), 0),)


def check_param(param: Tensor, rule: Rule, mains: Mains) -> None:
    """Raise ValueError for a parameter that `rule` cannot update."""
    shard = local(param).detach()
    if not param.is_floating_point():
        remedy = "pass torch.view_as_real(param)" if param.is_complex() else "exclude it from the optimizer"
        raise ValueError(f"a parameter of {param.dtype}: only real floating-point parameters are updated; {remedy}")
    if is_quantized(shard) or hasattr(type(shard), "__tensor_flatten__"):
        raise ValueError(
            f"a parameter of type {type(shard).__name__}, whose elements are not in memory of its own dtype, where the "
            "sweeps update them; pass a dense parameter, or train parameters in fp8 with opt_stack.get_optimizer and "
            "OptimizerConfig(fp8_recipe=...)"
        )
    if shard.is_neg() or not is_dense(shard):
        raise ValueError(
            f"a parameter of shape {tuple(shard.shape)} and strides {tuple(shard.stride())} has holes, overlapping "
            "elements or its negative bit set; allowed are elements that fill their memory, in any order of "
            "dimensions; make it contiguous: nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))"
        )
    if param.dtype is torch.float64 and isinstance(rule, AdaptiveMuonRule | SOAPRule):
        raise ValueError(f"a parameter of torch.float64, but {rule.name} keeps float32 states; pass float32 parameters")
    init_main(mains, shard.to("meta"))
    if rounds_stochastically(rule, mains, param):
        _check_spans(param, rule)
    if getattr(rule, "stochastic_rounding", False) and mains is Mains.PARAM and param.dtype is torch.float16:
        raise ValueError(
            "stochastic_rounding=True with a float16 parameter: only bfloat16 is rounded stochastically; pass "
            "mains='float32', or stochastic_rounding=False"
        )


def _check_spans(param: Tensor, rule: Rule) -> None:
    """Raise ValueError for a shard whose elements cannot be numbered as in the whole parameter."""
    local_spans = spans(param)
    scaled = [name for name, codec in rule.codecs.items() if codec.block]
    if local_spans is not None and (len(local_spans) <= 1 or not scaled):
        return
    placements = param.placements if is_dtensor(param) else ()
    reason = (
        f"its states {', '.join(scaled)} share scales across rows" if local_spans else "its elements cannot be numbered"
    )
    raise ValueError(
        f"stochastic_rounding=True with a DTensor of shape {tuple(param.shape)} placed {placements}: {reason}, so it "
        "would be rounded unlike the whole parameter; shard it by rows (Shard(0)), keep its states in float32 "
        "or bfloat16, or pass mains='remainder'"
    )
