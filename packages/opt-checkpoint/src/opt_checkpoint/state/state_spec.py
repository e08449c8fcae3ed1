"""How the shape of an optimizer state relates to its parameter's, and the sharding that follows from it.

Most state has its parameter's shape. The rest is declared: one value per parameter (`step`, the factors and bases of
SOAP), statistics with some axes summed away (Adafactor), one scale per block (quantised moments), state that only
makes sense on one layout, and values that are not tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.dtensor import local_tensor
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import ReplicaId, Shape, ShardedBase, ShardedObject, ShardedTensor, flat_bounds
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
class BlockScales:
    """One value per block of `block` elements of the last axis of the *global* parameter.

    Args:
        block: elements per block; cuts between ranks must fall on multiples of it.
    """

    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBound:
    """A tensor that is valid only for this layout and shard; another layout cannot load it.

    Args:
        fingerprint: name of the layout; the state may be loaded if and only if it is equal.
    """

    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A value that is not a tensor, one for the whole parameter; stored if `torch.load(weights_only=True)` takes it."""


StateSpec: TypeAlias = LikeParam | PerParam | PerMatrix | Reduced | BlockScales | LayoutBound | Opaque


class _Held(NamedTuple):
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
) -> ShardedBase:
    """A state that is not shaped like its parameter, as a sharded value under `key`.

    Args:
        model_param: the parameter's description.
        value: the state; any object for `Opaque`, else a tensor whose memory is shared.
        key: the state's full key.
        spec: anything but `LikeParam`.

    Raises:
        CheckpointingException: the spec cannot hold for this parameter or value.
    """
    held = _held(model_param)
    if isinstance(spec, Opaque):
        return ShardedObject(key, value, (1,), (0,), held.replica_if(held.has_first_element))
    if not isinstance(value, Tensor):
        raise CheckpointValueError(f"{key} is a {type(value).__name__}, not a tensor; declare it Opaque")
    tensor = local_tensor(value)
    match spec:
        case PerParam():
            return _per_param(held, tensor, key)
        case PerMatrix():
            return _per_matrix(held, tensor, key)
        case Reduced():
            return _reduced(held, tensor, key, spec.dims)
        case BlockScales():
            return _block_scales(held, tensor, key, spec.block)
        case LayoutBound():
            return _layout_bound(held, tensor, key, spec.fingerprint)
        case LikeParam():
            raise CheckpointValueError(f"{key} is LikeParam: use make_sharded_optimizer_tensor")


def _held(param: ShardedTensor | ShardedTensorFactory) -> _Held:
    flat = None if param.flattened_range is None else flat_bounds(param.flattened_range)
    if isinstance(param, ShardedTensor):
        block = param.local_shape, param.global_shape, param.global_offset, param.prepend_axis_num
        return _Held(*block, flat, param.replica_id, param.may_repeat)
    param = param.declared()
    if not param.segments:
        return _held_of_built(param)
    first, rank = param.segments[0], len(param.local_shape)
    return _Held(
        param.local_shape,
        first.global_shape,
        first.global_offset,
        len(first.global_shape) - rank,
        flat,
        param.replica_id,
        may_repeat=False,
    )


def _held_of_built(factory: ShardedTensorFactory) -> _Held:
    """A factory whose function does more than cut rows: it begins where one of its tensors begins."""
    built = factory.built_tensors()
    if not built or any(piece.prepend_axis_num for piece in built):
        raise CheckpointValueError(
            f"state of {factory.key} has a different shape from its parameter, and the rows that the factory's "
            f"function cuts are unknown; declare the factory by segments"
        )
    first = next((piece for piece in built if not any(piece.global_offset)), built[0])
    return _Held(first.local_shape, first.global_shape, first.global_offset, 0, None, first.replica_id, False)


def _sharded(held: _Held, tensor: Tensor, key: str, own: tuple[Shape, Shape], main: bool) -> ShardedTensor:
    """A block of the global tensor `(prepended axes) + own shape`, at `own` offset."""
    shape, offset = own
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


def _per_param(held: _Held, tensor: Tensor, key: str) -> ShardedTensor:
    shape = tuple(tensor.shape)
    return _sharded(held, tensor, key, (shape, (0,) * len(shape)), held.has_first_element)


def _per_matrix(held: _Held, tensor: Tensor, key: str) -> ShardedTensor:
    axes = len(held.local_shape) - 2  # of the stack
    if axes < 0 or tuple(tensor.shape[:axes]) != held.local_shape[:axes]:
        raise CheckpointValueError(
            f"{key} has shape {tuple(tensor.shape)}; a state with one value per matrix of a parameter "
            f"{held.local_shape} must have a shape that begins with {held.local_shape[: max(axes, 0)]}"
        )
    if held.flat is not None and axes:
        raise CheckpointValueError(f"{key} has a value for each matrix: its parameter may not be a flat range")
    own = tuple(tensor.shape[axes:])
    shape = held.global_shape[held.prepended :][:axes] + own
    offset = held.own_offset[:axes] + (0,) * len(own)
    is_first = held.has_first_element if not axes else not any(held.own_offset[axes:])
    return _sharded(held, tensor, key, (shape, offset), is_first)


def _without(values: Shape, dims: tuple[int, ...]) -> Shape:
    return tuple(v for d, v in enumerate(values) if d not in dims)


def _reduced(held: _Held, tensor: Tensor, key: str, dims: tuple[int, ...]) -> ShardedTensor:
    rank = len(held.local_shape)
    dims = tuple(d % rank for d in dims)
    if held.flat is not None:
        raise CheckpointValueError(f"{key} is reduced over axes {dims}: its parameter may not be a flat range")
    if tuple(tensor.shape) != _without(held.local_shape, dims):
        raise CheckpointValueError(
            f"{key} has shape {tuple(tensor.shape)}; {held.local_shape} without axes {dims} is "
            f"{_without(held.local_shape, dims)}"
        )
    own_shape = held.global_shape[held.prepended :]
    first = not any(held.own_offset[d] for d in dims)
    return _sharded(held, tensor, key, (_without(own_shape, dims), _without(held.own_offset, dims)), first)


def _block_scales(held: _Held, tensor: Tensor, key: str, block: int) -> ShardedTensor:
    own = held.global_shape[held.prepended :]
    if not own or own[-1] % block or held.own_offset[-1] % block or held.local_shape[-1] % block:
        raise CheckpointValueError(
            f"{key} has one scale per {block} elements of the last axis, which must divide the parameter {own}, the "
            f"block {held.local_shape} and its offset {held.own_offset}; choose a smaller block or another layout"
        )

    def per_block(values: Shape) -> Shape:
        return (*values[:-1], values[-1] // block)

    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=per_block(held.local_shape),
        global_shape=per_block(held.global_shape),
        global_offset=per_block(held.global_offset),
        axis_fragmentations=None,
        replica_id=held.replica_id,
        prepend_axis_num=held.prepended,
        flattened_range=_flat_of_blocks(held, key, block),
        may_repeat=held.may_repeat,
    )


def _flat_of_blocks(held: _Held, key: str, block: int) -> slice | None:
    if held.flat is None:
        return None
    if held.flat[0] % block or held.flat[1] % block:
        raise CheckpointValueError(f"{key}: flat range {held.flat} must begin and end on a multiple of {block}")
    return slice(held.flat[0] // block, held.flat[1] // block)


def _layout_bound(held: _Held, tensor: Tensor, key: str, fingerprint: str) -> ShardedTensor:
    place = ".".join(map(str, held.global_offset))
    flat = "" if held.flat is None else f"+{held.flat[0]}-{held.flat[1]}"
    shape = tuple(tensor.shape)
    return ShardedTensor(
        key=f"{key}{LAYOUT_MARK}{fingerprint}/{place}{flat}",
        data=tensor,
        dtype=tensor.dtype,
        local_shape=shape,
        global_shape=shape,
        global_offset=(0,) * len(shape),
        axis_fragmentations=(1,) * len(shape),
        replica_id=held.replica_id,
        may_repeat=held.may_repeat,
    )
