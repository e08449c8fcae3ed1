"""The optimizer's state as sharded tensors, for checkpoints that load on any number of ranks."""

import copy
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_checkpoint import (
    KEEP_VARS_HINT,
    CheckpointValueError,
    ScopedState,
    Segment,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    apply_saved_groups,
    get_param_id_to_sharded_param_map,
    groups_to_saved,
)
from opt_checkpoint.state import NO_OVERRIDE, Conflict, ModelAxes, Replica, former_names, from_megatron, place_
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles, agreed
from opt_distributed.pieces import FullySharded
from opt_distributed.saving import (
    MAIN,
    STEP,
    Rows,
    check_loaded,
    kept_states,
    rows_of_part,
    sharded_piece,
    take_loaded_,
)
from opt_distributed.step import Scaler, Stepper
from opt_kernels.hooks import bare
from opt_kernels.params import RULE
from opt_paramgroups import ParamId
from opt_paramgroups.vocabulary import is_regrouped
from opt_stack.diagnosis.recorder import Recorder
from opt_stack.planning.plan import Plan
from opt_stack.rules.entries import OF_RULE, check_choices, check_loaded_numbers, warn_of_other_choices
from opt_stack.state.live import Held, StateOffload
from opt_stack.state.megatron_state import form_of, to_megatron_state
from opt_stack.state.regrouped import continued, is_of_layer_decay, is_same, sentence
from opt_stack.state.weights import Evaluation, LoadedWeights

logger = logging.getLogger("opt_stack")
VERSION = 1
# The run that loads defines its groups; only their hyper-parameters are restored, if the rule is the same.
_OF_THIS_RUN = frozenset({"params", "param_ids", "name", "default_config", "is_expert_parallel", "is_decoupled_lr"})


Pair = tuple[Mapping[str, Any], Mapping[str, Any]]  # a current group and a saved one


class Described(NamedTuple):
    """A parameter of the optimizer and its entry in the model's sharded state."""

    id: ParamId
    name: str  # in the checkpoint's groups; unique over the whole model
    sharded: ShardedTensor | ShardedTensorFactory

    @property
    def is_empty(self) -> bool:
        """Whether the parameter has no elements, and so on most layouts no state. It is not saved on any."""
        return isinstance(self.sharded, ShardedTensor) and not all(self.sharded.global_shape)


class ShardedStates(torch.optim.Optimizer):
    """The sharded state of `Optimizer`, and what its state dicts read."""

    stepper: Stepper
    recorder: Recorder
    evaluation: Evaluation
    offload: StateOffload
    loaded_weights: LoadedWeights
    plan: Plan
    roles: Roles
    wrapped: Sequence[DistributedDataParallel]
    fully_sharded: FullySharded
    _layout_id: str
    _rank_local: bool
    _everyone: Comm
    _ids: Sequence[ParamId]
    _held: Mapping[ParamId, Held]
    _described: list[list[Described]] | None = None  # by group, since the last `sharded_state_dict`
    _names_on_all_ranks: Sequence[Collection[str]] = ()  # likewise

    def check_ready(self, what: str) -> None:
        """Raise RuntimeError in evaluation mode, or while the state is on the host; `what` names the call."""
        self.evaluation.check_training(what)
        self.offload.check_restored(what)

    def complete_params(self) -> None:
        """Wait for gathers under way, and free the copies that FSDP2 has gathered.

        For calls that exchange anything, because a rank that reads a parameter waits until all ranks have started its
        gather; and for those that write parameters, of which such copies and gathers have the values of before.
        """
        for chunk in self.wrapped:
            chunk.finish_param_sync()
        self.fully_sharded.reshard_()

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state for `opt_checkpoint.save` and `load`; it loads on any layout, world size and precision.

        If `model_sharded_state_dict` holds Megatron-Core's own types, as its models give, the result holds them too, in
        the form of its optimizers, for its `dist_checkpointing.save` and `load`; it loads on any layout.

        Collective. Tensors share the optimizer's memory where possible, so a load writes in place; pass the result of
        the load to `load_state_dict` to complete it.

        Args:
            model_sharded_state_dict: the model's sharded state, with the parameters themselves (`keep_vars=True`) as
                data.
            is_loading: whether the result is for a load; only with Megatron-Core's types.
            metadata: of Megatron-Core's callers, only with its types. Its `distrib_optim_sharding_type` becomes
                `fully_reshardable` in a save, and must be that in a load.

        Step counts, groups and codes are copied, so a result of before the last step is refused by a save or load.
        Tensors that `sharded_model` described without groups are placed here: tensor-parallel parts, experts and
        pipeline stages get their position in the whole model, in `model_sharded_state_dict` itself.

        Raises:
            ValueError: a parameter is not in `model_sharded_state_dict`; or, on every rank, it is unknown which part of
                the model a rank has, or a checkpoint of Megatron-Core has another format.
        """
        own_types = from_megatron(model_sharded_state_dict)
        if own_types is model_sharded_state_dict:
            return self._sharded(model_sharded_state_dict)
        form = form_of(self.plan.config, metadata, is_loading=is_loading)
        state = self._sharded(own_types, always_main=form == "distributed")
        own_steps = {at: held.piece.step for _, at, held in self._saved_pieces(self._described or ())}
        steps = {at: step for of_rank in self._everyone.gather_objects(own_steps) for at, step in of_rank.items()}
        groups = [dict(group) for group in self.param_groups]
        return agreed(self._everyone, lambda: to_megatron_state(state, form, groups, steps))

    def _sharded(self, model_sharded_state_dict: Mapping[str, Any], *, always_main: bool = False) -> ScopedState:
        """The sharded state in the types of opt-checkpoint; with `always_main`, main values of fp32 parameters too."""
        self.check_ready("sharded_state_dict()")
        self.complete_params()
        self.stepper.warn_of_unread("sharded_state_dict()")
        self.recorder.write("state was saved")
        place_(model_sharded_state_dict, axes_of(self.roles))
        self._described = described = describe_params(model_sharded_state_dict, self.param_groups)
        self._check_parts(described)
        names = [[own.name for own in of_group] for of_group in described]
        parts = {at: rows_of_part(held.piece, own.sharded) for own, at, held in self._saved_pieces(described)}
        per_rank = self._everyone.gather_objects((names, {at: rows for at, rows in parts.items() if rows}))
        on_all_ranks = [
            list(dict.fromkeys(name for of_rank, _ in per_rank for name in of_rank[at])) for at in range(len(names))
        ]
        rows: dict[str, dict[int, tuple[Segment, ...]]] = defaultdict(dict)
        for at, of_part in (item for _, of_rank in per_rank for item in of_rank.items()):
            rows[at].update(of_part)
        self._names_on_all_ranks = on_all_ranks
        kept = [{key: group[key] for key in group if key not in _OF_THIS_RUN} for group in self.param_groups]
        state = {
            "version": VERSION,
            "state": {
                at: _described_state(own, held, rows[at], always_main=always_main)
                for own, at, held in self._saved_pieces(described)
            },
            "groups": groups_to_saved(kept, on_all_ranks),
            "grad_scaler": self.stepper.scaler.state_dict(),
        }
        copied = self._copied_values()

        def check() -> None:
            if self._copied_values() != copied:
                raise CheckpointValueError(
                    "the optimizer has stepped, or its groups have changed, since sharded_state_dict described it; "
                    "call optimizer.sharded_state_dict before each save and load"
                )

        return ScopedState(state, replaces="optimizer.", check=check)  # one state may hold several optimizers

    def _copied_values(self) -> tuple[Any, ...]:
        """What tells whether the copies in a sharded state are still those of the optimizer: numbers, decoded codes."""
        steps = [held.piece.step for held in self._held.values()]
        numbers = [
            {key: _copied(value) for key, value in group.items() if key not in _OF_THIS_RUN}
            for group in self.param_groups
        ]
        return self.stepper.num_begun, steps, numbers, self.stepper.scaler.state_dict()

    def _load_sharded(
        self, loaded: Mapping[str, Any], *, on_conflict: Conflict = "error", override: Mapping[str, Any] = NO_OVERRIDE
    ) -> None:
        """Set the optimizer from the result of `opt_checkpoint.load`. Collective.

        Raises:
            ValueError: on every rank, if parameters of one group were saved with different hyper-parameters, a
                hyper-parameter or the loss scale is not valid, or a part of a parameter's state was not loaded. Nothing
                has changed, except tensors that the load itself wrote.
        """
        if (described := self._described) is None:
            raise ValueError(
                "load_state_dict of a sharded state needs the sharded_state_dict that it was loaded into; call "
                "optimizer.sharded_state_dict first and pass it to opt_checkpoint.load"
            )
        groups = self.param_groups
        names = [[own.name for own in of_group] for of_group in described]
        stored, regrouped = regroup_described(loaded["groups"], groups, described, self._names_on_all_ranks)
        saved, pairs, moved = match_saved({**loaded, "groups": stored}, groups, names)
        pieces = [(held, loaded["state"].get(at, {})) for _, at, held in self._saved_pieces(described)]
        empty = (own for of_group in described for own in of_group if own.is_empty and own.id in self._held)
        pieces += [(self._held[own.id], {}) for own in empty]

        def checked_scale() -> dict[str, Any]:
            for own, at, held in self._saved_pieces(described):
                check_optional(own, held, loaded["state"].get(at, {}), loaded["groups"])
            for held, values in pieces:
                check_loaded(*held, values)
            untouched = [{key: value for key, value in g.items() if not isinstance(value, Tensor)} for g in groups]
            apply_saved_groups(untouched, names, saved, on_conflict=on_conflict, override=override)
            self._check_groups([*zip(groups, untouched, strict=True)], pairs)
            return saved_scaler(loaded, self.stepper.scaler)

        scale = agreed(self._everyone, checked_scale)
        if regrouped and self.roles.dense.dp.rank == 0:
            logger.warning("%s", sentence(regrouped))
        for (before, after), of_params in moved.items():
            logger.warning("%s continues from the state that %s kept for %s", after, before, ", ".join(of_params))
        for group, then in pairs:
            warn_of_other_choices(group, then)
        apply_saved_groups(groups, names, saved, on_conflict=on_conflict, override=override)
        for held, values in pieces:
            take_loaded_(*held, values)
        if scale:
            self.stepper.scaler.load_state_dict(scale)

    def _check_groups(self, numbers: Sequence[Pair], choices: Sequence[Pair]) -> None:
        """Raise ConfigError if a saved group has numbers that are not valid, or choices of another formula."""
        rules = {
            unit.name.split("/")[0]: bare(unit.rule) for unit in self.stepper.units
        }  # by their groups' `optimizer`
        check_loaded_numbers(numbers, rules)
        for group, saved in choices:
            check_choices(group, saved, rules)

    def _saved_pieces(self, described: Sequence[Sequence[Described]]) -> Iterator[tuple[Described, str, Held]]:
        """Yield the parameters whose state this rank saves, with a unique name: two model chunks may share a key."""
        places: set[str] = set()
        for own in (own for of_group in described for own in of_group):
            if own.id in self._held and not own.is_empty:
                at = f"{own.name}, chunk {own.id.chunk}" if own.name in places else own.name
                places.add(at)
                yield own, at, self._held[own.id]

    def _check_parts(self, described: Sequence[Sequence[Described]]) -> None:
        """Check that parts of one parameter are not all described as the whole of it. Collective.

        Raises:
            ValueError: on every rank, if two tensor-parallel ranks would save their parts as the same tensor.
        """
        local = {  # the part of this rank, by key
            own.sharded.key: self._held[own.id].piece.part
            for own in (own for of_group in described for own in of_group if own.id in self._held)
            if isinstance(own.sharded, ShardedTensor) and own.sharded.local_shape == own.sharded.global_shape
        }
        parts: dict[str, set[str]] = defaultdict(set)
        for of_rank in self._everyone.gather_objects(local):
            for key, part in of_rank.items():
                parts[key] |= {part} - {""}
        for wrong in (key for key, found in parts.items() if len(found) > 1):
            raise ValueError(
                f"parameter {wrong!r} is tensor parallel, and tensor-parallel ranks have different parts of it, "
                "but model_sharded_state_dict describes each part as the whole; pass opt_checkpoint.sharded_model("
                f"model), or ShardedTensor.from_rank_offsets({wrong!r}, param, (partition_dim, rank, ranks), "
                "replica_id=...)"
            )


def _copied(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else copy.deepcopy(value)


def axes_of(roles: Roles) -> ModelAxes:
    """Return the groups over which the model of these roles is divided."""

    def replica(axes: Axes) -> Replica:
        return Replica(axes.inter.rank * axes.dp.size + axes.dp.rank, axes.num_replicas)

    instance = roles.instance if roles.dense.inter.size == 1 else None
    return ModelAxes(
        all_ranks=instance or roles.everyone,
        tp=roles.dense.tp,
        expert_tp=roles.expert.tp,
        ep=roles.ep,
        pp=roles.pp or Alone(),
        dense=replica(roles.dense),
        expert=replica(roles.expert),
    )


def describe_params(
    model_sharded_state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[list[Described]]:
    """Return the parameters of each group. Marks them in `model_sharded_state_dict` as having main values, so that
    `load` restores exact values in another precision.

    Raises:
        ValueError: a parameter is not in the model's sharded state.
    """
    params: list[nn.Parameter] = [param for group in groups for param in group["params"]]
    found = get_param_id_to_sharded_param_map(dict(model_sharded_state_dict), params)
    missing = [index for index in range(len(params)) if index not in found]
    if missing:
        raise ValueError(f"Param id {missing[0]} does not match any model sharded param.{KEEP_VARS_HINT}")
    for sharded in found.values():
        sharded.has_mains = True
    found = {i: s.declared() if isinstance(s, ShardedTensorFactory) else s for i, s in found.items()}
    indices = iter(range(len(params)))
    return [[Described(id, _name(found[i]), found[i]) for id, i in zip(g["param_ids"], indices)] for g in groups]


def _described_state(own: Described, held: Held, rows: Rows, *, always_main: bool) -> dict[str, ShardedBase]:
    """Describe the tensors of a parameter. Another rule may have kept the state of one that is regrouped, so that a
    checkpoint may lack the states of its present rule."""
    unit, piece = held
    states = sharded_piece(unit, piece, own.sharded, rows, always_main=always_main)
    for name, tensor in states.items():
        if isinstance(tensor, ShardedTensor) and name not in (STEP, MAIN) and is_regrouped(piece.param, own.id.name):
            tensor.optional = True
    return states


def check_optional(own: Described, held: Held, values: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError if states are missing that are optional only because another rule may have kept others."""
    unit, piece = held
    missing = [spec.name for spec in kept_states(unit, piece) if spec.name not in values]
    if not missing or STEP not in values or not is_regrouped(piece.param, own.id.name):
        return
    rules = [group.get(RULE) for group, names in zip(saved["groups"], saved["names"], strict=True) if own.name in names]
    if bare(unit.rule).name in rules:
        raise ValueError(
            f"parameter {own.name!r} was saved by optimizer={rules[0]!r}, but the checkpoint lacks its "
            f"{', '.join(missing)}; load another checkpoint, or reset the state of this parameter"
        )


def _name(sharded: ShardedTensor | ShardedTensorFactory) -> str:
    """Return the parameter's key, with its index if several layers or experts are stacked under one key."""
    if isinstance(sharded, ShardedTensor) and sharded.prepend_axis_num:
        return f"{sharded.key}/{'.'.join(map(str, sharded.global_offset[: sharded.prepend_axis_num]))}"
    return sharded.key


def regroup_described(
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    described: Sequence[Sequence[Described]],
    names_on_all_ranks: Sequence[Collection[str]],  # of each group
) -> tuple[dict[str, Any], list[str]]:
    """Return saved groups without the parameters that earlier releases put into other groups, and their names.

    If all parameters of a present group moved, they are in an additional saved group with its factors.
    """
    of_saved = list(saved.get("groups", ()))
    names = list(saved.get("names", ()))
    source = {name: number for number, own in enumerate(names) for name in own}
    moved: list[str] = []
    added: list[tuple[dict[str, Any], list[str]]] = []
    for group, own, present in zip(groups, described, names_on_all_ranks, strict=True):
        of_group = []
        for one, param in zip(own, group["params"], strict=True):
            number = source.get(one.name)
            if number is None or is_same(group, of_saved[number]):
                continue
            has_same_params = set(names[number]) == set(present)  # the caller changed only the factors
            if is_regrouped(param, one.id.name) or (is_of_layer_decay(group["name"]) and not has_same_params):
                of_group.append(one.name)
        if of_group and len(of_group) == sum(one.name in source for one in own):
            added.append((continued(group, of_saved[source[of_group[0]]]), of_group))
        moved += of_group
    kept = [[name for name in own if name not in moved] for own in names]
    return {
        "groups": [*of_saved, *(group for group, _ in added)],
        "names": [*kept, *(own for _, own in added)],
    }, moved


def match_saved(
    loaded: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> tuple[dict[str, Any], list[Pair], dict[tuple[str, str], list[str]]]:
    """Match the saved groups with `groups` by the names of their parameters. Converted checkpoints have no groups.

    Returns:
        The saved groups without `OF_RULE` and without parameters that another rule updates now, because learning rates
        of one rule do not fit another; each current group with the saved groups of its parameters, one for each record
        of a rule; and the parameters that continue from the state of another rule, by (saved rule, rule), because its
        names may have other meanings: SOAP's moments are in its eigenbasis.
    """
    saved_names = loaded["groups"].get("names", ())
    known = {name for own in saved_names for name in own}
    wanted = {name for own in names for name in own}
    current = {former: name for name, former in former_names(wanted, known.__contains__).items()}
    saved_names = [[current.get(name, name) for name in own] for own in saved_names]
    of_saved = list(zip(loaded["groups"].get("groups", ()), saved_names, strict=True))
    then = {name: group for group, own in of_saved for name in own}
    now = {name: group.get(RULE) for group, own in zip(groups, names, strict=True) for name in own}
    kept = [[name for name in own if RULE not in g or now.get(name) in (None, g[RULE])] for g, own in of_saved]
    without = [{key: value for key, value in group.items() if key not in OF_RULE} for group, _ in of_saved]
    pairs: list[Pair] = []
    for group, own in zip(groups, names, strict=True):
        found = [then[name] for name in own if name in then]
        pairs += [(group, of) for of in {str([of.get(key) for key in (RULE, *OF_RULE)]): of for of in found}.values()]
    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, after in now.items():
        before = then.get(name, {}).get(RULE)
        if before and after and before != after and loaded["state"].get(name, {}).keys() - {STEP, MAIN}:
            moved[before, after].append(name)
    return {"groups": without, "names": kept}, pairs, moved


def saved_scaler(state_dict: Mapping[str, Any], scaler: Scaler) -> dict[str, Any]:
    """Return the saved loss scale, after loading it into a copy of `scaler`. Raise ValueError if that fails."""
    saved = dict(state_dict.get("grad_scaler") or {})
    if saved and not scaler.state_dict():
        logger.info("the saved loss scale is ignored: this optimizer has a constant one")
        return {}
    try:
        if saved:
            copy.copy(scaler).load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"grad_scaler={saved!r} of the state_dict cannot be loaded: {error!r}") from None
    return saved
