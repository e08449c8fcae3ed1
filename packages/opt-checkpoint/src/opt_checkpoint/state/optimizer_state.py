"""Optimizer state as sharded state: each entry inherits the sharding of its parameter.

Has the four functions and the hint of Megatron-Core's `dist_checkpointing.optimizer`, with its key format
`optimizer.state.<state name>.<parameter key>`. In addition, it supports flat ranges and states that are not shaped like
their parameter. These are declared by a `StateSpec`: one value per parameter (`step`, the factors and bases of SOAP),
statistics with some axes summed away (Adafactor), and state that only makes sense on one layout. An optimizer that
matches no parameter of the model is an error here, not a log message.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.factory import Segment, ShardedTensorFactory, tensors_in
from opt_checkpoint.state.megatron_types import from_megatron
from opt_checkpoint.state.sharded import (
    LocalNonpersistentObject,
    ReplicaId,
    Shape,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    flat_bounds,
    is_main_replica,
    path_text,
)
from opt_checkpoint.state.tensors import local_tensor, sharded_like
from opt_checkpoint.state.tree import leaves, sharded_values

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


logger = logging.getLogger(__name__)

KEEP_VARS_HINT = (
    " Make sure state dict contains original torch.nn.Parameters (not pure torch.Tensors) by passing `keep_vars=True`"
    " to `.state_dict()`. If any transformation of the original state dict is needed after `.state_dict()`, make sure"
    " it keeps the Parameters themselves."
)

# Megatron-Core stores main weights as `param` or as `fp32_param`, by the class of its optimizer; pass as
# `load(aliases=...)`.
REFERENCE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"optimizer.state.fp32_param.": "optimizer.state.param.", "optimizer.state.param.": "optimizer.state.fp32_param."}
)
ShardedParam: TypeAlias = ShardedTensor | ShardedTensorFactory


class OptimizerShapeError(CheckpointValueError, AssertionError):
    """A state does not have the shape of its parameter. Also an AssertionError, as in Megatron-Core."""


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Return the position of each parameter in the optimizer, by the `id` of its (local) tensor.

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
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[torch.nn.Parameter], *, strict: bool = True
) -> dict[int, ShardedParam]:
    """Return the model's sharded description of each parameter of the optimizer, matched by identity.

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
    state = from_megatron(model_sharded_state_dict)
    entries = [value for value in sharded_values(state) if isinstance(value, ShardedTensor | ShardedTensorFactory)]
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
        raise CheckpointValueError(f"none of {len(positions)} optimizer parameters is in the model state dict.{hint}")
    return found


def make_sharded_optimizer_tensor(model_param: ShardedParam, optim_param: Tensor, prefix: str) -> ShardedParam:
    """Return a state with the shape of its parameter, sharded like it, under the key `prefix.<parameter key>`.

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
    expected: Shape | None = None  # of a factory without data
    if model_param.flattened_range is not None:
        start, stop = flat_bounds(model_param.flattened_range)
        expected = (stop - start,)
    elif isinstance(model_param, ShardedTensor):
        expected = model_param.local_shape
    elif model_param.data is not None:
        expected = tuple(model_param.data.shape)
    if expected is not None and tuple(values.shape) != expected:
        raise OptimizerShapeError(
            f"Optimizer shape {tuple(values.shape)} does not match model shape {expected} of {model_param.key} "
            f"under {prefix}; declare the state's StateSpec if it is not shaped like its parameter"
        )
    key = f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=values, has_mains=False)
    return replace(model_param, key=key, data=values, dtype=values.dtype, has_mains=False)


def make_sharded_state(model_param: ShardedParam, value: Any, state_name: str, spec: StateSpec) -> ShardedBase:
    """Return one state of one parameter, sharded by its `StateSpec`, under `optimizer.state.<state_name>.<parameter
    key>`.

    Args:
        model_param: the parameter's description.
        value: the state. A Python number becomes a 0-d tensor (bool, int64 or float64).
        state_name: such as `exp_avg`.
        spec: how the state's shape relates to that of the parameter.

    Raises:
        CheckpointingException: value and spec do not fit the parameter.
    """
    prefix = f"optimizer.state.{state_name}"
    key = f"{prefix}.{model_param.key}"
    if isinstance(value, int | float):
        dtype = torch.float64 if isinstance(value, float) else None  # None: bool or int64
        value = torch.tensor(value, dtype=dtype, device="cpu")
    if isinstance(spec, LikeParam):
        return make_sharded_optimizer_tensor(model_param, value, prefix)
    if not isinstance(value, Tensor):
        raise CheckpointValueError(f"{key} is a {type(value).__name__}, not a tensor; store it as a ShardedObject")
    block = _block_of(model_param)
    flat = None if model_param.flattened_range is None else flat_bounds(model_param.flattened_range)
    tensor = local_tensor(value)
    if isinstance(spec, LayoutBound):
        place = path_text(block.global_offset)
        part = "" if flat is None else f"+{flat[0]}-{flat[1]}"
        name = f"{key}{LAYOUT_MARK}{spec.fingerprint}/{place}{part}"
        return replace(sharded_like(name, tensor, replica_id=block.replica_id), may_repeat=block.may_repeat)
    # The first axes of the state are axes of the parameter, and are cut as these; the others are whole.
    shape = tuple(tensor.shape)
    kept = _kept_axes(block.local_shape, shape, key, spec, is_flat=flat is not None)
    axes = [*range(block.prepend_axis_num), *(block.prepend_axis_num + axis for axis in kept)]
    whole = shape[len(kept) :]
    begins = flat is None or (flat[0] == 0 and flat[1] > 0)
    is_first = begins and not any(offset for axis, offset in enumerate(block.global_offset) if axis not in axes)
    is_empty = not all(block.local_shape) and all(block.global_shape)  # such a block is never the main replica
    replica_id = 0 if is_first and not is_empty and is_main_replica(block.replica_id) else 1

    def place_of(described: Segment | ShardedTensor | _Block) -> dict[str, Any]:
        """Return the kept axes of the parameter's block or rows, then whole ones."""
        return {
            "global_shape": tuple(described.global_shape[axis] for axis in axes) + whole,
            "global_offset": tuple(described.global_offset[axis] for axis in axes) + (0,) * len(whole),
        }

    # The rows of a factory may be saved in another order.
    if 0 in kept and isinstance(model_param, ShardedTensorFactory) and (segments := model_param.declared().segments):
        rows = tuple(replace(segment, **place_of(segment)) for segment in segments)
        return ShardedTensorFactory(key, tensor, segments=rows, local_shape=shape, replica_id=replica_id)
    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=shape,
        **place_of(block),
        axis_fragmentations=None,
        replica_id=replica_id,
        prepend_axis_num=block.prepend_axis_num,
        may_repeat=block.may_repeat,
    )


class _Block(NamedTuple):
    """The block of a parameter that a rank holds, from a factory. The fields are those of a ShardedTensor."""

    local_shape: Shape
    global_shape: Shape
    global_offset: Shape
    prepend_axis_num: int
    replica_id: ReplicaId
    may_repeat: bool = False


def _block_of(param: ShardedParam) -> ShardedTensor | _Block:
    if isinstance(param, ShardedTensor):
        return param
    param = param.declared()
    if param.segments:
        first = param.segments[0]
        prepended = len(first.global_shape) - len(param.local_shape)
        return _Block(param.local_shape, first.global_shape, first.global_offset, prepended, param.replica_id)
    # Its function does more than cut rows: it begins where one of its tensors begins.
    built = list(tensors_in(param.build()))
    if not built or any(piece.prepend_axis_num for piece in built):
        raise CheckpointValueError(
            f"state of {param.key} has a different shape from its parameter, and the rows that the factory's function "
            f"cuts are unknown; declare the factory by segments"
        )
    piece = next((piece for piece in built if not any(piece.global_offset)), built[0])
    return _Block(piece.local_shape, piece.global_shape, piece.global_offset, 0, piece.replica_id)


def _kept_axes(of_param: Shape, shape: Shape, key: str, spec: StateSpec, *, is_flat: bool) -> list[int]:
    """The axes of a parameter that are the first axes of a state."""
    rank = len(of_param)
    kept = list[int]()
    if isinstance(spec, PerMatrix):
        kept = list(range(rank - 2))
    elif isinstance(spec, Reduced):
        kept = sorted(set(range(rank)) - {dim % rank for dim in spec.dims})
    expected = tuple(of_param[axis] for axis in kept)
    is_whole = isinstance(spec, Reduced)
    if is_flat and (kept or is_whole):
        raise CheckpointValueError(f"{key} is {spec}: its parameter may not be a flat range")
    if (shape if is_whole else shape[: len(kept)]) != expected or (isinstance(spec, PerMatrix) and rank < 2):
        raise CheckpointValueError(
            f"{key} has shape {shape}; as {spec} of a parameter of shape {of_param} it must "
            f"{'have' if is_whole else 'begin with'} {expected}"
        )
    return kept


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, ShardedParam],
    exclude_keys: str | Iterable[str] = (),
) -> None:
    """Make an optimizer state dict sharded, in place: `state` and `param_groups` of `optim_state_dict` are replaced.

    Every tensor of `state` becomes a sharded one; 0-d tensors and numbers become one value per parameter. The `params`
    of each group are kept local.

    Args:
        optim_state_dict: torch's form: `state` by parameter index, `param_groups`.
        id_to_sharded_param_map: from `get_param_id_to_sharded_param_map`.
        exclude_keys: state names to leave out; a single name or several.

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
            spec = LikeParam() if isinstance(value, Tensor) and value.dim() else PerParam()
            sharded[param_id][name] = make_sharded_state(id_to_sharded_param_map[param_id], value, name, spec)
    optim_state_dict["state"] = sharded
    optim_state_dict["param_groups"] = copy.deepcopy(optim_state_dict["param_groups"])
    for group in optim_state_dict["param_groups"]:
        group["params"] = LocalNonpersistentObject(group["params"])
