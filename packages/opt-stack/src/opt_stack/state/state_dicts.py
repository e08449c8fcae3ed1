"""State dicts of an optimizer: torch's form of one rank's state, and a sharded form that loads on any layout."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.state import NO_OVERRIDE, Conflict, place_
from opt_distributed.comm import Alone, Comm, Roles, agreed
from opt_distributed.saving import check_state, load_state_, read_state
from opt_distributed.step import Stepper
from opt_kernels.hooks import bare
from opt_kernels.rules import Rule
from opt_paramgroups import ParamId
from opt_stack.planning.plan import Plan
from opt_stack.rules.entries import check_choices, check_loaded_numbers, warn_of_other_choices
from opt_stack.state.evaluation import Evaluation
from opt_stack.state.loaded_weights import LoadedWeights
from opt_stack.state.local_state import (
    check_form,
    match_groups,
    match_state,
    packed_groups,
    saved_scaler,
    set_group_,
)
from opt_stack.state.offload import StateOffload
from opt_stack.state.sharded_state import Described, Held, axes_of, describe_params, load_sharded_, sharded_state

VERSION = 1  # of `state_dict`
MAIN_VALUES = ("saved", "parameters")  # where `load_state_dict` may take main values from
EVALUATING = "evaluating"  # in a state_dict of evaluation mode


class _Matched(NamedTuple):
    """A state dict in the order of the optimizer that loads it."""

    groups: list[Mapping[str, Any]]  # one for each of `param_groups`
    by_id: dict[ParamId, Mapping[str, Any]]
    scaler: dict[str, Any]


class StateDicts(torch.optim.Optimizer):
    """The state dicts of `Optimizer`."""

    stepper: Stepper
    evaluation: Evaluation
    offload: StateOffload
    loaded_weights: LoadedWeights
    plan: Plan
    _layout_id: str
    _rank_local: bool
    roles: Roles
    _everyone: Comm
    _ids: Sequence[ParamId]
    _held: Mapping[ParamId, Held]
    _described: list[list[Described]] | None = None  # since the last `sharded_state_dict`

    def check_ready(self, what: str) -> None:
        """Raise RuntimeError in evaluation mode, or while the state is on the host; `what` names the call."""
        self.evaluation.check_training(what)
        self.offload.check_restored(what)

    @property
    def has_rank_local_state(self) -> bool:
        """Whether ranks keep state that others do not, other than as DTensors. The same on every rank."""
        return self._rank_local

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, `state` by parameter index and `param_groups`, with loss scale, version and
        layout. Tensors are live, as in torch.

        State of DTensor parameters is DTensors, so `torch.distributed.checkpoint.state_dict` saves it and loads it on
        other world sizes. State of plain parameters is this rank's part and loads on the same layout only. If ranks
        hold different parts, the functions of `torch.distributed.checkpoint.state_dict` are refused, because they
        would keep only one rank's part.

        In evaluation mode, it also has copies of the trained weights, because a model saved then holds the evaluation
        weights. Loading such a state begins evaluation mode, and `train()` restores the trained weights.
        """
        self.offload.check_restored("state_dict()")
        self.stepper.warn_of_unread("state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict: dict[str, Any] = {
            "version": VERSION,
            "state": self._read_all(),
            "param_groups": packed_groups(self.param_groups, rank_local=self._rank_local),
            "grad_scaler": self.stepper.scaler.state_dict(),
            "layout": {self._layout_id: True},  # a key, since DCP takes equal keys of several ranks for replicas
        }
        if self.evaluation.is_evaluating:
            state_dict[EVALUATING] = True
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = _replaced(after(self, state_dict), state_dict)
        return state_dict

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        on_conflict: Conflict = "error",
        override: Mapping[str, Any] = NO_OVERRIDE,
        main_values: Literal["saved", "parameters"] = "saved",
    ) -> None:
        """Load `state_dict`. All of it is validated before anything changes; fp32 state stays fp32.

        Accepts a `state_dict` of this class, one of torch's own optimizers, or what `opt_checkpoint.load` returned for
        `sharded_state_dict`. Loading is collective for a sharded state, with fp8 parameters, and where ranks hold
        different parts of the state: parameters are published from the loaded main values. A parameter without state in
        one of torch's state dicts counts as never stepped. The same holds in a sharded state for a parameter whose
        state was not saved, or was saved by another rule: it keeps its group's hyper-parameters.

        Args:
            state_dict: the state to load.
            on_conflict: for a sharded state, if parameters of one group were saved with different hyper-parameters:
                `"error"` raises, `"saved"` uses those of the group's first parameter, `"current"` keeps the group's.
            override: for a sharded state, hyper-parameters that every group gets instead of the saved ones, such as
                `{"lr": 1e-4}`.
            main_values: `"parameters"` lets a 16-bit run start its main values from its rounded parameters if an fp32
                run saved the state, which then has no main values.

        Raises:
            ValueError: `state_dict` is not a state dict or has a newer version; its parameters, groups, layout, rule or
                shapes differ; it has only a part of a parameter's state; or a hyper-parameter is not a valid number.
        """
        self.check_ready("load_state_dict()")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _replaced(before(self, dict(state_dict)), state_dict)
        if isinstance(state_dict, Mapping) and "groups" in state_dict:
            self._load_sharded(state_dict, on_conflict=on_conflict, override=override)
        elif on_conflict != "error" or override:
            raise ValueError(
                f"on_conflict={on_conflict!r}, override={dict(override)}: both are for a sharded state only; after "
                "loading this state_dict, set hyper-parameters in optimizer.param_groups"
            )
        elif main_values not in MAIN_VALUES:
            raise ValueError(f"main_values={main_values!r}; {' and '.join(map(repr, MAIN_VALUES))} are allowed")
        else:
            self._load_local(state_dict, needs_mains=main_values == "saved")
        self.stepper.accept_loaded(self.param_groups)
        self.stepper.publish_set_()
        self.loaded_weights.note_state()
        if state_dict.get(EVALUATING):
            self.evaluation.resume_(self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_sharded(
        self, state_dict: Mapping[str, Any], *, on_conflict: Conflict, override: Mapping[str, Any]
    ) -> None:
        if self._described is None:
            raise ValueError(
                "load_state_dict of a sharded state needs the sharded_state_dict that it was loaded into; call "
                "optimizer.sharded_state_dict first and pass it to opt_checkpoint.load"
            )
        load_sharded_(
            state_dict,
            self._described,
            self.param_groups,
            self._held,
            self.stepper.scaler,
            self._everyone,
            on_conflict=on_conflict,
            override=override,
            rules=self._rules(),
        )

    def _read_all(self) -> dict[int, dict[str, Tensor]]:
        """Return this rank's state by parameter index."""
        with self.loaded_weights.own_writes(), self.evaluation.with_trained_weights():
            return {i: self._read(id) for i, id in enumerate(self._ids) if id in self._held}

    def _read(self, id: ParamId) -> dict[str, Tensor]:
        unit, piece = self._held[id]
        return read_state(unit, piece, copies_main=self.evaluation.replaces_weights_of(unit))

    @property
    def _load_peers(self) -> Comm:
        """The ranks that set main values together, because these are published, or a world of one."""
        is_shared = self._rank_local or self.plan.config.fp8_recipe is not None
        return self._everyone if is_shared else Alone()

    def _load_local(self, state_dict: Mapping[str, Any], *, needs_mains: bool) -> None:
        loaded = agreed(self._load_peers, lambda: self._matched(state_dict, needs_mains=needs_mains))
        for id, (unit, piece) in self._held.items():
            load_state_(unit, piece, loaded.by_id.get(id, {}))
        for group, saved in zip(self.param_groups, loaded.groups, strict=True):
            warn_of_other_choices(group, saved)
            set_group_(group, saved)
        if loaded.scaler:
            self.stepper.scaler.load_state_dict(loaded.scaler)

    def _matched(self, state_dict: Mapping[str, Any], *, needs_mains: bool) -> _Matched:
        """Match `state_dict` with this optimizer. Raises ValueError if any of it cannot be loaded; writes nothing."""
        check_form(state_dict, version=VERSION, layout_id=self._layout_id)
        groups = match_groups(state_dict, self.param_groups)
        by_id = match_state(state_dict, self.param_groups, groups)
        check_loaded_numbers(zip(self.param_groups, groups), self._rules())
        for group, saved in zip(self.param_groups, groups, strict=True):
            check_choices(group, saved, self._rules())
        for id, (unit, piece) in self._held.items():
            check_state(unit, piece, by_id.get(id, {}), needs_main=needs_mains and "version" in state_dict)
        return _Matched(groups, by_id, saved_scaler(state_dict, self.stepper.scaler))

    def _rules(self) -> dict[str, Rule]:
        """Return the rules of this rank's units, by the `optimizer` of their groups."""
        return {unit.name.split("/")[0]: bare(unit.rule) for unit in self.stepper.units}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state for `opt_checkpoint.save` and `load`; it loads on any layout, world size and precision.

        Collective. Tensors share the optimizer's memory where possible, so a load writes in place; pass the result of
        the load to `load_state_dict` to complete it.

        Args:
            model_sharded_state_dict: the model's sharded state, with the parameters themselves (`keep_vars=True`) as
                data.
            is_loading: accepted for Megatron-Core's callers and ignored: state exists from construction.
            metadata: accepted for Megatron-Core's callers and ignored: the one format reshards along every axis.

        Tensors that `sharded_model` described without groups are placed here: tensor-parallel parts, experts and
        pipeline stages get their position in the whole model, in `model_sharded_state_dict` itself.

        Raises:
            ValueError: a parameter is not in `model_sharded_state_dict`; or, on every rank, it is unknown which part of
                the model a rank has.
        """
        self.check_ready("sharded_state_dict()")
        self.stepper.warn_of_unread("sharded_state_dict()")
        place_(model_sharded_state_dict, axes_of(self.roles))
        self._described = describe_params(model_sharded_state_dict, self.param_groups)
        return sharded_state(self._described, self.param_groups, self._held, self.stepper.scaler, self._everyone)


def _replaced(found: Any, state_dict: Any) -> Any:
    """Return what a hook returned, or the state dict if it returned None."""
    return state_dict if found is None else found
