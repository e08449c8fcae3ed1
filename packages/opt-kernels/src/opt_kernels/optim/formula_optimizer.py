"""`FormulaOptimizer`: base class of the drop-in optimizers of elementwise rules, and those of NAdam, SGD and rules with
averaged weights for evaluation, where `eval()` swaps these into the parameters and `train()` swaps back.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from inspect import Signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat
from opt_kernels.codecs import codecs_of, scale_name
from opt_kernels.dtensor import distributed_like, local, local_like
from opt_kernels.formulas import RisingRates
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.functions import power, q_pochhammer
from opt_kernels.hooks import check_unread
from opt_kernels.optim.base import Params, RuleOptimizer
from opt_kernels.optim.checked import for_dtype
from opt_kernels.optim.groups import Options, ParamGroup, bound_arguments, params_with_groups, with_hooks
from opt_kernels.optim.param_rows import Member, SweepBatches
from opt_kernels.optim.state import STEP
from opt_kernels.params import HOOKS, MAIN, REMAINDER, Main, follow_write_
from opt_kernels.precision import without_autocast
from opt_kernels.rules.base import Rule, init_state
from opt_kernels.rules.elementwise import SGD as sgd_rule
from opt_kernels.rules.elementwise import ElementwiseRule, elementwise
from opt_kernels.works import NOT_SPLIT

MU_PRODUCT = "mu_product"
MOMENTUM = "momentum_buffer"
FLAGS = ("foreach", "capturable", "differentiable", "fused")  # arguments of torch.optim that choose an implementation


class FormulaOptimizer(RuleOptimizer):
    """An optimizer whose rule is a formula. `drop_in` generates the classes, and `__signature__` their arguments."""

    fixed = ("maximize",)
    formula: ClassVar[Formula]
    __signature__: ClassVar[Signature]

    def __init__(self, params: Params, lr: float | Tensor | None = None, *args: Any, **options: Any) -> None:
        given = (params,) if lr is None else (params, lr)
        values = bound_arguments(type(self), *given, *args, **options)
        defaults: ParamGroup = {number.name: values[number.name] for number in self.formula.numbers}
        self._check_numbers(defaults)
        rule = self.rule_with(values)
        for name, value in rule.formula.constants:
            if name in self.fixed:
                defaults[name] = values.get(name, value)
        defaults["maximize"] = rule.maximize
        common = {name: values[name] for name in ("mains", "max_norm", "hooks")}
        flags = {name: values[name] for name in FLAGS}
        super().__init__(values["params"], rule, defaults, flags=flags, **common)

    def rule_with(self, values: Options) -> ElementwiseRule:
        """Return the rule for these arguments."""
        numbers = {number.name for number in self.formula.numbers}
        others = {"params", "mains", "max_norm", "hooks", *FLAGS, *numbers}
        # As in torch, None leaves a choice at its default.
        options = {name: value for name, value in values.items() if name not in others and value is not None}
        return elementwise(self.formula, **options | {"maximize": bool(values["maximize"])})

    def _check_read(self, group: ParamGroup, names: Collection[str]) -> None:
        values = {name: group[name] for name in names}
        check_unread(with_hooks(self.rule, group.get(HOOKS, self.hooks)), values)


class NAdamOptimizer(FormulaOptimizer):
    """NAdam. It computes the product of mu(1) to mu(t) from t; torch.optim.NAdam needs it in its state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, with `mu_product` (0-d, float32) of every parameter that has state."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            q = 0.96 ** group["momentum_decay"]
            for state in map(packed["state"].get, group["params"]):
                if state is not None:
                    step = float(state[STEP])
                    product = power(float(group["betas"][0]), step) * q_pochhammer(0.5 * q, q, step)
                    state[MU_PRODUCT] = torch.tensor(float(product), dtype=torch.float32, device="cpu")
        return packed


class MomentumOptimizer(FormulaOptimizer):
    """SGD. Parameters of groups with momentum 0 have no buffer."""

    rule: ElementwiseRule
    _have_momentum: tuple[bool, ...] = ()  # whether each group had momentum in the last step

    def rule_with(self, values: Options) -> ElementwiseRule:
        rule = super().rule_with(values)
        buffered = values["momentum"] != 0
        checked = sgd_rule(momentum_buffer=buffered, nesterov=values["nesterov"], dampening=values["dampening"])
        return replace(rule, formula=checked.formula)

    def rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        """Return the rule: with a momentum buffer if the group has momentum, or had it when the state was created."""
        return self._saved_rule(group, param, self.state.get(param, {}))

    def _saved_rule(self, group: ParamGroup, param: Tensor, values: Mapping[str, Any]) -> Rule:
        has_buffer = bool(group["momentum"]) or values.get(MOMENTUM) is not None
        formula = self.rule.formula.with_constants(has_momentum=has_buffer)
        return for_dtype(replace(self.rule, formula=formula), param)

    def _batches(self) -> SweepBatches:
        have_momentum = tuple(bool(group["momentum"]) for group in self.param_groups)
        if have_momentum != self._have_momentum:
            self._rows = None
            self._have_momentum = have_momentum
        return super()._batches()

    def _member_of(self, position: int, group: int, param: Tensor, first: int) -> Member:
        """Add a buffer of zeros if the momentum of the group was set after the first step of the parameter."""
        state = self.state[param]
        of_group = self.param_groups[group]
        if state and of_group["momentum"] and MOMENTUM not in state:
            if of_group["dampening"] and float(state[STEP]):
                raise ValueError(
                    f"momentum={of_group['momentum']!r} with dampening={of_group['dampening']!r} was set after the "
                    "first step: a new buffer would start with a dampened gradient, unlike in torch; set the momentum "
                    "before the first step, or build the optimizer with dampening=0"
                )
            state.update(init_state(self.rule_of(of_group, param), local(param).detach(), NOT_SPLIT))
        return super()._member_of(position, group, param, first)


TRAIN_MODE = "train_mode"  # entry of groups and checkpoints: whether the parameters hold the trained weights
TRAINED = "trained_weights"  # in a state_dict of evaluation mode: the parameters do not hold them then


class AveragedOptimizer(FormulaOptimizer):
    """Base of optimizers whose formula has an `evaluation`. Starts in training mode; a step in evaluation mode raises
    RuntimeError."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._trained: dict[Tensor, Tensor] = {}  # in evaluation mode: the trained weights of each parameter
        self._shown: list[tuple[int, int]] = []  # versions of these parameters, which change with every write
        self._rates = RisingRates()
        super().__init__(*args, **options)
        self.defaults[TRAIN_MODE] = True
        for group in self.param_groups:
            group.setdefault(TRAIN_MODE, True)

    @property
    def is_training(self) -> bool:
        return all(group.get(TRAIN_MODE, False) for group in self.param_groups)

    @torch.no_grad()
    @without_autocast()
    def eval(self) -> None:
        """Write the averaged weights to the parameters, and keep a copy of the trained weights until `train()`."""
        if self.is_training:
            for main in self._written_mains().values():
                follow_write_(main)
            for group, param in params_with_groups(self.param_groups):
                if float(self.state.get(param, {}).get(STEP, 0)):
                    self._trained[param] = local(param).detach().clone()
                    local(param).copy_(self._evaluated(group, param, back=False))
            self._set_mode(training=False)
            self._shown = self._versions()

    @torch.no_grad()
    @without_autocast()
    def train(self, mode: bool = True) -> None:
        """Write the trained weights back to the parameters, bit for bit. `train(False)` is `eval()`."""
        if not mode:
            self.eval()
        elif self._trained or not self.is_training:
            if self._shown and self._shown != self._versions():
                warnings.warn(
                    "parameters were written in evaluation mode, as by a load; train() replaces them by the trained "
                    "weights: call train() before the load",
                    stacklevel=3,
                )
            for param, trained in self._trained.items():
                local(param).copy_(trained)
            self._set_mode(training=True)

    def _written_mains(self) -> dict[Tensor, Main]:
        return {} if self._trained else super()._written_mains()  # else the parameters hold averaged weights

    def _versions(self) -> list[tuple[int, int]]:
        return [(param._version, local(param)._version) for param in self._trained]  # both, of a DTensor

    def _set_mode(self, *, training: bool) -> None:
        self._trained = {} if training else self._trained
        self._shown = []
        for group in self.param_groups:
            group[TRAIN_MODE] = training

    def _evaluated(self, group: ParamGroup, param: Tensor, *, back: bool) -> Tensor:
        """The averaged weights computed from the trained weights, or with `back` the reverse, in float32."""
        shard = local(param).detach()
        state = self.state[param]
        values = Main(shard, state).value().to(torch.promote_types(shard.dtype, torch.float32))
        rule = self.rule_of(group, param)
        states = {}
        for name, codec in codecs_of(rule).items():
            states[name] = torch.empty_like(values)
            codes = flat(state[name], shard, name)
            scales = state.get(scale_name(name))
            codec.decode_(flat(states[name], shard, name), codes, scales)
        hyper = self._hyper(group, rule, int(state[STEP]))
        return self.formula.evaluated(values, states, hyper, back=back)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, in evaluation mode with the trained weights, which a load restores."""
        packed = super().state_dict()
        for index, (_, param) in enumerate(params_with_groups(self.param_groups)):
            if param not in self._trained:
                continue
            saved = packed["state"][index]
            trained = self._trained[param]
            if REMAINDER in self.state[param]:  # it completes the trained parameter, not the averaged one
                saved[MAIN] = distributed_like(Main(trained, self.state[param]).value(), param)
            elif MAIN not in saved:
                saved[TRAINED] = distributed_like(trained, param)
        return packed

    def _load(self, states: Mapping[Any, Mapping[str, Any]], saved_groups: Sequence[ParamGroup]) -> None:
        """Also restore the mode. After loading a state_dict of evaluation mode, the parameters hold the averaged
        weights and the optimizer keeps the trained weights."""
        super()._load(states, saved_groups)
        self._trained = {}
        self._shown = []
        if self.is_training:
            return
        indices = [index for group in saved_groups for index in group["params"]]
        with torch.no_grad():
            for index, (group, param) in zip(indices, params_with_groups(self.param_groups), strict=True):
                saved = states.get(index, {})
                if TRAINED in saved:
                    local(param).copy_(local_like(saved[TRAINED], param))
                elif saved and MAIN not in saved:  # only the averaged weights were saved
                    local(param).copy_(self._evaluated(group, param, back=True))
        self._set_mode(training=True)
        self.eval()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trained": self._trained, "_shown": [], "_rates": RisingRates()}

    def _batches(self) -> SweepBatches:
        if self.formula.name == "schedule_free":
            self._rates.note(enumerate(self.param_groups))
        return super()._batches()

    def _update_(self) -> None:
        if self._trained or not self.is_training:
            raise RuntimeError(
                f"{type(self).__name__}.step() in evaluation mode (train_mode of a group is not True, or was set by "
                "hand): the parameters hold averaged weights; call optimizer.train() before training continues, and "
                "optimizer.eval() before evaluation"
            )
        super()._update_()
