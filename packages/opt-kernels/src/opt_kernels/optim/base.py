"""`RuleOptimizer`: a torch.optim.Optimizer over rules, in torch's state_dict form."""

import math
from abc import ABC
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from opt_kernels.backends.grad_stats import grad_stats
from opt_kernels.codecs import codecs_of
from opt_kernels.dtensor import Span, is_dtensor, local, spans
from opt_kernels.formulas.formula import OF_HYPER
from opt_kernels.hooks import GivenHooks
from opt_kernels.optim.groups import (
    ParamGroup,
    check_distinct,
    check_fixed,
    check_flags,
    check_keys,
    check_options,
    loaded_groups,
)
from opt_kernels.optim.hooks import (
    HOOKS,
    check_names,
    check_param_hooks,
    checked_hooks,
    recorded,
    warn_of_other_hooks,
    with_hooks,
)
from opt_kernels.optim.mains import parse_mains
from opt_kernels.optim.on_device import CaptureError, GroupsOnDevice, addresses, check_capturable, scaling_of
from opt_kernels.optim.params import check_available, check_param, for_dtype, rounds_stochastically
from opt_kernels.optim.roster import Roster, params_of
from opt_kernels.optim.rows import Member, Sweep
from opt_kernels.optim.state import Saved, StateDictError, init_state, saved_state
from opt_kernels.rules.base import Rule
from opt_kernels.works import Batch, Hyper, MatrixSpec

Params = Iterable[Tensor] | Iterable[ParamGroup] | Iterable[tuple[str, Tensor]]


class RuleOptimizer(torch.optim.Optimizer, ABC):
    """What the optimizers of this package share. A final class gives its rule and its groups' defaults.

    A parameter's state is made at its first step: `step` (0-d float32, on the host, as in torch.optim), the rule's own
    states, and what `mains` asks for. Gradients are never written. DTensor parameters are updated shard by shard.

    With `capturable=True` the host reads nothing in a step: steps are counted on the device, and a step may be captured
    as a CUDA graph, after one that was not. What then freezes, and what stays live: `opt_kernels.hyper_table`; call
    `upload_groups` before each replay, and keep gradients in place (`zero_grad(set_to_none=False)`).

    With `max_norm` the gradients' total norm is clipped at it within the update, as if by `clip_grad_norm_`, and a step
    whose gradients are not all finite changes nothing.

    `hooks` stand around the update: see `opt_kernels.hooks`. A group may have others, under "hooks". A state_dict
    records them as text; loading one that was saved under others logs a warning, and keeps those of this optimizer.
    """

    # Options of torch.optim's groups that here are the rule's, and so of all groups.
    fixed: ClassVar[tuple[str, ...]] = ()

    # torch.amp.GradScaler then sets `grad_scale` and `found_inf` on the optimizer for the time of its step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        rule: Rule,
        defaults: ParamGroup,
        *,
        mains: str = "param",
        max_norm: float | None = None,
        hooks: GivenHooks = (),  # of all groups that have none of their own
        flags: Mapping[str, object] = MappingProxyType({}),  # torch.optim's, which say how a step is computed
    ) -> None:
        self.capturable = flags.get("capturable") is True
        check_flags({name: flag for name, flag in flags.items() if name != "capturable" or not self.capturable})
        check_available(rule)
        self.rule = rule
        self._on_device: GroupsOnDevice | None = None  # made at the first step that needs it
        self._captured_at: list[int | None] = []  # where a captured step found the gradients
        self.mains = parse_mains(mains)
        self.max_norm = max_norm
        self.hooks = checked_hooks(hooks)
        check_names(self.hooks, self.rules)
        # Of the last step, before clipping; None without max_norm; 0-d on the device where capturable.
        self.grad_norm: float | Tensor | None = None
        self._roster: Roster | None = None  # made anew whenever it does not hold
        self._states_may_change = False  # until `state` is read
        check_options(defaults | ({} if max_norm is None else {"max_norm": max_norm}))
        super().__init__(params, defaults)

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Tensor]]:
        """The states by parameter, as in torch.optim. Once it was read anybody may have moved or replaced a state, and
        every later step looks where all of them are."""
        self._states_may_change = True
        return self._states

    @state.setter
    def state(self, value: defaultdict[Tensor, dict[str, Tensor]]) -> None:
        self._forget_roster()
        self.__dict__["state"] = value

    def _forget_roster(self) -> None:
        if self._roster is not None:
            self._roster.write_steps_()
        self._roster = None

    @property
    def _states(self) -> defaultdict[Tensor, dict[str, Tensor]]:
        """What `state` gives, for those who only read values."""
        if self._roster is not None:
            self._roster.write_steps_()
        states: defaultdict[Tensor, dict[str, Tensor]] = self.__dict__["state"]
        return states

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that may move its parameters."""
        return (self.rule,)

    def rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        """The rule that moves `param`, without hooks; the same at every step."""
        return for_dtype(self.rule, param)

    def matrix_of(self, group: ParamGroup, param: Tensor) -> MatrixSpec:
        """What a matrix rule must know of `param`."""
        return MatrixSpec()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient; runs `closure` first and returns its loss.

        Under torch.compile the graph breaks here: the sweeps are compiled already.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update_()
        return loss

    def upload_groups(self) -> None:
        """Writes the numbers of `param_groups` to where a captured step reads them: call it before each replay.

        Numbers that are tensors on the device are read where they are. Does nothing unless `capturable`.

        Raises:
            CaptureError (a ValueError): since the capture something has changed that it froze: gradients or states are
                others or elsewhere, or an entry of a group that is not a number. Capture again, after a step that is
                not captured.
        """
        if self._on_device is None:
            return
        self._on_device.upload(self.param_groups)
        if self._on_device.is_captured:
            grads = self._enrolled_gradients()
            if grads is None or addresses(grads) != self._captured_at:
                raise CaptureError(
                    "gradients or states are not where the captured step found them: another set of parameters has "
                    "gradients, zero_grad() released them, or a state_dict was loaded; run one step, then capture again"
                )

    def state_dict(self) -> dict[str, Any]:
        """torch's form. States are saved in plain numbers, so that another choice of codecs or mains can load them."""
        could_change = self._states_may_change or bool(
            self._optimizer_state_dict_pre_hooks or self._optimizer_state_dict_post_hooks
        )
        packed = super().state_dict()
        self._states_may_change = could_change  # what is packed below has tensors of its own
        for index, (group, param) in enumerate(params_with_groups(self.param_groups)):
            if param in self._states:
                codecs = codecs_of(self.rule_of(group, param))
                packed["state"][index] = saved_state(codecs, param, self._states[param])
        for of_group in packed["param_groups"]:
            hooks = recorded(of_group.pop(HOOKS, self.hooks))
            of_group |= {HOOKS: hooks} if hooks else {}
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sets groups and states from torch's form; also from one that torch.optim's namesake saved.

        Unlike torch's own it leaves every state in its dtype. A `main` that was saved is written to its parameter, too.
        Raises StateDictError where a state is missing or misshapen, or was saved with an option that is not ours;
        then nothing has changed.
        """
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, loaded)
            loaded = loaded if replaced is None else replaced
        groups = loaded_groups(self.param_groups, loaded["param_groups"], self.defaults)
        for number, (group, of_saved) in enumerate(zip(self.param_groups, loaded["param_groups"])):
            warn_of_other_hooks(number, group.get(HOOKS, self.hooks), of_saved)
        indices = [index for group in loaded["param_groups"] for index in group["params"]]
        found = [
            Saved(self.rule_of(group, param), self.mains, param, self.matrix_of(group, param), loaded["state"][index])
            for index, (group, param) in zip(indices, params_with_groups(groups), strict=True)
            if index in loaded["state"]
        ]
        try:
            for own, group in zip(self.param_groups, groups):
                self._check_group(group)
                self._check_loaded(own, group)
        except ValueError as error:
            raise StateDictError(f"the state_dict has {error}") from None
        for saved in found:
            saved.check()
        state = {saved.param: saved.load_() for saved in found}
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """As torch's. Raises ValueError for an option that is unknown, not allowed or not the groups' own, and for a
        parameter that no step could update."""
        if isinstance(param_group, dict):  # else torch says what it wants
            offered = ("capturable",) if self.capturable else ()
            check_keys(param_group, {*self.defaults, HOOKS, *offered})
            self._check_group(self.defaults | param_group)
        super().add_param_group(param_group)
        try:
            check_distinct(self.param_groups[-1]["params"])
            for param in self.param_groups[-1]["params"]:
                self._check_param(self.param_groups[-1], param)
        except ValueError:
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_roster" in self.__dict__:
            self._forget_roster()
        super().__setstate__({"_states_may_change": True} | state | {"_roster": None})

    def __getstate__(self) -> dict[str, Any]:
        own = {"rule": self.rule, "mains": self.mains, "max_norm": self.max_norm, "grad_norm": self.grad_norm}
        own |= {"hooks": self.hooks, "_roster": None, "capturable": self.capturable, "_on_device": None}
        own |= {"_captured_at": []}
        return super().__getstate__() | own

    def _check_group(self, group: ParamGroup) -> None:
        """Raises ValueError for a group that this optimizer cannot have."""
        check_options(group)
        check_fixed(group, self.defaults, self.fixed)
        check_names(checked_hooks(group.get(HOOKS, ())), self.rules)

    def _check_loaded(self, own: ParamGroup, loaded: ParamGroup) -> None:
        """Raises ValueError where state saved with the options of `loaded` means nothing with those of `own`."""

    def _check_param(self, group: ParamGroup, param: Tensor) -> None:
        """Raises ValueError for a parameter that no step could update."""
        if is_lazy(param):
            return  # its shape is not known yet
        rule = self._hooked_rule_of(group, param)
        check_param(param, rule, self.mains)
        if self.capturable:
            check_capturable(param, rule)
        check_param_hooks(param, rule, group)

    def _hooked_rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        """The rule that moves `param`, with its hooks."""
        return with_hooks(self.rule_of(group, param), group.get(HOOKS, self.hooks))

    def _update_(self) -> None:
        if not self.__dict__["state"] and self._only_makes_state():
            self._roster = Roster(self.param_groups, self._states, self._enrolled, steps_on_device=self.capturable)
            return
        # Set by GradScaler, and deleted by it afterwards: absent means 1, and nothing found.
        found_inf, loss_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if self.capturable:
            self._update_on_device_(found_inf, loss_scale)
            return
        if found_inf is not None and bool(found_inf):
            return
        scale = 1.0 if loss_scale is None else 1 / float(loss_scale)
        if self.max_norm is not None:
            self.grad_norm = scale * self._norm_of_gradients()
            if not self.grad_norm < float("inf"):
                return
            scale *= min(1.0, self.max_norm / (self.grad_norm + 1e-6))
        for sweep, batches in self._batches().items():
            sweep.rule.update_(batches, grad_scale=scale)

    def _update_on_device_(self, found_inf: Tensor | None, loss_scale: Tensor | None) -> None:
        if self.max_norm is not None:
            self._check_norm_spans_no_ranks()
        grads = [param.grad for param in params_of(self.param_groups) if param.grad is not None]
        scale, skip, norm = scaling_of(grads, found_inf=found_inf, loss_scale=loss_scale, max_norm=self.max_norm)
        self.grad_norm = norm
        if self._on_device is None:
            own = [name for rule in self.rules for name in getattr(rule, "hyper_names", ())]
            choosing = [name for rule in self.rules for name in getattr(rule, "choosing_numbers", ())]
            self._on_device = GroupsOnDevice((*OF_HYPER, "scalar_eps", *own), choosing)
        self._on_device.begin_step()
        for sweep, batches in self._batches(made=None if skip is None else ~skip).items():
            sweep.rule.update_(batches, grad_scale=scale, skip=skip)
        if self._on_device.is_capturing:
            self._captured_at = addresses([param.grad for param in params_of(self.param_groups)])

    def _only_makes_state(self) -> bool:
        """Whether this first step has zero gradients and learning rates: `torch.distributed.checkpoint` makes one so
        that there is state to save or to load into. It must not count as a step."""
        grads = [param.grad for param in params_of(self.param_groups) if param.grad is not None]
        return all(float(group["lr"]) == 0 for group in self.param_groups) and not any(
            map(torch.any, map(local, grads))
        )

    def _norm_of_gradients(self) -> float:
        """The total norm over every device, read on the host; infinite or NaN where a gradient is."""
        self._check_norm_spans_no_ranks()
        by_device: dict[torch.device, list[Tensor]] = {}
        for grad in [param.grad for param in params_of(self.param_groups) if param.grad is not None]:
            by_device.setdefault(grad.device, []).append(grad)
        sums = [grad_stats(grads, count_zeros=False).sum_of_squares for grads in by_device.values()]
        return math.sqrt(sum(float(total) for total in sums))

    def _check_norm_spans_no_ranks(self) -> None:
        if any(map(is_dtensor, params_of(self.param_groups))):
            raise ValueError(
                f"max_norm={self.max_norm} with a DTensor parameter: its norm spans ranks, which this optimizer "
                "does not reach; give max_norm=None and call torch.nn.utils.clip_grad_norm_"
            )

    def _batches(self, made: Tensor | None = None) -> dict[Sweep, list[Batch]]:
        """The works of this step, by rule and device, within them by hyper row; counts each parameter's step, if
        `made`, 0-d on the device, is not zero."""
        grads = self._enrolled_gradients()
        if self._roster is None or grads is None:
            self._roster = Roster(
                self.param_groups, self._states, self._enrolled, steps_on_device=self._on_device is not None
            )
            grads = [param.grad for param in params_of(self.param_groups)]
        return self._roster.batches(grads, self._hyper_of, made, write_steps=self._states_may_change)

    def _enrolled_gradients(self) -> list[Tensor | None] | None:
        """The gradients of all parameters; None where there is no roster that holds."""
        if self._roster is None:
            return None
        states = self.__dict__["state"]
        return self._roster.gradients(self.param_groups, states, states_may_change=self._states_may_change)

    def _hyper_of(self, group: int, sweep: Sweep, step: float | Tensor) -> Hyper:
        if self._on_device is None:
            return self._hyper(self.param_groups[group], sweep.rule, step)
        return self._hyper(self._on_device.of(sweep.device, self.param_groups)[group], sweep.rule, step)

    def _enrolled(self, place: int, group: int, param: Tensor, first: int) -> Member:
        """What the roster is to know of `param`, whose state is made here where it has none."""
        of_group = self.param_groups[group]
        rule, matrix = self._hooked_rule_of(of_group, param), self.matrix_of(of_group, param)
        state = self._states[param]
        if not state:
            state.update(init_state(rule, self.mains, param, matrix))
        return Member(place, group, param, state, rule, matrix, first, self._spans(rule, param))

    def _spans(self, rule: Rule, param: Tensor) -> tuple[Span, ...]:
        """The elements of `param` that are here, cut where stochastic rounding must number them apart."""
        return (spans(param) or ()) if rounds_stochastically(rule, self.mains, param) else (Span(0, param.numel(), 0),)

    def _hyper(self, group: ParamGroup, rule: Rule, step: float | Tensor) -> Hyper:
        """The numbers that `rule` reads of `group` at this step."""
        own = {name: group[name] for name in getattr(rule, "hyper_names", ()) if name in group}
        count = step if isinstance(step, Tensor) else int(step)
        return Hyper(step=count, own=own, **{name: group[name] for name in OF_HYPER if name in group})


def params_with_groups(groups: Iterable[ParamGroup]) -> list[tuple[ParamGroup, Tensor]]:
    """All parameters in order, each with its group."""
    return [(group, param) for group in groups for param in group["params"]]
