"""Names of dtypes, as used in files and in torch's own format; and DTensors, whose local values are described as a
block of the global tensor."""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.state.sharded import ReplicaId, Shape, ShardedTensor, Source

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

STORAGE_CLASSES: Mapping[torch.dtype, str] = MappingProxyType({
    torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
    torch.int16: "ShortStorage", torch.int8: "CharStorage", torch.uint8: "ByteStorage", torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage", torch.complex128: "ComplexDoubleStorage",
})  # fmt: skip
# The last two are in newer versions of torch. Two values of float4_e2m1fn_x2 share a byte and count as one element.
_UNTYPED = (
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz uint16 uint32 uint64 complex32 "
    "float8_e8m0fnu float4_e2m1fn_x2"
)
_BY_NAME: Mapping[str, torch.dtype] = MappingProxyType({
    **{str(dtype).removeprefix("torch."): dtype for dtype in STORAGE_CLASSES},
    **{name: getattr(torch, name) for name in _UNTYPED.split() if hasattr(torch, name)},
})  # fmt: skip
DTYPE_NAMES = MappingProxyType({dtype: name for name, dtype in _BY_NAME.items()})
BY_STORAGE_CLASS = MappingProxyType({name: dtype for dtype, name in STORAGE_CLASSES.items()})


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a name found in a file.

    Raises:
        CheckpointCorruptError: no dtype has this name.
    """
    if name not in _BY_NAME:
        raise CheckpointCorruptError(f"dtype {name!r} is not known; known are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]


def check_dense(key: str, tensor: Tensor) -> None:
    """Raise CheckpointMismatchError unless a tensor has values in dense memory."""
    if tensor.is_meta:
        raise CheckpointMismatchError(
            f"{key} is on the meta device, without values; materialise it first, as model.to_empty(device=...) does"
        )
    if tensor.layout is not torch.strided:
        raise CheckpointMismatchError(
            f"{key} has layout {tensor.layout}; only dense tensors are supported, so pass tensor.to_dense()"
        )


def converts_exactly(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether every value of one dtype has an equal value in the other: the same dtype, or a wider one of its
    kind."""
    if stored == wanted:
        return True
    try:
        if stored.is_floating_point and wanted.is_floating_point:
            held = torch.finfo(stored)
            other = torch.finfo(wanted)
            return held.eps >= other.eps and held.max <= other.max and held.smallest_normal >= other.smallest_normal
        narrow = torch.iinfo(stored)
        wide = torch.iinfo(wanted)
        return narrow.min >= wide.min and narrow.max <= wide.max
    except (TypeError, NotImplementedError):  # not both integers; or float4, of which torch knows no range
        return False


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor object that a DTensor holds; any other tensor is returned unchanged.

    `to_local()` creates a new tensor if gradients are enabled, and from torch 2.13 on for every parameter, so it cannot
    be used to compare identities.
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor. Does not import their module: without it no DTensor exists."""
    # While another thread imports it, as a save in the background does, the module has no DTensor yet.
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def sharded_like(key: str, tensor: Tensor, *, replica_id: ReplicaId = 0) -> ShardedTensor:
    """Return a tensor as a `ShardedTensor` under `key`, laid out by its DTensor placements, or whole if it is a plain
    tensor.

    Args:
        key: name of the global tensor.
        tensor: a DTensor (any uneven sharding), or a plain tensor held whole by this rank. Its local values are shared.
        replica_id: replica number of a plain tensor, such as the data-parallel rank under DDP; a DTensor has its own.

    Raises:
        CheckpointingException: the local values are not one block, or are partial sums. With FSDP2 and tensor
            parallelism on one axis (`_StridedShard`) they are one block, unless an uneven axis makes it ambiguous.
    """
    shape = tuple(tensor.shape)
    zeros = (0,) * tensor.dim()
    if not is_dtensor(tensor):
        return ShardedTensor(key, tensor, tensor.dtype, shape, shape, zeros, (1,) * tensor.dim(), replica_id)
    local = local_tensor(tensor)
    offset = _offset_of(key, tensor)
    # A mesh that is a part of the world, such as `mesh["dp"]` of dp and tp, does not describe replicas outside it.
    replica = tuple(c for c, p in zip(_coordinate(tensor), tensor.placements) if p.is_replicate())
    return ShardedTensor(
        key=key,
        data=local,
        dtype=local.dtype,
        local_shape=tuple(local.shape),
        global_shape=shape,
        global_offset=offset if local.numel() else zeros,
        axis_fragmentations=None,
        replica_id=replica or 0,
        may_repeat=tensor.device_mesh.size() < dist.get_world_size(),
        source=Source(partial(_itself, tensor), local),
    )


def _itself(tensor: Tensor) -> Tensor:
    """The argument; a partial function of it can be copied, unlike a closure."""
    return tensor


def empty_like_sharded(param: DTensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Allocate a state of a DTensor parameter whose shape is not the parameter's, as a DTensor on its mesh.

    An axis of the parameter that the state keeps, such as the rows of a factored second moment of shape (rows, 1) or
    (rows,), is sharded like the parameter's. All others are replicated.
    """
    from torch.distributed.tensor import Replicate, Shard, empty

    axes = [_kept_axis(p.dim, tuple(param.shape), shape) if type(p) is Shard else None for p in param.placements]
    placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
    return empty(shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)


def _kept_axis(axis: int, param: Shape, state: Shape) -> int | None:
    """The axis of a state that is the axis `axis` of its parameter; None if it is reduced or cannot be identified."""
    if len(state) == len(param):
        is_factor = all(n in (1, own) for n, own in zip(state, param))
        return axis if is_factor and state[axis] == param[axis] else None
    reduced = [d for d in range(len(param)) if param[:d] + param[d + 1 :] == state]
    is_kept = len(reduced) == 1 and reduced[0] != axis
    return axis - (reduced[0] < axis) if is_kept else None


def _offset_of(key: str, tensor: DTensor) -> Shape:
    """Offset of the local values in the global tensor.

    Compares exact types, because `_StridedShard` subclasses `Shard` only in some versions of torch.
    """
    from torch.distributed.tensor import Replicate, Shard

    kinds = {type(placement) for placement in tensor.placements}
    if kinds <= {Shard, Replicate}:
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim()
    if not all(kind in (Shard, Replicate) or kind.__name__ == "_StridedShard" for kind in kinds):
        raise CheckpointValueError(
            f"{key} is placed as {tuple(tensor.placements)}; only Shard and Replicate are a block of the global "
            f"tensor. Redistribute it first: tensor.redistribute(placements=[Shard(0), ...])"
        )
    coordinate = _coordinate(tensor)
    cuts: dict[int, list[Cut]] = defaultdict(list)  # of each axis of the tensor
    for axis, placement in enumerate(tensor.placements):
        if hasattr(placement, "dim"):
            size = tensor.device_mesh.size(axis)
            cuts[placement.dim].append(Cut(coordinate[axis], size, getattr(placement, "split_factor", 1)))
    runs = [one_run(length, *cuts[dim]) for dim, length in enumerate(tensor.shape)]
    sizes = tuple(local_tensor(tensor).shape)
    if any(run is None or len(run) != n for run, n in zip(runs, sizes, strict=True)):
        raise CheckpointValueError(
            f"{key} of shape {tuple(tensor.shape)} is placed as {tuple(tensor.placements)}, and its local values "
            f"{sizes} may not be one block of it. Make every cut of its axes even, or redistribute it first: "
            f"tensor.redistribute(placements=[Shard(0), ...])"
        )
    return tuple(run.start for run in runs if run is not None)


def _coordinate(tensor: DTensor) -> Sequence[int]:
    """The position of this rank on the tensor's mesh."""
    coordinate: Sequence[int] | None = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointValueError("this rank is not on the tensor's device mesh")
    return coordinate


class Cut(NamedTuple):
    """The cut of a tensor's axis by one axis of a mesh: this rank has part `number` of `size`.

    Args:
        number: of the part.
        size: how many there are.
        split_factor: 1, or into how many runs the axis is first cut; the part is then that of each of these.
    """

    number: int
    size: int
    split_factor: int = 1


@cache
def one_run(length: int, *cuts: Cut) -> range | None:
    """Return the rows of an axis that are here, if those of every rank are one run however the placements are read.

    Else None, on every rank. Read from left to right, a strided cut takes a part of each of several runs, of which the
    cuts to its right leave one. FSDP2 on tensor-parallel parameters cuts in the other order. If parts are uneven, the
    two orders can give different rows, and the layout in memory is ambiguous.
    """
    size = math.prod(cut.size for cut in cuts)
    if length % size == 0 and all(size // cut.size % cut.split_factor == 0 for cut in cuts):
        return _run_of(length, cuts)  # parts are even, so that the answer is the same everywhere
    for numbers in itertools.product(*(range(cut.size) for cut in cuts)):
        there = [cut._replace(number=number) for cut, number in zip(cuts, numbers, strict=True)]
        if _run_of(length, there) is None:
            return None
    return _run_of(length, cuts)


def _run_of(length: int, cuts: Sequence[Cut]) -> range | None:
    as_placed = _rows(length, cuts)
    plain = [cut for cut in cuts if cut.split_factor == 1]
    as_made = _rows(length, [*plain, *(cut._replace(split_factor=1) for cut in cuts if cut.split_factor > 1)])
    if not torch.equal(as_placed, as_made):
        return None
    run = range(int(as_made[0]), int(as_made[-1]) + 1) if len(as_made) else range(0)
    return run if len(run) == len(as_made) else None


def _rows(length: int, cuts: Sequence[Cut]) -> Tensor:
    rows = torch.arange(length, dtype=torch.int64, device="cpu")
    for cut in cuts:
        runs = [_part(rows, k, cut.split_factor) for k in range(cut.split_factor)]
        rows = torch.cat([_part(run, cut.number, cut.size) for run in runs])
    return rows


def _part(rows: Tensor, number: int, size: int) -> Tensor:
    """Like `torch.chunk` cuts."""
    each = -(-len(rows) // size)
    return rows[number * each : (number + 1) * each]
