"""The sharded types, which describe the part of a global tensor or object that a rank holds.

`ShardedTensor`, `ShardedObject`, `LocalNonpersistentObject` keep the names, field order and checks of Megatron-Core's
`dist_checkpointing.mapping`. Two things differ on purpose: `flattened_range` works (a slice of the row-major flattened
local block, cut into boxes by `opt_checkpoint.boxes`), and a repeated axis in `from_rank_offsets` is refused.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError

ReplicaId: TypeAlias = int | tuple[int, ...]
Shape: TypeAlias = tuple[int, ...]
StateDict: TypeAlias = dict[Any, Any]
ShardedStateDict: TypeAlias = dict[Any, Any]
Path: TypeAlias = tuple[str | int, ...]  # the keys that lead to a value of a nested state
T = TypeVar("T")
EMPTY: Mapping[str, Any] = MappingProxyType({})  # the default of arguments


def with_axis(values: Shape, axis: int, value: int) -> Shape:
    """Return values per axis with another one at `axis`, if there is such an axis."""
    return tuple(value if d == axis else own for d, own in enumerate(values))


def items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a dict, or the positions and values of a list or tuple."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def path_text(path: Path) -> str:
    """Return a path as people write it: `optimizer.param_groups.0`."""
    return ".".join(map(str, path))


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a replica is the one that counts in coverage checks: `0`, or a tuple of zeros.

    Its rank writes an object. Of a tensor, any rank that holds a replica may write it.
    """
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


class Source(NamedTuple):
    """Where the data of a description is from. A module that is moved gets other tensors.

    Args:
        read: returns the tensor as it is now. Local, without a collective.
        local: its local values when they were last read.
    """

    read: Callable[[], Tensor]
    local: Tensor


class ShardIdentity(NamedTuple):
    """Identifies a piece of a global tensor: equal for two local shards that hold the same piece."""

    key: str
    global_offset: Shape
    flat: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a rank knows about a tensor of its model without knowing the groups.

    Args:
        name: in the model.
        tensor: the parameter or buffer.
        is_expert: whether each expert-parallel rank has another one (`allreduce=False`).
        is_cut: whether each tensor-parallel rank has another part (`tensor_model_parallel=True`).
        dim: the dim that is cut; None if it is not known.
        stride: into how many pieces each rank's part is cut (`partition_stride`).
        is_on_stages: whether several pipeline stages have a copy.
        list_name: the name of the outermost list of modules that contains the tensor; None without such a list.
        list_len: the number of its modules.
    """

    name: str
    tensor: Tensor
    is_expert: bool
    is_cut: bool
    dim: int | None
    stride: int
    is_on_stages: bool
    list_name: str | None
    list_len: int

    def problem(self) -> str:
        """Return what must be given before this may be saved or loaded on several ranks; empty if nothing."""
        if not (self.is_expert or self.is_cut):
            return ""
        kind = "an expert (allreduce=False)" if self.is_expert else "tensor parallel (tensor_model_parallel=True)"
        return (
            f"{self.name} is {kind}, and which part of the whole model this rank has is unknown without process "
            f"groups; pass sharded_model(model, groups=opt_stack.ProcessGroups(dp=..., tp=..., ...)), and the same "
            f"groups to sharded_optimizer and load_optimizer for an optimizer of torch; or pass the result of "
            f"sharded_model to optimizer.sharded_state_dict before the save or load"
        )


class ShardedBase(ABC):
    """Anything in a state dict that has a global name: `key`, `data`, `replica_id`."""

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointingException` when the fields contradict each other."""

    def without_data(self) -> Self:
        """Return the same description with `data=None`, cheap to send to another rank."""
        return dataclasses.replace(self, data=None)  # type: ignore[type-var]  # all subclasses are dataclasses


@dataclass(slots=True, eq=False)
class ShardedTensor(ShardedBase):
    """A rank's block of a global tensor, or a flat range of that block.

    Args:
        key: unique name of the *global* tensor.
        data: the local values, or None for a description without them. Shape `local_shape`; with `flattened_range`,
            1-D of its length.
        dtype: dtype of `data`.
        local_shape: shape of the local block, without prepended axes.
        global_shape: shape of the global tensor, with prepended axes.
        global_offset: first element of the block along every global axis, with prepended axes.
        axis_fragmentations: number of equal pieces along every global axis; None when the sharding is irregular.
        replica_id: 0 or all zeros for the main replica; by convention (pipeline, tensor, data) replica numbers.
        prepend_axis_num: number of leading global axes (layer, expert) that the local block lacks; its size there is 1.
        allow_shape_mismatch: the stored global shape may differ on load: the overlap is read, the rest becomes zero.
        flattened_range: `[start, stop)` of the row-major flattened local block that `data` holds.
        may_repeat: other ranks may hold this block as their main replica, too; one is saved if all values are equal.
        has_mains: an optimizer keeps or kept fp32 main values of this parameter. If they are stored and this is
            requested in fp32, they are read; if fp32 is stored, this may be requested in 16 bits.
        optional: leave this out if it is not stored, even if other missing keys are an error.
        marks: of a tensor of a model whose process groups are not known yet.
        source: if `data` is its `local`, a save or load reads the tensor again.

    Raises:
        CheckpointingException: the fields contradict each other (the checks run in Megatron-Core's order).
    """

    key: str
    data: Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: Shape
    global_shape: Shape
    global_offset: Shape
    axis_fragmentations: Shape | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None
    _: KW_ONLY
    may_repeat: bool = False
    has_mains: bool = False
    optional: bool = False
    marks: Marks | None = field(default=None, repr=False)
    source: Source | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.local_shape = tuple(self.local_shape)
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Check the fields against each other.

        Raises:
            CheckpointingException: dtype, shapes, offsets, fragmentation or flat range do not fit.
        """
        data = self.data
        flat = self.flattened_range
        key = self.key
        block = self.global_block_shape
        local = self.local_shape
        whole = self.global_shape
        offset = self.global_offset
        if data is not None and data.dtype != self.dtype:
            raise CheckpointValueError(f"Data dtype should match `dtype`: {data.dtype} is not {self.dtype} ({key})")
        if data is not None and flat is None and tuple(data.shape) != local:
            raise CheckpointValueError(f"Data shape {tuple(data.shape)} does not match local_shape {local} ({key})")
        if not len(whole) == len(offset) == len(block):
            raise CheckpointValueError(
                f"Global shape {whole}, global offset {offset} and local shape {local} with {self.prepend_axis_num} "
                f"prepended axes must have as many axes as each other ({key})"
            )
        if self.axis_fragmentations is not None:
            for start, size in list(zip(offset, block))[self.prepend_axis_num :]:
                if size != 0 and start % size != 0:
                    raise CheckpointValueError(
                        f"Global offset ({start}) must be divisible by local shape ({size}) ({key}); "
                        f"for uneven sharding pass axis_fragmentations=None"
                    )
        if any(o < 0 or o + n > g for o, n, g in zip(offset, block, whole)):
            raise CheckpointValueError(
                f"Block of shape {block} at {offset} lies outside the global shape {whole} ({key})"
            )
        if flat is not None:
            start, stop = flat_bounds(flat)
            if flat.step not in (None, 1) or not 0 <= start <= stop <= math.prod(local):
                raise CheckpointValueError(
                    f"flattened_range {flat} must be [start, stop) with step 1 within the {math.prod(local)} elements "
                    f"of the local block ({key})"
                )
            if data is not None and tuple(data.shape) != (stop - start,):
                raise CheckpointValueError(
                    f"Data of a flattened_range of {stop - start} elements must be 1-D of that length, "
                    f"not {tuple(data.shape)} ({key})"
                )

    @property
    def global_block_shape(self) -> Shape:
        """Shape of the local block with its prepended axes (of size 1)."""
        return (1,) * self.prepend_axis_num + self.local_shape

    @property
    def identity(self) -> ShardIdentity:
        """Key, offset and flat bounds: equal for replicas of one shard, different otherwise."""
        flat = None if self.flattened_range is None else flat_bounds(self.flattened_range)
        return ShardIdentity(self.key, self.global_offset, flat)

    def without_data(self) -> Self:
        """Return the same description with `data=None`."""
        return dataclasses.replace(self, data=None, marks=None, source=None)

    def init_data(self, device: torch.device | str, init_fn: Callable[..., Tensor] = torch.empty) -> None:
        """Allocate `data` if it is None. Writes only `self.data`."""
        if self.data is not None:
            return
        shape = self.local_shape
        if self.flattened_range is not None:
            start, stop = flat_bounds(self.flattened_range)
            shape = (stop - start,)
        self.data = init_fn(shape, dtype=self.dtype, device=device)

    def flat(self, data: Tensor | None, start: int, stop: int) -> ShardedTensor:
        """Return the elements `[start, stop)` of this block's row-major order, held by `data` (1-D, of any dtype)."""
        if self.flattened_range is not None:
            raise CheckpointValueError(f"{self.key} is a flat range already; take the range from the whole block")
        dtype = self.dtype if data is None else data.dtype
        return dataclasses.replace(self, data=data, dtype=dtype, flattened_range=slice(start, stop))

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Return a regular shard from `(axis, index, fragments)` triples; axes count the prepended ones.

        Describes whole blocks: for a flat range, call `flat` on the result.

        Raises:
            CheckpointingException: a triple is out of range, or an axis is given twice.
        """
        block = (1,) * prepend_axis_num + tuple(data.shape)
        fragments = [1] * len(block)
        offset = [0] * len(block)
        seen = set[int]()
        for axis, index, count in rank_offsets:
            if not 0 <= axis < len(block) or index < 0 or count < 1 or index >= count:
                raise CheckpointValueError(
                    f"Invalid rank offsets: (axis {axis}, index {index}, fragments {count}) of {key}; "
                    f"axis must be below {len(block)} and index below fragments"
                )
            if axis in seen:
                raise CheckpointValueError(f"Invalid rank offsets: axis {axis} of {key} is given twice")
            seen.add(axis)
            fragments[axis] = count
            offset[axis] = index * block[axis]
        return cls(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=tuple(f * n for f, n in zip(fragments, block)),
            global_offset=tuple(offset),
            axis_fragmentations=tuple(fragments),
            replica_id=replica_id,
            prepend_axis_num=prepend_axis_num,
            **init_kwargs,
        )

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Return the shard of the global tensor in which every rank keeps `[start, start+length)` of local axis `dim`.

        Args:
            dim: axis of the local block (prepended axes not counted).
            start: first row kept, of every rank's block.
            length: number of rows kept.

        Raises:
            CheckpointingException: the axis does not exist or is not cut into equal blocks, or this is a flat range.
        """
        axis = dim + self.prepend_axis_num
        local = self.local_shape
        size = local[dim] if 0 <= dim < len(local) and self.flattened_range is None else 0
        if not (size and 0 <= start <= start + length <= size):
            raise CheckpointValueError(
                f"narrow({dim}, {start}, {length}) needs a whole block with these rows along an axis, counted from 0; "
                f"{self.key} has {local}"
            )
        if self.global_shape[axis] % size or self.global_offset[axis] % size:
            raise CheckpointValueError(f"axis {axis} of {self.key} is not cut into equal blocks of {size}")

        data = None if self.data is None else self.data.narrow(dim, start, length)
        shape = with_axis(local, dim, length)
        whole = with_axis(self.global_shape, axis, self.global_shape[axis] // size * length)
        offset = with_axis(self.global_offset, axis, self.global_offset[axis] // size * length)
        return [dataclasses.replace(self, data=data, local_shape=shape, global_shape=whole, global_offset=offset)]


def flat_bounds(flat: slice) -> tuple[int, int]:
    """Start and stop of a flat range; a missing start is 0."""
    return (flat.start or 0), flat.stop


@dataclass(slots=True, eq=False)
class ShardedObject(ShardedBase):
    """A value that is not a tensor: one shard of a grid of such values, which cannot be resharded.

    Args:
        key: unique name of the grid.
        data: the value. It must survive `torch.save` and `torch.load(weights_only=True)`.
        global_shape: shape of the grid, counted in shards.
        global_offset: position of this shard in the grid.
        replica_id: see `ShardedTensor`.

    Raises:
        CheckpointingException: shape and offset differ in length, or the offset lies outside the grid.
    """

    key: str
    data: object
    global_shape: Shape
    global_offset: Shape
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise `CheckpointingException` if shape and offset do not match. A size of -1 is unknown."""
        shape = self.global_shape
        offset = self.global_offset
        if len(shape) != len(offset):
            raise CheckpointValueError(f"Global shape {shape} and offset {offset} differ in length ({self.key})")
        if any(o < 0 or o >= n != -1 for o, n in zip(offset, shape)):
            raise CheckpointValueError(f"Offset {offset} lies outside the grid of shape {shape} ({self.key})")

    @property
    def unique_key(self) -> str:
        """Name of this shard on disk: `key/shard_OFFSET_SHAPE`, as `rng/shard_3.0_4.2`."""
        return f"{self.key}/shard_{path_text(self.global_offset)}_{path_text(self.global_shape)}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the description, without data, that has this `unique_key`; the key itself may contain slashes.

        Raises:
            CheckpointingException: the text does not have the form `key/shard_OFFSET_SHAPE`.
        """
        key, _, shard = unique_key.rpartition("/")
        parts = shard.split("_")
        try:
            if not key or len(parts) != 3 or parts[0] != "shard":
                raise ValueError
            offset, shape = (tuple(int(x) for x in p.split(".") if x) for p in parts[1:])
        except ValueError:
            raise CheckpointValueError(f"{unique_key!r} does not have the form key/shard_OFFSET_SHAPE") from None
        if len(shape) + 1 == len(offset):  # an early form of the name left the last size out
            shape = (*shape, -1)
        return cls(key, None, shape, offset, replica_id)


class LocalNonpersistentObject(Generic[T]):
    """A value that is not stored. Loading returns this rank's own value in its place."""

    __slots__ = ("obj",)

    def __init__(self, obj: T) -> None:
        self.obj = obj

    def unwrap(self) -> T:
        """Return the value."""
        return self.obj
