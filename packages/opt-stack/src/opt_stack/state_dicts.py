"""What an optimizer saves and loads: torch's form of one rank's state, and a sharded one for any layout."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.state.groups import NO_OVERRIDE, Conflict
from opt_distributed.comm.collectives import Alone, Comm, agreed
from opt_distributed.step.state import check_state, load_state_, read_state
from opt_distributed.step.stepper import Stepper
from opt_kernels.hooks import bare
from opt_kernels.rules.base import Rule
from opt_paramgroups import ParamId
from opt_stack.entries import check_loaded_numbers
from opt_stack.evaluation import Evaluation
from opt_stack.hooks import warn_of_other_hooks
from opt_stack.local_state import (
    check_form,
    match_groups,
    match_state,
    packed_groups,
    saved_scaler,
    set_group_,
)
from opt_stack.offload import StateOffload
from opt_stack.plan import Plan
from opt_stack.sharded_state import Described, Held, describe_params, load_sharded_, sharded_state

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
    plan: Plan
    _layout_id: str
    _rank_local: bool
    _everyone: Comm
    _ids: Sequence[ParamId]
    _held: Mapping[ParamId, Held]
    _described: list[list[Described]] | None = None  # since the last `sharded_state_dict`

    def check_ready(self, what: str) -> None:
        """Raises RuntimeError where parameters hold averaged weights, or the state is on the host."""
        self.evaluation.check_training(what)
        self.offload.check_restored(what)

    @property
    def has_rank_local_state(self) -> bool:
        """Whether ranks keep state that others do not, other than as DTensors. The same on every rank."""
        return self._rank_local

    def state_dict(self) -> dict[str, Any]:
        """torch's form, `state` by parameter index and `param_groups`, with loss scale, version and layout.

        State of DTensor parameters is DTensors, so `torch.distributed.checkpoint.state_dict` saves it and loads it on
        other world sizes. State of plain parameters is this rank's part and loads on the same layout only; where
        ranks hold different parts, the functions of `torch.distributed.checkpoint.state_dict` are refused, since they
        would keep one rank's. Live tensors, as torch's own.

        In evaluation mode the trained weights are in it as well, as copies, since a model that is saved then holds
        averaged ones. Loading it begins evaluation mode, so that `train()` restores them.
        """
        self.offload.check_restored("state_dict()")
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
        """Sets everything `state_dict` holds; validated whole before anything changes. fp32 state stays fp32.

        Takes what `state_dict` gave, what torch's own optimizers give, or what `opt_checkpoint.load` made of
        `sharded_state_dict`; that all ranks load together. In torch's own, a parameter without state is one that was
        never stepped. In a loaded one, so is a parameter whose state was not saved, or by another rule: it keeps its
        group's hyper-parameters.

        Args:
            state_dict: see above.
            on_conflict: for a loaded sharded state, where parameters that share a group were saved with different
                hyper-parameters: an error, the `"saved"` ones of the group's first parameter, or the `"current"` ones.
            override: for a loaded sharded state: hyper-parameters that get this value in every group, whatever was
                saved, as `{"lr": 1e-4}`.
            main_values: `"parameters"` lets a 16-bit run start its main values from its rounded parameters, where an
                fp32 run saved the state and so no main values.

        Raises:
            ValueError: not a state dict, or of a newer version; other parameters or groups; another layout; state of
                another rule or shape, or a part of one; hyper-parameters that are no numbers, or contradict each other.
        """
        self.check_ready("load_state_dict()")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _replaced(before(self, dict(state_dict)), state_dict)
        if isinstance(state_dict, Mapping) and "groups" in state_dict:
            self._load_sharded(state_dict, on_conflict=on_conflict, override=override)
        elif on_conflict != "error" or override:
            raise ValueError(
                f"on_conflict={on_conflict!r}, override={dict(override)}: these are for a loaded sharded state; after "
                "another, set what is to differ in param_groups"
            )
        elif main_values not in MAIN_VALUES:
            raise ValueError(f"main_values={main_values!r}; {' and '.join(map(repr, MAIN_VALUES))} are allowed")
        else:
            self._load_local(state_dict, needs_mains=main_values == "saved")
        self.stepper.publish_set_()
        if state_dict.get(EVALUATING):
            self.evaluation.resume_(self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_sharded(
        self, state_dict: Mapping[str, Any], *, on_conflict: Conflict, override: Mapping[str, Any]
    ) -> None:
        if self._described is None:
            raise ValueError(
                "a loaded sharded state needs the sharded_state_dict that it was loaded into: make it first"
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
        """This rank's state by the parameters' indices."""
        with self.evaluation.with_trained_weights():
            return {i: self._read(id) for i, id in enumerate(self._ids) if id in self._held}

    def _read(self, id: ParamId) -> dict[str, Tensor]:
        unit, piece = self._held[id]
        return read_state(unit, piece, copies_main=self.evaluation.replaces_weights_of(unit))

    def _load_local(self, state_dict: Mapping[str, Any], *, needs_mains: bool) -> None:
        # With fp8 parameters the load ends in collectives, in which the other ranks would wait for one that refused.
        peers = self._everyone if self.plan.config.fp8_recipe is not None else Alone()
        loaded = agreed(peers, lambda: self._matched(state_dict, needs_mains=needs_mains))
        for id, (unit, piece) in self._held.items():
            load_state_(unit, piece, loaded.by_id.get(id, {}))
        for group, saved in zip(self.param_groups, loaded.groups, strict=True):
            warn_of_other_hooks(group["name"], group, saved)
            set_group_(group, saved)
        if loaded.scaler:
            self.stepper.scaler.load_state_dict(loaded.scaler)

    def _matched(self, state_dict: Mapping[str, Any], *, needs_mains: bool) -> _Matched:
        """Match `state_dict` with this optimizer. Raises ValueError if any of it cannot be loaded; writes nothing."""
        check_form(state_dict, version=VERSION, layout_id=self._layout_id)
        groups = match_groups(state_dict, self.param_groups)
        by_id = match_state(state_dict, self.param_groups, groups)
        check_loaded_numbers(zip(self.param_groups, groups), self._rules())
        for id, (unit, piece) in self._held.items():
            check_state(unit, piece, by_id.get(id, {}), needs_main=needs_mains and "version" in state_dict)
        return _Matched(groups, by_id, saved_scaler(state_dict, self.stepper.scaler))

    def _rules(self) -> dict[str, Rule]:
        """The rules of this rank's units by the names that groups have for them."""
        return {unit.name.split("/")[0]: bare(unit.rule) for unit in self.stepper.units}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The state as `opt_checkpoint.save` and `load` take it; loads on any layout, world size and precision.

        All ranks call it together. Tensors share the optimizer's memory where they can, so a load writes in place;
        `load_state_dict` of what the load returns completes it.

        Args:
            model_sharded_state_dict: the model's, with its parameters themselves (`keep_vars=True`) as data.
            is_loading: kept for the reference's callers; state exists from construction, so nothing has to be made.
            metadata: likewise; there is one format, and it reshards along every axis.

        Raises:
            ValueError: a parameter is not in `model_sharded_state_dict`.
        """
        self.check_ready("sharded_state_dict()")
        self._described = describe_params(model_sharded_state_dict, self.param_groups)
        return sharded_state(self._described, self.param_groups, self._held, self.stepper.scaler, self._everyone)


def _replaced(found: Any, state_dict: Any) -> Any:
    """What a hook gave back in place of the state dict, if anything."""
    return state_dict if found is None else found
