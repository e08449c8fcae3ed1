"""The parameters and pieces that a sharded state describes."""

from typing import NamedTuple

from opt_checkpoint import (
    KEEP_VARS_HINT,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    get_param_id_to_sharded_param_map,
)
from opt_distributed.saving import MAIN, STEP, kept_states
from opt_distributed.sharded_pieces import Rows, sharded_piece
from opt_kernels.hooks import bare
from opt_kernels.params import RULE
from opt_paramgroups import ParamId
from opt_paramgroups.vocabulary import is_regrouped
from opt_stack.rules.entries import ParamGroups
from opt_stack.state import AnyState
from opt_stack.state.live import PieceRef


class Described(NamedTuple):
    """A parameter of the optimizer and its entry in the model's sharded state."""

    id: ParamId
    name: str  # in the checkpoint's groups; unique over the whole model
    sharded: ShardedTensor | ShardedTensorFactory

    @property
    def is_empty(self) -> bool:
        """Whether the parameter has no elements, and so on most layouts no state. It is not saved on any."""
        return isinstance(self.sharded, ShardedTensor) and not all(self.sharded.global_shape)


class SavedPiece(NamedTuple):
    """A piece whose state this rank saves."""

    own: Described
    at: str  # its key in the state; unique: two model chunks may share a name
    ref: PieceRef


class Description(NamedTuple):
    """What `sharded_state_dict` has described."""

    groups: list[list[Described]]
    names: list[list[str]]  # of the parameters of each group
    names_on_all_ranks: list[list[str]]  # likewise
    saved: list[SavedPiece]


def describe_params(model_sharded_state_dict: AnyState, groups: ParamGroups) -> list[list[Described]]:
    """Return the parameters of each group. Marks them in `model_sharded_state_dict` as having main values, so that
    `load` restores exact values in another precision.

    Raises:
        ValueError: a parameter is not in the model's sharded state.
    """
    params = [param for group in groups for param in group["params"]]
    found = get_param_id_to_sharded_param_map(dict(model_sharded_state_dict), params)
    missing = [index for index in range(len(params)) if index not in found]
    if missing:
        raise ValueError(f"Param id {missing[0]} does not match any model sharded param.{KEEP_VARS_HINT}")
    for sharded in found.values():
        sharded.has_mains = True
    described = []
    in_order = (found[index] for index in range(len(params)))
    for group in groups:
        of_group = []
        for id, sharded in zip(group["param_ids"], in_order, strict=False):
            if isinstance(sharded, ShardedTensorFactory):
                sharded = sharded.declared()
            name = sharded.key
            if isinstance(sharded, ShardedTensor) and sharded.prepend_axis_num:  # layers or experts are stacked
                name = f"{name}/{'.'.join(map(str, sharded.global_offset[: sharded.prepend_axis_num]))}"
            of_group.append(Described(id, name, sharded))
        described.append(of_group)
    return described


def describe_state(own: Described, ref: PieceRef, rows: Rows, *, always_main: bool) -> dict[str, ShardedBase]:
    """Describe the tensors of a parameter. Another rule may have kept the state of one that is regrouped, so that a
    checkpoint may lack the states of its present rule."""
    states = sharded_piece(*ref, own.sharded, rows, always_main=always_main)
    may_lack = is_regrouped(ref.piece.param, own.id.name)
    for name, tensor in states.items():
        if may_lack and isinstance(tensor, ShardedTensor) and name not in (STEP, MAIN):
            tensor.optional = True
    return states


def check_optional(saved_piece: SavedPiece, values: AnyState, saved: AnyState) -> None:
    """Raise ValueError if states are missing that are optional only because another rule may have kept others."""
    own, _, (unit, piece) = saved_piece
    missing = [spec.name for spec in kept_states(unit, piece) if spec.name not in values]
    if not missing or STEP not in values or not is_regrouped(piece.param, own.id.name):
        return
    groups = zip(saved["groups"], saved["names"], strict=True)
    rules = [group.get(RULE) for group, names in groups if own.name in names]
    if bare(unit.rule).name in rules:
        raise ValueError(
            f"parameter {own.name!r} was saved by optimizer={rules[0]!r}, but the checkpoint lacks its "
            f"{', '.join(missing)}; load another checkpoint, or reset the state of this parameter"
        )
