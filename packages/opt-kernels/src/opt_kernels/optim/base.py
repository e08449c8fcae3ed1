"""`RuleOptimizer`: base class of the drop-in optimizers, with state_dicts in torch's form."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import filterfalse
from types import MappingProxyType
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from opt_kernels.backends.dispatch import check_installed
from opt_kernels.codecs import codecs_of
from opt_kernels.dtensor import distributed_like, local
from opt_kernels.hooks import GivenHooks
from opt_kernels.optim import groups
from opt_kernels.optim.checked import check_param, for_dtype, rounds_stochastically, spans_of
from opt_kernels.optim.groups import Options, ParamGroup, params_with_groups
from opt_kernels.optim.on_device import CaptureError, GroupsOnDevice, addresses, check_capturable
from opt_kernels.optim.param_rows import Member, Rows, Sweep, SweepBatches, only_makes_state, params_of, scaling_of
from opt_kernels.optim.state import Saved, StateDictError, init_state, is_narrow, parse_mains, saved_state
from opt_kernels.params import (
    HELD,
    HOOKS,
    MAIN,
    NEUTRAL,
    SCHEDULED,
    GroupEntries,
    Main,
    MainFormat,
    are_unwritten,
    followed,
    read_hyper,
)
from opt_kernels.precision import without_autocast
from opt_kernels.rules.base import Rule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.works import Hyper, MatrixSpec, Number, check_numbers, is_on_device

logger = logging.getLogger(__name__)
Params = Iterable[Tensor] | Iterable[ParamGroup] | Iterable[tuple[str, Tensor]]


class RuleOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers of this package. A final class provides its rule and the defaults of its groups.

    The state of a parameter is created in its first step: `step` (0-d float32, on the host, as in torch.optim), the
    states of the rule, and the main that `mains` selects. Gradients are never modified. Each rank updates its local
    shard of a DTensor parameter.

    With `capturable=True` a step does not read device tensors on the host, so it may be captured in a CUDA graph after
    one uncaptured step. `opt_kernels.hyper_table` lists what a captured step freezes. Call `upload_groups` before each
    replay, and keep gradients in place (`zero_grad(set_to_none=False)`). Python does not see a replay: without an
    upload it uses the old numbers, which only `zero_grad` can notice, an iteration later.

    With `max_norm` the update clips the total norm of the gradients, as `clip_grad_norm_` does. A step whose gradients
    are not all finite then changes nothing.

    `hooks` modify the update, see `opt_kernels.hooks`. A group may have its own under "hooks". A state_dict records
    hooks as text; loading one that was saved with other hooks logs a warning and keeps those of this optimizer.

    Subclasses choose the rule of each parameter, and restrict their groups by overriding checks.
    """

    # Options that torch.optim has in each group, and that must be equal in all groups here.
    fixed: ClassVar[tuple[str, ...]] = ()
    # Entries of groups, in addition to hooks, that are read only when a parameter takes its first step.
    structural: ClassVar[tuple[str, ...]] = ()
    # The numbers of groups, with their bounds.
    declared: ClassVar[tuple[Number, ...]] = groups.NUMBERS
    # Entries of groups that schedulers may set to any number.
    scheduled: ClassVar[tuple[str, ...]] = SCHEDULED

    # Makes torch.amp.GradScaler set `grad_scale` and `found_inf` on the optimizer for the duration of a step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        rule: Rule,
        defaults: ParamGroup,
        *,
        mains: str = "param",
        max_norm: float | None = None,
        hooks: GivenHooks = (),  # of groups without hooks of their own
        flags: Mapping[str, object] = MappingProxyType({}),  # arguments of torch.optim that choose an implementation
    ) -> None:
        self.capturable = flags.get("capturable") is True
        neutral = dict(flags)
        if self.capturable:
            del neutral["capturable"]
        groups.check_flags(neutral)
        check_installed(getattr(rule, "backend", None))
        self.rule = rule
        self._on_device: GroupsOnDevice | None = None  # created in the first capturable step
        self._captured_at: list[int | None] = []  # addresses of the gradients in the captured step
        self.mains = parse_mains(mains)
        self.max_norm = max_norm
        self.hooks = groups.checked_hooks(hooks, self.rules)
        # Gradient norm of the last step before clipping: None without max_norm, a 0-d device tensor if capturable.
        self.grad_norm: float | Tensor | None = None
        self._rows: Rows | None = None  # rebuilt whenever parameters, gradients or states changed
        self._entries: GroupEntries | None = None  # of the groups in the last step; None: not built yet
        if max_norm is not None:
            Number("max_norm", 1.0, low=0.0, high=math.inf).check(max_norm)
        super().__init__(params, defaults)
        self._check_effects()
        self._entries = self._new_entries()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that may update its parameters."""
        return (self.rule,)

    def rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        """Return the rule that updates `param`, without hooks. It is the same in every step."""
        return for_dtype(self.rule, param)

    def matrix_of(self, group: ParamGroup, param: Tensor) -> MatrixSpec:
        """Return how a matrix rule treats `param`."""
        return MatrixSpec()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, as in torch. Raises ValueError for a parameter that cannot be updated, and for an option that is
        unknown, not allowed, or equal in all groups by definition."""
        if isinstance(param_group, dict):  # torch raises for anything else
            known = {*self.defaults, HOOKS}
            if self.capturable:
                known.add("capturable")
            groups.check_keys(param_group, known)
            group = self.defaults | param_group
            self._check_group(group)
            self._check_read(group, group.keys())
        if self._entries is not None:
            self._adopt_changes()
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            groups.check_distinct(added["params"])
            for param in added["params"]:
                self._check_param(added, param)
            groups.check_apart(params_of(self.param_groups))
        except ValueError:
            del self.param_groups[-1]
            raise
        if self._entries is not None:
            self._entries.accept(len(self.param_groups) - 1, added)

    def _check_numbers(self, values: Options) -> None:
        """Raise NumberError, a ValueError, for a number that is not allowed. Other entries are ignored."""
        check_numbers(self.declared, values)

    def _check_group(self, group: ParamGroup) -> None:
        """Raise ValueError for a group that this optimizer does not support."""
        self._check_numbers(group)
        for rule in self.rules:
            if isinstance(rule, ElementwiseRule):
                rule.check_betas(group)
        groups.check_fixed(group, self.defaults, self.fixed)
        groups.checked_hooks(group.get(HOOKS, ()), self.rules)

    def _adopt_changes(self) -> None:
        """Let entries of groups that changed since the last step take effect. Raises ValueError for a change that is
        not supported, and for an entry that was removed."""
        assert self._entries is not None
        changes = self._entries.changes(self.param_groups)
        for index, _, _ in changes:
            for name in filterfalse(self.param_groups[index].__contains__, self.defaults):
                raise ValueError(f"parameter group {index} has no entry {name!r}, which every step reads; set it")
        for group in self.param_groups:  # `changes` leaves out what schedulers set
            self._check_numbers({name: group[name] for name in self.scheduled if not self._waits_for(group[name])})
        flags = NEUTRAL.keys() - self.defaults.keys() - {"capturable"}  # torch.compile sets this one in groups
        for index, former, changed in changes:
            group = self.param_groups[index]
            groups.check_flags({name: group[name] for name in changed & flags})
            self._check_group(group)
            self._check_read(group, changed)
            names = changed if HOOKS in group else changed | (former.keys() & {HOOKS})  # which may be removed
            if not names.isdisjoint((HOOKS, *self.structural)):
                self._check_changed(group, {**self.defaults, **former})
                for param in group["params"]:
                    self._check_param(group, param)
                self._rows = None
        for index, _, _ in changes:
            self._entries.accept(index, self.param_groups[index])

    def _waits_for(self, value: object) -> bool:
        """Whether the host would wait for an accelerator if it read an entry of a group."""
        return is_on_device(value) or (self.capturable and isinstance(value, Tensor))

    def _new_entries(self) -> GroupEntries:
        """The entries of the present groups, except numbers that schedulers set."""
        unwatched = (*HELD, *self.scheduled)
        entries = GroupEntries(lambda _, name: name not in unwatched)
        for index, group in enumerate(self.param_groups):
            entries.accept(index, group)
        return entries

    def _check_read(self, group: ParamGroup, names: Collection[str]) -> None:
        """Raise ValueError if entries of a group that were set, `names`, would have no effect."""

    def _check_changed(self, group: ParamGroup, before: ParamGroup) -> None:
        """Raise ValueError if existing states are of no use with changed structural entries."""

    def _check_loaded(self, own: ParamGroup, loaded: ParamGroup) -> None:
        """Raise ValueError if state saved with the group options `loaded` cannot be used with the options `own`."""

    def _check_param(self, group: ParamGroup, param: Tensor) -> None:
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
        params = params_of(self.param_groups)
        if any(map(is_lazy, params)):
            return
        dtypes = ", ".join(sorted({str(param.dtype) for param in params}))
        if self.mains is not MainFormat.PARAM and not any(map(is_narrow, params)):
            raise ValueError(
                f"mains={self.mains.value!r} has no effect: all parameters are {dtypes}, and only narrower ones have "
                "separate mains; convert the model (model.bfloat16()), or leave mains at 'param'"
            )
        asked = False
        for group, param in params_with_groups(self.param_groups):
            rule = self.rule_of(group, param)
            if rounds_stochastically(rule, self.mains, param):
                return
            asked = asked or getattr(rule, "stochastic_rounding", False)
        if asked:
            raise ValueError(
                f"stochastic_rounding=True has no effect: parameters are {dtypes}, with mains={self.mains.value!r}; "
                "only bfloat16 parameters with mains='param' are rounded stochastically. Convert the model "
                "(model.bfloat16()), or leave it at False"
            )

    def _hooked_rule_of(self, group: ParamGroup, param: Tensor) -> Rule:
        """The rule that updates `param`, with its hooks."""
        return groups.with_hooks(self.rule_of(group, param), group.get(HOOKS, self.hooks))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo  # `torch.compiler.disable` would load dynamo, which takes a second, when this is imported
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Runs `closure` first, if given, and returns its loss.

        Under torch.compile the graph breaks here.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), without_autocast():
            self._update_()
        return loss

    def upload_groups(self) -> None:
        """Copy the numbers of `param_groups` to the device memory that a captured step reads. Call before each replay.

        Numbers that are device tensors are read directly. Does nothing unless `capturable`.

        Raises:
            CaptureError (a ValueError): something that the capture froze has changed: gradients or states were
                replaced or moved, or an entry of a group that is not a number differs. Run one uncaptured step, then
                capture again.
        """
        if self._on_device is None:
            return
        self._adopt_changes()
        self._on_device.upload(self.param_groups)
        if self._on_device.is_captured:
            grads_at = addresses(params_of(self.param_groups))
            if self._current_rows() is None or grads_at != self._captured_at:
                raise CaptureError(
                    "gradients or states moved since the step was captured: other parameters have gradients, "
                    "zero_grad() released them, or a state_dict was loaded; run one step, then capture again"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients. After a capture, log a warning if `upload_groups` was not called in an iteration."""
        if self._on_device is not None:
            self._on_device.notice_stale_numbers(self.param_groups)
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, decoded, so that any choice of codecs or mains can load it.

        States that need no decoding share their memory with those of the optimizer, as in torch. Where other code wrote
        the parameters, mains are copies that have followed it, as those of the next step.
        """
        packed = super().state_dict()
        written = self._written_mains()
        for index, (group, param) in enumerate(params_with_groups(self.param_groups)):
            if self.state.get(param):  # reading the state of a parameter without one makes it empty, as in torch
                codecs = codecs_of(self.rule_of(group, param))
                packed["state"][index] = saved = saved_state(codecs, param, self.state[param])
                if param in written:
                    saved[MAIN] = distributed_like(followed(written[param]), param)
        for group in packed["param_groups"]:
            hooks = groups.recorded(group.pop(HOOKS, self.hooks))
            if hooks:
                group[HOOKS] = hooks
        return packed

    @torch.no_grad()  # else `to_local` returns an alias with a version of its own
    def _written_mains(self) -> dict[Tensor, Main]:
        """The fp32 copies of parameters that other code may have written since the last step."""
        known = {} if self._rows is None else self._rows.mains.followed
        written = {}
        for param, state in self.state.items():
            if MAIN not in state or not is_narrow(param):
                continue
            shard = local(param)
            main = state[MAIN]
            is_beside = (main.shape, main.device) == (shard.shape, shard.device)  # else one of them was moved away
            if is_beside and not are_unwritten(param, shard, known.get(param, ())):
                written[param] = Main(shard, state)
        return written

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load groups and states in torch's form, also those saved by the torch.optim class of the same name.

        Pre-hooks run first, as in torch. Unlike in torch:

        - If groups have names here and in `state_dict` (`param_names`), and the same ones in another order, parameters
          and their groups are found by name, and one line is logged. Other states are loaded by position, as in torch,
          and a warning names the first pair of names that differs.
        - Groups keep their own `param_names`. Those of the `state_dict` are taken where a group has none.
        - Every state keeps its dtype. A saved `main` is also written to its parameter.

        Raises StateDictError, and changes nothing, if a state is missing, unknown or of another shape, or was saved
        with an option that is not supported here, or if parameters of one group were saved in groups that differ.
        """
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, loaded)
            loaded = loaded if replaced is None else replaced
        saved_groups = self._in_present_groups(loaded["param_groups"])
        self._load(loaded["state"], groups.saved_in_order(self.param_groups, saved_groups))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _in_present_groups(self, saved: Sequence[ParamGroup]) -> Sequence[ParamGroup]:
        """Saved groups of an earlier release in the groups that this one makes."""
        return saved

    def _restarts(self, group: ParamGroup, param: Tensor, values: Mapping[str, Any]) -> bool:
        """Whether an earlier release saved `values` for `param` by a rule that no longer updates it."""
        return False

    def _saved_rule(self, group: ParamGroup, param: Tensor, values: Mapping[str, Any]) -> Rule:
        """The rule of `param` once `values` are its state, in a loaded group."""
        return self.rule_of(group, param)

    def _load(self, states: Mapping[Any, Mapping[str, Any]], saved_groups: Sequence[ParamGroup]) -> None:
        """Load saved states by the indices in `saved_groups`, which are in the order of this optimizer's parameters."""
        new_groups = groups.loaded_groups(self.param_groups, saved_groups, self.defaults)
        groups.warn_of_other_hooks(self.param_groups, saved_groups, self.hooks)
        indices = [index for group in saved_groups for index in group["params"]]
        saved_states = []
        restarted = []
        for index, (group, param) in zip(indices, params_with_groups(new_groups), strict=True):
            if not states.get(index):
                continue
            rule = self._saved_rule(group, param, states[index])
            matrix = self.matrix_of(group, param)
            name = self._named(group, param)
            values = states[index]
            if self._restarts(group, param, values):
                restarted.append(name)
                state = init_state(rule, self.mains, param, matrix, of=name)
                fresh = saved_state(codecs_of(rule), param, state)
                values = {**fresh, MAIN: values[MAIN]} if MAIN in values else fresh
            saved_states.append(Saved(rule, self.mains, param, matrix, values, name))
        try:
            for own, group in zip(self.param_groups, new_groups):
                self._check_group(group)
                self._check_loaded(own, group)
        except ValueError as error:
            raise StateDictError(f"the state_dict has {error}") from None
        for saved in saved_states:
            saved.check()  # all before the first one is loaded, so that an error changes nothing
        if restarted:
            logger.warning(
                "load_state_dict: %s: biases and other stacks of vectors, which the matrix rule updated when this "
                "state was saved, start without its state", ", ".join(restarted),
            )  # fmt: skip
        loaded_states = defaultdict(dict, {saved.param: saved.load_() for saved in saved_states})
        self.__setstate__({"state": loaded_states, "param_groups": new_groups})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_rows": None})
        self.defaults.pop("differentiable", None)  # added by torch; no group has it
        self._entries = self._new_entries()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("rule", "mains", "max_norm", "grad_norm", "hooks", "capturable")
        own = {name: getattr(self, name) for name in kept}
        return super().__getstate__() | own | {"_rows": None, "_on_device": None, "_captured_at": []}

    def _update_(self) -> None:
        self._adopt_changes()
        if not any(self.state.values()) and only_makes_state(self.param_groups):
            self._rows = self._new_rows()
            return
        # GradScaler sets these for one step and deletes them afterwards. Absent: scale 1, no overflow.
        found_inf = getattr(self, "found_inf", None)
        loss_scale = getattr(self, "grad_scale", None)
        if self.capturable and self._on_device is None:
            self._on_device = GroupsOnDevice(self.rules)
        if self._on_device is not None:
            self._on_device.begin_step()
        elif found_inf is not None and bool(found_inf):
            self.grad_norm = None if self.max_norm is None else math.inf
            return
        params = params_of(self.param_groups)
        scale, skip, norm = scaling_of(params, found_inf=found_inf, loss_scale=loss_scale, max_norm=self.max_norm)
        self.grad_norm = norm
        if not self.capturable:
            scale = float(scale)
            skip = None
            self.grad_norm = None if norm is None else float(norm)
            if self.grad_norm is not None and not self.grad_norm < math.inf:
                return
        self._check_grads()
        for sweep, batches in self._batches().items():
            sweep.rule.update_(batches, grad_scale=scale, skip=skip)
        if self._rows is not None:
            self._rows.count(skip)
        if self._on_device is not None and self._on_device.is_capturing:
            self._captured_at = addresses(params)

    def _check_grads(self) -> None:
        """Raise before anything is written for gradients that a rule refuses."""

    def _batches(self) -> SweepBatches:
        """The works of this step by rule and device, in batches by parameter group and step."""
        rows = self._current_rows()
        if rows is None:
            rows = self._rows = self._new_rows()
        rows.mains.begin_update_()  # main values take what other code wrote to the parameters
        return rows.batches(self._hyper_of)

    def _new_rows(self) -> Rows:
        followed = {} if self._rows is None else self._rows.mains.followed
        return Rows(self.param_groups, self.state, self._member_of, steps_on_device=self.capturable, followed=followed)

    def _current_rows(self) -> Rows | None:
        """The rows of the last step, if they are up to date."""
        rows = self._rows
        return rows if rows is not None and rows.hold(self.param_groups, self.state) else None

    def _hyper_of(self, group: int, sweep: Sweep, step: int | Tensor) -> Hyper:
        of_step = self.param_groups
        if self._on_device is not None:
            of_step = self._on_device.of(sweep.device, of_step)
        return self._hyper(of_step[group], sweep.rule, step)

    def _hyper(self, group: ParamGroup, rule: Rule, step: int | Tensor) -> Hyper:
        """The hyper-parameters that `rule` reads from `group` in this step."""
        return read_hyper(group, step=step, own=getattr(rule, "hyper_names", ()))

    def _member_of(self, position: int, group: int, param: Tensor, first: int) -> Member:
        """The row entry of `param`, whose state is created if it has none."""
        of_group = self.param_groups[group]
        rule = self._hooked_rule_of(of_group, param)
        matrix = self.matrix_of(of_group, param)
        state = self.state[param]
        if not state:
            name = self._named(of_group, param)
            state.update(init_state(rule, self.mains, param, matrix, of=name))
        spans = spans_of(rule, self.mains, param, first)
        return Member(position, group, param, state, rule, matrix, spans)

    def _name_of(self, group: ParamGroup, param: Tensor) -> str:
        """The name of a parameter; empty if it is not known."""
        names: dict[Tensor, str] = dict(zip(group["params"], group.get("param_names", ())))
        return names.get(param, "")

    def _named(self, group: ParamGroup, param: Tensor) -> str:
        """The parameter in messages."""
        name = self._name_of(group, param)
        return f"{repr(name) if name else 'a parameter'} of shape {tuple(param.shape)}"
