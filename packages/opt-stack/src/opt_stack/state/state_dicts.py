"""State dicts of an optimizer: torch's form of one rank's state, and a sharded form that loads on any layout."""

from collections import OrderedDict
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple

from torch import Tensor

from opt_checkpoint.dist_checkpointing.megatron import Compared
from opt_checkpoint.state import EMPTY, Conflict
from opt_distributed.buffers import Params
from opt_distributed.comm import Alone, Comm, agreed
from opt_distributed.pieces import local
from opt_distributed.saving import PieceState, check_state, load_state_, read_state, restart_
from opt_kernels.params import HELD, RULE, Group
from opt_paramgroups import ParamGroup, ParamId, dtensor_layout, plain_name
from opt_stack.rules.entries import NOT_LOADED, ParamGroups, warn_of_other_choices
from opt_stack.state import AnyState
from opt_stack.state.megatron_state import (
    check_mains,
    compare_mains,
    from_megatron_state,
    has_distributed_form,
    own_values,
)
from opt_stack.state.regrouped import regroup, renamed
from opt_stack.state.sharded_state import ShardedStates, saved_scale

VERSION = 1  # of `state_dict`
MAIN_VALUES = ("saved", "parameters")  # where `load_state_dict` may take main values from
EVALUATING = "evaluating"  # in a state_dict of evaluation mode
NUMBERS = ("lr", "weight_decay", "eps", "momentum")  # keys of a saved group that must be numbers


def param_name(id: ParamId) -> str:
    """Return a parameter's name in a state dict; in the first chunk, its name in the module."""
    return id.name if id.chunk == 0 else f"model{id.chunk}.{id.name}"


def find_values(state_dict: AnyState, params: Params) -> dict[ParamId, Tensor]:
    """Return the value of each parameter in `state_dict`; for a DTensor, this rank's part.

    Raises:
        ValueError: a parameter is missing, or has another shape or layout. All parameters of the model are checked, not
            only those whose state lives on this rank, so all ranks raise for one state dict.
    """
    found = {}
    keys_of: dict[int, dict[str, str]] = {}  # of each chunk: its keys by their names without wrappers
    for id, param in params.items():
        chunks = [f"model{id.chunk}", f"model_{id.chunk}"]
        if id.chunk == 0:
            chunks.append("model")
        names = next((state_dict[chunk] for chunk in chunks if isinstance(state_dict.get(chunk), Mapping)), state_dict)
        if id.chunk not in keys_of:
            keys_of[id.chunk] = {plain_name(key): key for key in names if isinstance(key, str)}
        keys = keys_of[id.chunk]
        key = keys.get(id.name, keys.get(f"module.{id.name}"))
        if key is None:
            raise ValueError(
                f"state_dict lacks {id.name!r} of model chunk {id.chunk}; it must hold every trained parameter"
            )
        value = names[key]
        where = f"state_dict's {id.name!r} of model chunk {id.chunk}"
        if not isinstance(value, Tensor):
            raise ValueError(f"{where} is a {type(value).__name__}; it must be a tensor of shape {tuple(param.shape)}")
        if value.shape != param.shape:
            raise ValueError(f"{where} has shape {tuple(value.shape)}; the parameter's is {tuple(param.shape)}")
        if dtensor_layout(value) != dtensor_layout(param):
            raise ValueError(
                f"{where} has a different layout than the parameter; pass the result of model.state_dict()"
            )
        found[id] = local(value)
    return found


class Matched(NamedTuple):
    """The groups and states of a state dict, for those of an optimizer."""

    groups: list[Group]  # the saved group of each group
    states: dict[ParamId, Group]
    moved: Mapping[str, bool]  # as `Regrouped.moved`


class StateDicts(ShardedStates):
    """The state dicts of `Optimizer`."""

    @property
    def has_rank_local_state(self) -> bool:
        """Whether ranks keep state that others do not, other than as DTensors. The same on every rank."""
        return self._rank_local

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, `state` by parameter index and `param_groups`, with loss scale, version and
        layout. Tensors are live, as in torch, except main values of parameters that other code wrote: those follow it.

        State of DTensor parameters is DTensors, so `torch.distributed.checkpoint.state_dict` saves it and loads it on
        other world sizes. State of plain parameters is this rank's part and loads on the same layout only. If ranks
        hold different parts, the functions of `torch.distributed.checkpoint.state_dict` are refused, because they
        would keep only one rank's part.

        In evaluation mode, it also has copies of the trained weights, because a model saved then holds the evaluation
        weights. Loading such a state begins evaluation mode, and `train()` restores the trained weights.
        """
        self.offload.check_restored("state_dict()")
        if self.evaluation.is_evaluating:
            self.complete_params()
        self.stepper.warn_of_unread("state_dict()")
        self.recorder.write("state was saved")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        stale = set() if self.evaluation.is_evaluating else {piece.id for piece in self.loaded_weights.stale_pieces()}
        groups = packed_groups(self.param_groups, rank_local=self._rank_local)
        state = {}  # of this rank, by parameter index
        evaluation = self.evaluation
        with self.loaded_weights.writing_without_step(), evaluation.with_trained_weights():
            for index, id in enumerate(self._ids):
                if id in self._held:
                    unit, piece = self._held[id]
                    unit.averages.follow_until_begun_(piece)
                    # The main values are in the parameter, which shows the evaluation weights again after this.
                    copies_main = evaluation.is_evaluating and evaluation.keeps_weights_of(unit)
                    state[index] = read_state(unit, piece, copies_main=copies_main, follows=id in stale)
        state_dict: dict[str, Any] = {
            "version": VERSION,
            "state": state,
            "param_groups": groups,
            **self._verdict_state(),
            "layout": {self._layout_id: True},  # a key, since DCP takes equal keys of several ranks for replicas
        }
        if self.evaluation.is_evaluating:
            state_dict[EVALUATING] = True
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(
        self,
        state_dict: AnyState,
        *,
        on_conflict: Conflict = "error",
        override: Group = EMPTY,
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
        self.complete_params()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, dict(state_dict))
            state_dict = state_dict if replaced is None else replaced
        if isinstance(state_dict, Mapping) and own_values(state_dict):
            state_dict = self._from_megatron(state_dict)
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
        self.stepper.accept_loaded_groups(self.param_groups)
        self.stepper.publish_main_values_()
        self.loaded_weights.note_state_load()
        if state_dict.get(EVALUATING):
            self.evaluation.begin_(self.param_groups, self.complete_params, was_loaded=True)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _from_megatron(self, loaded: AnyState) -> dict[str, Any]:
        """Return what Megatron-Core's `load` returned in the form of `opt_checkpoint.load`. Collective."""
        described = self._described
        names = () if described is None else described.names_on_all_ranks
        state = agreed(self._everyone, lambda: from_megatron_state(loaded, self.param_groups, names))

        def compare() -> list[Compared]:
            saved = () if described is None else described.saved
            weights = {at: local(piece.param).detach().reshape(-1)[piece.of_param] for _, at, (_, piece) in saved}
            return compare_mains(state["state"], weights)

        if has_distributed_form(loaded):
            compared = agreed(self._everyone, compare)
            check_mains([end for of_rank in self._everyone.gather_objects(compared) for end in of_rank])
        return state

    @property
    def _load_peers(self) -> Comm:
        """The ranks that set main values together, because these are published, or a world of one."""
        is_shared = self._rank_local or self.plan.config.fp8_recipe is not None
        return self._everyone if is_shared else Alone()

    def _load_local(self, state_dict: AnyState, *, needs_mains: bool) -> None:
        def checked() -> tuple[Matched, dict[str, Any]]:
            check_form(state_dict, layout_id=self._layout_id)
            matched = match(state_dict, self.param_groups)
            needs_main = needs_mains and "version" in state_dict
            pairs = list(zip(self.param_groups, matched.groups, strict=True))
            self._check_groups(pairs, pairs)
            for id, (unit, piece) in self._held.items():
                if matched.moved.get(param_name(id), True):
                    check_state(unit, piece, matched.states.get(id, {}), needs_main=needs_main, leaves_averages=True)
            return matched, saved_scale(state_dict, self.stepper)

        (groups, by_id, moved), scale = agreed(self._load_peers, checked)
        restarted = {name for name, has_same_rule in moved.items() if not has_same_rule}
        of_held = {id: PieceState(by_id.get(id, {})) for id in self._held}  # copies and pickles are other dicts
        self._warn_of_averages(of_held, self._load_peers)
        for id, (unit, piece) in self._held.items():
            load = restart_ if param_name(id) in restarted else load_state_
            load(unit, piece, by_id.get(id, {}))
        self._warn_of_regrouped(moved)
        for group, saved in zip(self.param_groups, groups, strict=True):
            warn_of_other_choices(group, saved)
            set_group_(group, saved)
        self._load_verdicts(state_dict, scale)


# --- torch's form -----------------------------------------------------------------------------------------------------


class _RankLocalGroup(dict[str, Any]):
    """A packed group of a state dict that holds only this rank's part. It pickles as an OrderedDict.

    `torch.distributed.checkpoint.state_dict` replaces `params` by names, which do not distinguish the parts of ranks.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params" and any(isinstance(name, str) for name in value):
            raise ValueError(
                "get_optimizer_state_dict: this rank holds a part of the optimizer's state, and the parts of several "
                "ranks cannot be told apart by parameter name; use optimizer.sharded_state_dict with opt_checkpoint to "
                "save and load on any layout, or save optimizer.state_dict() on every rank to load on the same layout"
            )
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def packed_groups(groups: ParamGroups, *, rank_local: bool) -> list[ParamGroup]:
    """Return groups as torch saves them: `params` are indices over all groups, `param_names` the names at these.

    `param_ids` is None: torch's flattened form needs every key of a group, but nothing reads this one.
    """
    packed = []
    start = 0
    for group in groups:
        names = [param_name(id) for id in group["param_ids"]]
        kept = {key: group[key] for key in group if key not in HELD}
        indices = list(range(start, start + len(names)))
        of_group = {**kept, "param_ids": None, "params": indices, "param_names": names}
        packed.append(_RankLocalGroup(of_group) if rank_local else of_group)
        start += len(names)
    return packed


def check_form(state_dict: Any, *, layout_id: str) -> None:
    """Raise ValueError if `state_dict` is not a state dict, has a newer version, or was saved on another layout."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"state_dict needs 'state' and 'param_groups'; it has {found or 'nothing'}")
    if (version := state_dict.get("version", VERSION)) != VERSION:
        raise ValueError(f"state_dict has version {version!r}; this release reads version {VERSION} only")
    layouts = _layouts(state_dict) if "layout" in state_dict else [layout_id]
    if layout_id not in layouts:
        raise ValueError(
            f"state_dict was saved on layout {'; '.join(layouts)}, but this optimizer has {layout_id}; use "
            "sharded_state_dict with opt_checkpoint, which loads on any layout"
        )


def _layouts(state_dict: Group) -> list[str]:
    layouts = state_dict.get("layout", ())
    if isinstance(layouts, str):
        return [layouts]
    return list(map(str, layouts))


def match(state_dict: Group, groups: ParamGroups) -> Matched:
    """Return the saved group of each of `groups`, and the saved state of each parameter.

    Groups are matched by name if saved groups have names, else by position; parameters in the same way inside a group.
    Parameters that earlier releases put into other groups are in their present ones (`regroup`).

    Raises ValueError if groups, their sizes or rules differ, a hyper-parameter is not a number, a parameter is not in
    its saved group, or a state dict of this class has state of some parameters but not of this one.
    """
    names_of = [[param_name(id) for id in group["param_ids"]] for group in groups]
    saved, moved = regroup(renamed(state_dict["param_groups"], groups), groups, names_of)
    state = state_dict["state"]
    if len(saved) != len(groups):
        raise ValueError(f"state_dict has {len(saved)} parameter groups, but this optimizer has {len(groups)}")
    # `torch.distributed.checkpoint.state_dict` makes groups in this optimizer's order, with names for indices.
    is_by_name = any(isinstance(index, str) for group in saved for index in group["params"])
    if all("name" in group for group in saved) and not is_by_name:
        by_name = {group["name"]: group for group in saved}
        if missing := [group["name"] for group in groups if group["name"] not in by_name]:
            raise ValueError(f"state_dict has no group {missing[0]!r}; it has {', '.join(map(repr, by_name))}")
        saved = [by_name[group["name"]] for group in groups]
    is_complete = "version" in state_dict and state and any("replicated" in text for text in _layouts(state_dict))
    found = {}
    for ours, theirs, names in zip(groups, saved, names_of, strict=True):
        _check_alike(ours, theirs)
        saved_names = names if is_by_name else theirs.get("param_names", names)
        index = dict(zip(saved_names, theirs["params"], strict=True))
        for id, name, param in zip(ours["param_ids"], names, ours["params"], strict=True):
            if name not in index:
                raise ValueError(f"parameter {name!r} of group {ours['name']!r} is not in the saved group")
            if index[name] in state:
                found[id] = state[index[name]]
            elif is_complete and param.numel():
                raise ValueError(f"state_dict has state of other parameters, but not of {name!r}; it is incomplete")
    return Matched(saved, found, moved)


def _check_alike(ours: Group, theirs: Group) -> None:
    """Raise ValueError if a saved group has another size or rule, or a hyper-parameter that is not a number."""
    group = f"group {ours['name']!r}"
    num_params = len(ours["params"])
    if num_params != len(theirs["params"]):
        raise ValueError(f"{group} has {num_params} parameters, but the saved group {len(theirs['params'])}")
    if theirs.get(RULE, ours[RULE]) != ours[RULE]:
        raise ValueError(
            f"{group} was saved by optimizer={theirs[RULE]!r}, but is updated by optimizer={ours[RULE]!r}, for "
            "which state of the same name may mean something else; build the optimizer with "
            f"{theirs[RULE]!r}, or load a sharded_state_dict, which starts from that state with a warning"
        )
    for key in NUMBERS:
        value = theirs.get(key)
        if value is not None and not isinstance(value, Real | Tensor):
            raise ValueError(f"{key}={value!r} of the saved {group}: must be a number or a tensor")


def set_group_(group: ParamGroup, saved: Group) -> None:
    """Copy a saved group's hyper-parameters to `group`, but not `NOT_LOADED`. Tensors are written in place."""
    for key, value in saved.items():
        if key in HELD or key in NOT_LOADED:
            continue
        if isinstance(group.get(key), Tensor):
            group[key].fill_(float(value))
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value
