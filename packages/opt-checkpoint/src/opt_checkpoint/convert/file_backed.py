"""Tensors in memory-mapped files, so that stored tensors of any size can be read with little memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from opt_checkpoint.disk.index import CheckpointIndex, StoredTensor
from opt_checkpoint.errors import CheckpointKeyError
from opt_checkpoint.run.save_load import load
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.sharded import Shape
from opt_checkpoint.store import AnyPath, location_of
from opt_checkpoint.store.paths import folder_beside


def scratch_folder(target: AnyPath) -> tempfile.TemporaryDirectory[str]:
    """An empty folder next to a target; for a target in an object store, in the system's folder for temporary files."""
    beside = folder_beside(location_of(target))
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=beside, prefix=".scratch-")


def mapped_file(file: Path, nbytes: int) -> Tensor:
    """The bytes of a file as a tensor; writing to it writes to the file. Creates or extends the file as needed."""
    with file.open("ab"):
        os.truncate(file, max(nbytes, 1))
    return torch.from_file(str(file), shared=True, size=max(nbytes, 1), dtype=torch.uint8)


def array_in(memory: Tensor, start: int, dtype: torch.dtype, shape: Shape) -> Tensor:
    """A tensor in the bytes of a mapped file from `start` on, which is a multiple of the element size."""
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[start : start + nbytes].view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def mapped_apart(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """One tensor per name, each in its own file. Each has its own storage, because `torch.save` writes whole
    storages."""
    return {
        name: array_in(mapped_file(folder / str(number), tensor.nbytes), 0, tensor.dtype, tensor.shape)
        for number, (name, tensor) in enumerate(stored.items())
    }


def read_into(index: CheckpointIndex, targets: Mapping[str, Tensor]) -> None:
    """Read whole stored tensors into the tensors given by key, in one process.

    Raises:
        CheckpointingException: as `load`.
    """
    load({key: whole_tensor(key, tensor) for key, tensor in targets.items()}, index.path)


def select(index: CheckpointIndex, keys: list[str]) -> dict[str, StoredTensor]:
    """The stored tensors of some keys.

    Raises:
        CheckpointKeyError: one is not stored.
    """
    absent = [key for key in keys if key not in index.tensors]
    if absent:
        raise CheckpointKeyError(f"{index.path} does not hold {', '.join(absent[:8])}")
    return {key: index.tensors[key] for key in keys}
