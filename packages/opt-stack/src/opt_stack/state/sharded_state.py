"""The optimizer's state as sharded tensors, for checkpoints that load on any number of ranks."""

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint import (
    CheckpointValueError,
    ScopedState,
    Segment,
    ShardedTensor,
    apply_saved_groups,
    groups_to_saved,
)
from opt_checkpoint.state import Conflict, ModelAxes, Replica, from_megatron, place_
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles, agreed
from opt_distributed.pieces import FullySharded, WeightAverages
from opt_distributed.saving import check_loaded, take_loaded_
from opt_distributed.sharded_pieces import rows_of_part
from opt_distributed.step import Spikes, Stepper
from opt_kernels.hooks import bare
from opt_kernels.params import Group
from opt_paramgroups import ParamId
from opt_stack.diagnosis.recorder import Recorder
from opt_stack.planning.plan import Plan
from opt_stack.rules.entries import (
    Pair,
    check_choices,
    check_loaded_numbers,
    warn_of_other_choices,
)
from opt_stack.state import AnyState
from opt_stack.state.described import (
    Described,
    Description,
    SavedPiece,
    check_optional,
    describe_params,
    describe_state,
)
from opt_stack.state.live import PieceRef, StateOffload
from opt_stack.state.megatron_state import SPIKES, Link, chain_of, form_of, to_megatron_state
from opt_stack.state.regrouped import match_saved, regroup_described
from opt_stack.state.weights import Evaluation, LoadedWeights, refuse_on_all
from opt_stack.wording import listed, logger

VERSION = 1
# The run that loads defines its groups; only their hyper-parameters are restored, if the rule is the same.
_RUN_ENTRIES = frozenset({"params", "param_ids", "name", "default_config", "is_expert_parallel", "is_decoupled_lr"})


class ShardedStates(torch.optim.Optimizer):
    """The sharded state behind `Optimizer`'s state dicts."""

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
    _held: Mapping[ParamId, PieceRef]
    _described: Description | None = None  # by the last `sharded_state_dict`

    def check_ready(self, what: str, *, reads: bool = True) -> None:
        """Raise RuntimeError in evaluation mode, or while the state is on the host; `what` names the call. If it
        `reads` state, wait until host memory has it."""
        self.evaluation.check_training(what)
        self.offload.check_restored(what, reads=reads)

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
        model_sharded_state_dict: AnyState,
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
                `fully_reshardable` in a save, and must be that in a load; `chained_optim_avoid_prefix` becomes True.
                With it, groups are described for each optimizer of a chain that Megatron-Core has.

        Step counts, groups and codes are copied, so a result of before the last step is refused by a save or load.
        Tensors that `sharded_model` described without groups are placed here: tensor-parallel parts, experts and
        pipeline stages get their position in the whole model, in `model_sharded_state_dict` itself.

        Raises:
            ValueError: a parameter is not in `model_sharded_state_dict`; or, on every rank, it is unknown which part of
                the model a rank has, or a checkpoint of Megatron-Core has another format.
            RuntimeError: in evaluation mode, or while the state is on the host; for Megatron-Core's types, if a resume
                would restore weights of before a load. Others refuse that when they are saved.
        """
        own_types = from_megatron(model_sharded_state_dict)
        if own_types is model_sharded_state_dict:
            return self._sharded(model_sharded_state_dict)[0]
        if not is_loading:
            refuse_on_all(self._everyone, self.loaded_weights.stale())
        groups = [dict(group) for group in self.param_groups]
        form = form_of(self.plan.config, metadata, is_loading=is_loading)
        links = [Link(form, [*range(len(groups))])]
        if metadata is not None:
            shards_buffers = any(chunk.ddp_config.use_distributed_optimizer for chunk in self.wrapped)
            links = chain_of(self.plan.config, form, groups, shards_buffers=shards_buffers)
        distributed = {number for link in links if link.form == "distributed" for number in link.groups}
        state, described = self._sharded(own_types, always_main=distributed)
        per_rank = self._everyone.gather_objects({at: ref.piece.step for _, at, ref in described.saved})
        steps = {at: step for of_rank in per_rank for at, step in of_rank.items()}
        return agreed(self._everyone, lambda: to_megatron_state(state, links, groups, steps))

    def _sharded(
        self, model_sharded_state_dict: AnyState, *, always_main: Collection[int] = ()
    ) -> tuple[ScopedState, Description]:
        """Return the sharded state in the types of opt-checkpoint, and its description. Collective.

        In the groups with the numbers `always_main`, fp32 parameters have main values too.
        """
        self.check_ready("sharded_state_dict()")
        self.complete_params()
        self.stepper.warn_of_unread("sharded_state_dict()")
        self.recorder.write("state was saved")
        place_(model_sharded_state_dict, axes_of(self.roles))
        groups = describe_params(model_sharded_state_dict, self.param_groups)
        self._check_parts(groups)
        names = [[own.name for own in of_group] for of_group in groups]
        saved = []
        places: set[str] = set()
        for own in chain.from_iterable(groups):
            if own.id in self._held and not own.is_empty:
                at = f"{own.name}, chunk {own.id.chunk}" if own.name in places else own.name
                places.add(at)
                saved.append(SavedPiece(own, at, self._held[own.id]))
        own_rows = {at: part for own, at, ref in saved if (part := rows_of_part(ref.piece, own.sharded))}
        names_on_all_ranks: list[dict[str, None]] = [{} for _ in names]  # sets in order
        rows: dict[str, dict[int, tuple[Segment, ...]]] = defaultdict(dict)
        for names_of_rank, rows_of_rank in self._everyone.gather_objects((names, own_rows)):
            for on_all, of_group in zip(names_on_all_ranks, names_of_rank, strict=True):
                on_all.update(dict.fromkeys(of_group))
            for at, part in rows_of_rank.items():
                rows[at].update(part)
        self._described = described = Description(groups, names, list(map(list, names_on_all_ranks)), saved)
        kept = [{key: group[key] for key in group if key not in _RUN_ENTRIES} for group in self.param_groups]
        for _, _, (unit, piece) in saved:
            unit.averages.follow_until_begun_(piece)
        with_main = {own.id for number in always_main for own in groups[number]}
        states = {at: describe_state(own, ref, rows[at], always_main=own.id in with_main) for own, at, ref in saved}
        state = {
            "version": VERSION,
            "state": states,
            "groups": groups_to_saved(kept, described.names_on_all_ranks),
            **self._verdict_state(),
        }
        copied = self._copied_values()

        def check(saves: bool) -> None:
            if self._copied_values() != copied:
                raise CheckpointValueError(
                    "the optimizer has stepped, its groups have changed, or eval() has replaced the weights, since "
                    "sharded_state_dict described it; call optimizer.sharded_state_dict before each save and load"
                )
            if saves and (stale := self.loaded_weights.stale()) is not None:
                raise CheckpointValueError(str(stale))

        # One state may hold several optimizers, and a run may have had another loss scale, or no `skip_sigma`.
        scoped = ScopedState(state, replaces="optimizer.", check=check, optional=("grad_scaler", SPIKES))
        return scoped, described

    def _copied_values(self) -> tuple[Any, ...]:
        """Return the numbers that differ if the copies in a sharded state are no longer those of the optimizer."""
        steps = [ref.piece.step for ref in self._held.values()]
        numbers = [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _RUN_ENTRIES}
            for group in self.param_groups
        ]
        scale = self.stepper.scaler.state_dict()
        return self.stepper.num_begun, steps, copy.deepcopy(numbers), scale, self.evaluation.is_evaluating

    def _load_sharded(self, loaded: AnyState, *, on_conflict: Conflict, override: Group) -> None:
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
        stored, regrouped = regroup_described(loaded["groups"], groups, described)
        saved, pairs, moved = match_saved({**loaded, "groups": stored}, groups, described.names)
        states = [loaded["state"].get(at, {}) for _, at, _ in described.saved]
        loads = [(piece.ref, values) for piece, values in zip(described.saved, states, strict=True)]
        for own in chain.from_iterable(described.groups):
            if own.is_empty and own.id in self._held:
                loads.append((self._held[own.id], {}))

        def checked_scale() -> dict[str, Any]:
            for piece, values in zip(described.saved, states, strict=True):
                check_optional(piece, values, loaded["groups"])
            for ref, values in loads:
                check_loaded(*ref, values)
            untouched = [{key: value for key, value in g.items() if not isinstance(value, Tensor)} for g in groups]
            apply_saved_groups(untouched, described.names, saved, on_conflict=on_conflict, override=override)
            self._check_groups([*zip(groups, untouched, strict=True)], pairs)
            return saved_scale(loaded, self.stepper)

        scale = agreed(self._everyone, checked_scale)
        self._warn_of_regrouped(regrouped)
        self._warn_of_averages({ref.piece.id: values for ref, values in loads}, self._everyone)
        for (before, after), of_params in moved.items():
            logger.warning("%s continues from the state that %s kept for %s", after, before, ", ".join(of_params))
        for group, then in pairs:
            warn_of_other_choices(group, then)
        apply_saved_groups(groups, described.names, saved, on_conflict=on_conflict, override=override)
        for ref, values in loads:
            take_loaded_(*ref, values)
        self._load_verdicts(loaded, scale)

    def _verdict_state(self) -> dict[str, Any]:
        """Return what verdicts of later steps depend on: the loss scale, and the norms and losses of the last steps."""
        found: dict[str, Any] = {"grad_scaler": self.stepper.scaler.state_dict()}
        if self.stepper.spikes is not None:
            found[SPIKES] = self.stepper.spikes.state_dict()
        return found

    def _load_verdicts(self, state_dict: AnyState, scale: dict[str, Any]) -> None:
        """Load what verdicts of later steps depend on. Without saved values, spikes are found anew.

        Losses that were noted before belong to a step that is not taken.
        """
        self.stepper.losses.forget()
        if scale:
            self.stepper.scaler.load_state_dict(scale)
        elif self.stepper.scaler.state_dict():
            logger.info("no loss scale was saved: it stays as it is")
        if self.stepper.spikes is not None:
            self.stepper.spikes.load_state_dict(state_dict.get(SPIKES) or {})

    def _warn_of_regrouped(self, moved: Collection[str]) -> None:
        if moved and self.roles.dense.dp.rank == 0:
            logger.warning(
                "%d parameters changed groups since this state was saved, because their names or marks are recognised "
                "now (%s): they continue with the weight decay, the factors of rates and the rule of their present "
                "groups, without the state of another rule",
                len(moved), listed([repr(name) for name in moved], 4),
            )  # fmt: skip

    def _warn_of_averages(self, loaded: Mapping[ParamId, Collection[str]], peers: Comm) -> None:
        """Log on the first of `peers` that averages begin anew, if those of a parameter were not loaded. Collective."""
        names = WeightAverages(self.plan.config).names  # a rank may have no unit
        if not names:
            return
        lacking = [str(id) for id, states in loaded.items() if not all(name in states for name in names)]
        lacking = sorted({name for of_rank in peers.gather_objects(lacking) for name in of_rank})
        if lacking and peers.rank == 0:
            logger.warning(
                "%d parameters (%s) were saved without averages of weights (%s): these begin anew with the loaded "
                "weights",
                len(lacking), listed([repr(name) for name in lacking], 4), ", ".join(names),
            )  # fmt: skip

    def _check_groups(self, numbers: Sequence[Pair], choices: Sequence[Pair]) -> None:
        """Raise ConfigError if a saved group has numbers that are not valid, or choices of another formula."""
        rules = {unit.name.split("/")[0]: bare(unit.rule) for unit in self.stepper.units}  # by `optimizer` of groups
        check_loaded_numbers(numbers, rules)
        for group, saved in choices:
            check_choices(group, saved, rules)

    def _check_parts(self, described: Sequence[Sequence[Described]]) -> None:
        """Check that parts of one parameter are not all described as the whole of it. Collective.

        Raises:
            ValueError: on every rank, if two tensor-parallel ranks would save their parts as the same tensor.
        """
        parts = {}  # the part of this rank, by key
        for own in chain.from_iterable(described):
            sharded = own.sharded
            is_whole = isinstance(sharded, ShardedTensor) and sharded.local_shape == sharded.global_shape
            if is_whole and own.id in self._held:
                parts[sharded.key] = self._held[own.id].piece.part
        on_all_ranks: dict[str, set[str]] = defaultdict(set)
        for of_rank in self._everyone.gather_objects(parts):
            for key, part in of_rank.items():
                on_all_ranks[key] |= {part} - {""}
        for wrong in (key for key, found in on_all_ranks.items() if len(found) > 1):
            raise ValueError(
                f"parameter {wrong!r} is tensor parallel, and tensor-parallel ranks have different parts of it, "
                "but model_sharded_state_dict describes each part as the whole; pass opt_checkpoint.sharded_model("
                f"model), or ShardedTensor.from_rank_offsets({wrong!r}, param, (partition_dim, rank, ranks), "
                "replica_id=...)"
            )


def axes_of(roles: Roles) -> ModelAxes:
    """Return the groups over which the model of these roles is divided."""

    def replica(axes: Axes) -> Replica:
        return Replica(axes.inter.rank * axes.dp.size + axes.dp.rank, axes.num_replicas)

    dense = roles.dense
    expert = roles.expert
    all_ranks = roles.everyone
    if roles.instance is not None and dense.inter.size == 1:
        all_ranks = roles.instance
    return ModelAxes(
        all_ranks=all_ranks,
        tp=dense.tp,
        expert_tp=expert.tp,
        ep=roles.ep,
        pp=roles.peers.get("pp", Alone()),
        dense=replica(dense),
        expert=replica(expert),
    )


def saved_scale(state_dict: AnyState, stepper: Stepper) -> dict[str, Any]:
    """Return the saved loss scale, after loading it into a copy of that of `stepper`, and the saved spikes into others.

    Raises ValueError if that fails.
    """
    spikes = stepper.spikes
    if spikes is not None:
        Spikes(spikes.sigma, spikes.window, stepper.device).load_state_dict(state_dict.get(SPIKES) or {})
    saved = dict(state_dict.get("grad_scaler") or {})
    if saved and not stepper.scaler.state_dict():
        logger.info("the saved loss scale is ignored: this optimizer has a constant one")
        saved = {}
    try:
        if saved:
            copy.copy(stepper.scaler).load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"grad_scaler={saved!r} of the state_dict cannot be loaded: {error!r}") from None
    return saved
