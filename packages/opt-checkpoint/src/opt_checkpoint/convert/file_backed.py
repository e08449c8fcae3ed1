"""Tensors whose memory is a file, and stored tensors read into them: of any size, with little memory."""

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
from opt_checkpoint.objects.path import AnyPath, ObjectPath, location_of
from opt_checkpoint.run.save_load import load
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.sharded import Shape


def scratch_folder(target: AnyPath) -> tempfile.TemporaryDirectory[str]:
    """An empty folder beside a target, or where the system keeps temporary files for one in an object store."""
    place = location_of(target)
    beside = None if isinstance(place, ObjectPath) else place.parent
    return tempfile.TemporaryDirectory(dir=beside, prefix=".scratch-")


def mapped_file(file: Path, nbytes: int) -> Tensor:
    """The bytes of a file, made or grown as needed, as a tensor; writing it writes the file."""
    with file.open("ab"):
        os.truncate(file, max(nbytes, 1))
    return torch.from_file(str(file), shared=True, size=max(nbytes, 1), dtype=torch.uint8)


def array_in(memory: Tensor, start: int, dtype: torch.dtype, shape: Shape) -> Tensor:
    """A tensor on bytes of a mapped file from `start` on, a multiple of the size of an element."""
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[start : start + nbytes].view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)


def mapped_apart(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """One tensor per name, each with a file and so a storage of its own, which `torch.save` then writes alone."""
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
