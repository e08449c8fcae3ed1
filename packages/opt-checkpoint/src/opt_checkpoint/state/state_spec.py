"""How the shape of an optimizer state relates to its parameter's, and the sharding that follows from it.

Most state has its parameter's shape. The rest is declared: one value per parameter (`step`, the factors and bases of
SOAP), statistics with some axes summed away (Adafactor), and state that only makes sense on one layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.dtensor import local_tensor, whole_tensor
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import ReplicaId, Shape, ShardedTensor, flat_bounds
from opt_checkpoint.state.sharded import is_main_replica as is_main

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

    def replica_if(self, main: bool) -> ReplicaId:
        """The replica number of a state that several blocks share: main if `main` is true and the block is main.

        An empty block of a non-empty parameter is never main.
        """
        empty = not all(self.local_shape) and all(self.global_shape)
        return 0 if main and not empty and is_main(self.replica_id) else 1

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
            return replace(whole_tensor(name, tensor, replica_id=held.replica_id), may_repeat=held.may_repeat)
        case LikeParam():
            raise CheckpointValueError(f"{key} is LikeParam: use make_sharded_optimizer_tensor")


def _held(param: ShardedTensor | ShardedTensorFactory) -> _Block:
    flat = None if param.flattened_range is None else flat_bounds(param.flattened_range)
    if isinstance(param, ShardedTensor):
        block = param.local_shape, param.global_shape, param.global_offset, param.prepend_axis_num
        return _Block(*block, flat, param.replica_id, param.may_repeat)
    param = param.declared()
    if not param.segments:
        return _held_of_built(param)
    first, rank = param.segments[0], len(param.local_shape)
    prepended = len(first.global_shape) - rank
    return _Block(
        param.local_shape, first.global_shape, first.global_offset, prepended, flat, param.replica_id, may_repeat=False
    )


def _held_of_built(factory: ShardedTensorFactory) -> _Block:
    """A factory whose function does more than cut rows: it begins where one of its tensors begins."""
    built = factory.built_tensors()
    if not built or any(piece.prepend_axis_num for piece in built):
        raise CheckpointValueError(
            f"state of {factory.key} has a different shape from its parameter, and the rows that the factory's "
            f"function cuts are unknown; declare the factory by segments"
        )
    first = next((piece for piece in built if not any(piece.global_offset)), built[0])
    return _Block(first.local_shape, first.global_shape, first.global_offset, 0, None, first.replica_id, False)


def _sharded(held: _Block, tensor: Tensor, key: str, shape: Shape, offset: Shape, *, main: bool) -> ShardedTensor:
    """A block at `offset` of a global tensor of `shape`, to which the prepended axes are added."""
    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_shape=held.global_shape[: held.prepended] + shape,
        global_offset=held.global_offset[: held.prepended] + offset,
        axis_fragmentations=None,
        replica_id=held.replica_if(main),
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
