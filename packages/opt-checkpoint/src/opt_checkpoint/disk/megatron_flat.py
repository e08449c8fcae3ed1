"""Tensors that Megatron-Core 0.13 and earlier stored as flattened blocks (`fully_sharded_model_space`).

Such a tensor is stored with another shape: one axis per axis of the parameter, counted in blocks, and a last axis for
the elements of a flattened block. A chunk is a run of elements of one block. It is cut here into boxes of the
parameter, so that any layout can load it. The parameter's shape is in the `mcore_data` of `.metadata`.
"""

from __future__ import annotations

from collections.abc import Iterator

from opt_checkpoint.boxes.box import cut_flat_range
from opt_checkpoint.disk.index import StoredChunk, StoredTensor
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.sharded import Shape


def unflattened(key: str, stored: StoredTensor, shape: Shape) -> StoredTensor:
    """The tensor in the parameter's shape, with its chunks cut into boxes.

    Args:
        key: for error messages.
        stored: as listed in `.metadata`, with the shape `(blocks per axis..., elements of a block)`.
        shape: the parameter's.

    Raises:
        CheckpointCorruptError: the two shapes do not fit.
    """
    blocks = stored.shape[:-1]
    fits = len(blocks) == len(shape) and all(b and n % b == 0 for n, b in zip(shape, blocks))
    if not fits or any(n != 1 for chunk in stored.chunks for n in chunk.box.sizes[:-1]):
        raise CheckpointCorruptError(
            f"{key} is stored as flattened blocks of shape {list(stored.shape)}, which do not fit {list(shape)}"
        )
    block = tuple(n // b for n, b in zip(shape, blocks))
    chunks = tuple(box for chunk in stored.chunks for box in _boxes(chunk, block))
    return StoredTensor(shape=shape, dtype=stored.dtype, chunks=chunks)


def _boxes(chunk: StoredChunk, block: Shape) -> Iterator[StoredChunk]:
    *position, start = chunk.box.offsets
    corner = tuple(p * n for p, n in zip(position, block))
    first = 0
    for box in cut_flat_range(block, start, start + chunk.box.sizes[-1]):
        yield StoredChunk(box=box.moved(corner), place=chunk.place, archived=chunk.box.sizes, first=first)
        first += box.numel
