"""Optimizer state as sharded state: each entry inherits the sharding of its parameter.

Has the four functions and the hint of Megatron-Core's `dist_checkpointing.optimizer`, with its key format
`optimizer.state.<state name>.<parameter key>`. In addition, it supports flat ranges and states that are not shaped like
their parameter. These are declared by a `StateSpec`: one value per parameter (`step`, the factors and bases of SOAP),
statistics with some axes summed away (Adafactor), and state that only makes sense on one layout. An optimizer that
matches no parameter of the model is an error here, not a log message.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import (
    LocalNonpersistentObject,
    ReplicaId,
    Shape,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    flat_bounds,
)
from opt_checkpoint.state.sharded import is_main_replica as is_main
from opt_checkpoint.state.tensors import local_tensor, sharded_like
from opt_checkpoint.state.tree import leaves, path_text, sharded_values

LAYOUT_MARK = "@layout="
SPLIT_MARK = "@split="  # in the name of a state that depends on how rows are split into separate matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeParam:
    """Shaped and sharded like the parameter: moments, master weights, residual buffers, quantised codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerParam:
    """One value, of any shape, for the whole parameter, equal on every rank that holds a part: `step`, SOAP's bases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerMatrix:
    """One value, of any shape, for each matrix of a stack (..., rows, cols), as the factors of SOAP.

    The state's first axes are the stack's, and are cut as the parameter's; each value is equal on every rank that holds
    a part of its matrix. For a single matrix the same as `PerParam`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The parameter's shape without some axes, as for row and column statistics, already summed over all ranks.

    Args:
        dims: the axes of the local parameter that were removed.
    """

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBound:
    """A tensor that is valid only for this layout and shard; another layout cannot load it.

    Args:
        fingerprint: name of the layout; the state may be loaded if and only if it is equal.
    """

    fingerprint: str


StateSpec: TypeAlias = LikeParam | PerParam | PerMatrix | Reduced | LayoutBound


class _Block(NamedTuple):
    """The block of a parameter that a rank holds, from any kind of description."""

    local_shape: Shape
    global_shape: Shape
    global_offset: Shape
    prepended: int
    flat: tuple[int, int] | None
    replica_id: ReplicaId
    may_repeat: bool

    @property
    def own_offset(self) -> Shape:
        return self.global_offset[self.prepended :]

    @property
    def has_first_element(self) -> bool:
        """Whether the block begins at the parameter's first element, which is true for exactly one block."""
        starts = self.flat is None or (self.flat[0] == 0 and self.flat[1] > 0)
        return starts and not any(self.own_offset)


def shard_by_spec(
    model_param: ShardedTensor | ShardedTensorFactory, value: Any, key: str, spec: StateSpec
) -> ShardedTensor:
    """A state that is not shaped like its parameter, as a sharded tensor under `key`.

    Args:
        model_param: the parameter's description.
        value: the state, a tensor whose memory is shared.
        key: the state's full key.
        spec: anything but `LikeParam`.

    Raises:
        CheckpointingException: the spec cannot hold for this parameter or value.
    """
    held = _held(model_param)
    if not isinstance(value, Tensor):
        raise CheckpointValueError(f"{key} is a {type(value).__name__}, not a tensor; store it as a ShardedObject")
    tensor = local_tensor(value)
    shape, own_shape = tuple(tensor.shape), held.global_shape[held.prepended :]
    match spec:
        case PerParam():
            return _sharded(held, tensor, key, shape, (0,) * len(shape), main=held.has_first_element)
        case PerMatrix():
            axes = _stack_axes(held, shape, key)
            own = shape[axes:]
            is_first = held.has_first_element if not axes else not any(held.own_offset[axes:])
            offset = held.own_offset[:axes] + (0,) * len(own)
            return _sharded(held, tensor, key, own_shape[:axes] + own, offset, main=is_first)
        case Reduced():
            kept = _kept_axes(held, shape, key, spec.dims)
            is_first = not any(o for axis, o in enumerate(held.own_offset) if axis not in kept)
            own, offset = (tuple(values[axis] for axis in kept) for values in (own_shape, held.own_offset))
            return _sharded(held, tensor, key, own, offset, main=is_first)
        case LayoutBound():
            place = ".".join(map(str, held.global_offset))
            flat = "" if held.flat is None else f"+{held.flat[0]}-{held.flat[1]}"
            name = f"{key}{LAYOUT_MARK}{spec.fingerprint}/{place}{flat}"
            return replace(sharded_like(name, tensor, replica_id=held.replica_id), may_repeat=held.may_repeat)
        case LikeParam():
            raise CheckpointValueError(f"{key} is LikeParam: use make_sharded_optimizer_tensor")


def _held(param: ShardedTensor | ShardedTensorFactory) -> _Block:
    flat = None if param.flattened_range is None else flat_bounds(param.flattened_range)
    if isinstance(param, ShardedTensor):
        block = param.local_shape, param.global_shape, param.global_offset, param.prepend_axis_num
        return _Block(*block, flat, param.replica_id, param.may_repeat)
    param = param.declared()
    if not param.segments:  # its function does more than cut rows: it begins where one of its tensors begins
        built = param.built_tensors()
        if not built or any(piece.prepend_axis_num for piece in built):
            raise CheckpointValueError(
                f"state of {param.key} has a different shape from its parameter, and the rows that the factory's "
                f"function cuts are unknown; declare the factory by segments"
            )
        piece = next((piece for piece in built if not any(piece.global_offset)), built[0])
        block = piece.local_shape, piece.global_shape, piece.global_offset, 0
        return _Block(*block, None, piece.replica_id, may_repeat=False)
    first, rank = param.segments[0], len(param.local_shape)
    prepended = len(first.global_shape) - rank
    return _Block(
        param.local_shape, first.global_shape, first.global_offset, prepended, flat, param.replica_id, may_repeat=False
    )


def _sharded(held: _Block, tensor: Tensor, key: str, shape: Shape, offset: Shape, *, main: bool) -> ShardedTensor:
    """A block at `offset` of a global tensor of `shape`, to which the prepended axes are added.

    It is the main replica if `main` is true and so is the block; an empty block of a non-empty parameter is never.
    """
    main = main and (all(held.local_shape) or not all(held.global_shape)) and is_main(held.replica_id)
    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_shape=held.global_shape[: held.prepended] + shape,
        global_offset=held.global_offset[: held.prepended] + offset,
        axis_fragmentations=None,
        replica_id=0 if main else 1,
        prepend_axis_num=held.prepended,
        may_repeat=held.may_repeat,
    )


def _stack_axes(held: _Block, shape: Shape, key: str) -> int:
    """The number of axes of the stack of matrices that a parameter is."""
    axes = len(held.local_shape) - 2
    if axes < 0 or shape[:axes] != held.local_shape[:axes]:
        raise CheckpointValueError(
            f"{key} has shape {shape}; a state with one value per matrix of a parameter "
            f"{held.local_shape} must have a shape that begins with {held.local_shape[: max(axes, 0)]}"
        )
    if held.flat is not None and axes:
        raise CheckpointValueError(f"{key} has a value for each matrix: its parameter may not be a flat range")
    return axes


def _kept_axes(held: _Block, shape: Shape, key: str, dims: tuple[int, ...]) -> list[int]:
    """The axes of a parameter that a state keeps, of which `dims` are removed."""
    rank = len(held.local_shape)
    dims = tuple(d % rank for d in dims)
    if held.flat is not None:
        raise CheckpointValueError(f"{key} is reduced over axes {dims}: its parameter may not be a flat range")
    kept = [axis for axis in range(rank) if axis not in dims]
    expected = tuple(held.local_shape[axis] for axis in kept)
    if shape != expected:
        raise CheckpointValueError(f"{key} has shape {shape}; {held.local_shape} without axes {dims} is {expected}")
    return kept


logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " Make sure state dict contains original torch.nn.Parameters (not pure torch.Tensors) by passing `keep_vars=True`"
    " to `.state_dict()`. If any transformation of the original state dict is needed after `.state_dict()`, make sure"
    " it keeps the Parameters themselves."
)

# Megatron-Core stores main weights as `param` or as `fp32_param`, by the class of its optimizer; pass as
# `load(aliases=...)`.
REFERENCE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "optimizer.state.fp32_param.": "optimizer.state.param.",
        "optimizer.state.param.": "optimizer.state.fp32_param.",
    }
)
ShardedParam: TypeAlias = ShardedTensor | ShardedTensorFactory
NO_SPECS: Mapping[str, StateSpec] = MappingProxyType({})


class OptimizerShapeError(CheckpointValueError, AssertionError):
    """A state does not have the shape of its parameter. Also an AssertionError, as in Megatron-Core."""


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Position of each parameter in the optimizer, by the `id` of its (local) tensor.

    Args:
        optim_params_iter: the parameters in the optimizer's order.

    Returns:
        `id(tensor) -> index`; a repeated parameter keeps its first index.
    """
    positions: dict[int, int] = {}
    for index, param in enumerate(optim_params_iter):
        positions.setdefault(id(local_tensor(param)), index)
    return positions


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict,
    optim_params_iter: Iterable[torch.nn.Parameter],
    *,
    strict: bool = True,
) -> dict[int, ShardedParam]:
    """The model's sharded description of each parameter of the optimizer, matched by identity.

    Entries that are not in the optimizer are skipped. If two entries hold the same tensor (tied weights), the one whose
    key sorts first is used and the choice is logged, so that all ranks and runs agree.

    Args:
        model_sharded_state_dict: any nested state that contains the model's sharded tensors and factories.
        optim_params_iter: the parameters in the optimizer's order.
        strict: whether it is an error if no parameter of the optimizer is in the model.

    Returns:
        `index in the optimizer -> ShardedTensor | ShardedTensorFactory`.

    Raises:
        CheckpointingException: nothing matches although there are parameters, and `strict`.
    """
    positions = get_optim_param_to_id_map(optim_params_iter)
    found: dict[int, ShardedParam] = {}
    kinds = ShardedTensor | ShardedTensorFactory
    entries = [value for value in sharded_values(model_sharded_state_dict) if isinstance(value, kinds)]
    for entry in sorted(entries, key=lambda e: e.key):
        index = positions.get(id(None if entry.data is None else local_tensor(entry.data)))
        if index is None:
            logger.debug("%s is not tracked by the optimizer", entry.key)
        elif index in found:
            logger.info("parameter %d is tied: saved as %s, not as %s", index, found[index].key, entry.key)
        else:
            found[index] = entry
    if strict and positions and not found:
        plain = next((leaf for leaf in leaves(model_sharded_state_dict) if isinstance(leaf.value, Tensor)), None)
        hint = KEEP_VARS_HINT
        if plain is not None:  # a plain `state_dict()`, for which `keep_vars=True` would not help
            hint = (
                f" It holds plain tensors, as {path_text(plain.path)}, which do not say what part of a global tensor "
                f"they are. Pass opt_checkpoint.sharded_model(model), or a ShardedTensor of each parameter."
            )
        raise CheckpointValueError(
            f"none of the optimizer's {len(positions)} parameters is in the model state dict.{hint}"
        )
    return found


def make_sharded_optimizer_tensor(model_param: ShardedParam, optim_param: Tensor, prefix: str) -> ShardedParam:
    """A state with the shape of its parameter, sharded like it, under the key `prefix.<parameter key>`.

    Args:
        model_param: the parameter's description. With a `flattened_range`, the state is that range of it.
        optim_param: the state, with `model_param`'s local shape (or its range's length) and any dtype. For a DTensor,
            its local values are used.
        prefix: by convention `optimizer.state.<state name>`.

    Returns:
        A sharded tensor or factory that shares `optim_param`'s memory.

    Raises:
        OptimizerShapeError: the shapes differ.
    """
    values = local_tensor(optim_param)
    expected = _held_shape(model_param)
    if expected is not None and tuple(values.shape) != expected:
        raise OptimizerShapeError(
            f"Optimizer shape {tuple(values.shape)} does not match model shape {expected} of {model_param.key} "
            f"under {prefix}; declare the state's StateSpec if it is not shaped like its parameter"
        )
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return dataclasses.replace(model_param, key=key, data=values, has_mains=False)
    return dataclasses.replace(model_param, key=key, data=values, dtype=values.dtype, has_mains=False)


def _held_shape(param: ShardedParam) -> tuple[int, ...] | None:
    """Local shape of a state of this parameter; None for a factory without data, whose shape is unknown."""
    if param.flattened_range is not None:
        return (param.flattened_range.stop - (param.flattened_range.start or 0),)
    if isinstance(param, ShardedTensor):
        return param.local_shape
    return None if param.data is None else tuple(param.data.shape)


def make_sharded_state(model_param: ShardedParam, value: Any, state_name: str, spec: StateSpec) -> ShardedBase:
    """One state of one parameter, sharded by its `StateSpec`, under `optimizer.state.<state_name>.<parameter key>`.

    Args:
        model_param: the parameter's description.
        value: the state. A Python number becomes a 0-d tensor (bool, int64 or float64).
        state_name: such as `exp_avg`.
        spec: how the state's shape relates to that of the parameter.

    Raises:
        CheckpointingException: value and spec do not fit the parameter.
    """
    prefix = f"optimizer.state.{state_name}"
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    if isinstance(spec, LikeParam):
        return make_sharded_optimizer_tensor(model_param, value, prefix)
    return shard_by_spec(model_param, value, f"{prefix}.{model_param.key}", spec)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: str | Iterable[str] = (),
    *,
    specs: Mapping[str, StateSpec] = NO_SPECS,
) -> None:
    """Make an optimizer state dict sharded, in place: `state` and `param_groups` of `optim_state_dict` are replaced.

    Every tensor of `state` becomes a sharded one; 0-d tensors and numbers become one value per parameter unless
    `specs` says otherwise. The `params` of each group are kept local.

    Args:
        optim_state_dict: torch's form: `state` by parameter index, `param_groups`.
        id_to_sharded_param_map: from `get_param_id_to_sharded_param_map`.
        exclude_keys: state names to leave out; a single name or several.
        specs: the specs of states that are not shaped like their parameter, by state name.

    Raises:
        ValueError: a parameter with state to save has no description.
        CheckpointingException: a state does not fit its spec.
    """
    excluded = {exclude_keys} if isinstance(exclude_keys, str) else set(exclude_keys)
    sharded: dict[int, dict[str, ShardedBase]] = {}
    for param_id, states in optim_state_dict["state"].items():
        kept = {name: value for name, value in states.items() if name not in excluded}
        if kept and param_id not in id_to_sharded_param_map:
            raise ValueError(f"Param id {param_id} does not match any model sharded param.{KEEP_VARS_HINT}")
        sharded[param_id] = {}
        for name, value in kept.items():
            spec = specs.get(name) or (LikeParam() if isinstance(value, Tensor) and value.dim() else PerParam())
            sharded[param_id][name] = make_sharded_state(id_to_sharded_param_map[param_id], value, name, spec)
    optim_state_dict["state"] = sharded
    optim_state_dict["param_groups"] = copy.deepcopy(optim_state_dict["param_groups"])
    for group in optim_state_dict["param_groups"]:
        group["params"] = LocalNonpersistentObject(group["params"])
