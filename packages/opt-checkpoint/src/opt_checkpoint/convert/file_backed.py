"""Tensors whose memory is a file, and stored tensors read into them: of any size, with little memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from opt_checkpoint.disk.index import CheckpointIndex, StoredTensor
from opt_checkpoint.errors import CheckpointKeyError
from opt_checkpoint.run.save_load import load
from opt_checkpoint.state.dtensor import whole_tensor


def mapped_tensors(file: Path, stored: Mapping[str, StoredTensor], *, start: int = 0) -> dict[str, Tensor]:
    """One tensor per name, one behind the other in a file from byte `start` on; writing them writes the file.

    Args:
        file: made or grown as needed.
        stored: shapes and dtypes, ordered by falling size of an element, so that each is aligned.
        start: a multiple of 8.
    """
    total = start + sum(t.nbytes for t in stored.values())
    with file.open("ab"):
        os.truncate(file, max(total, 1))
    memory = torch.from_file(str(file), shared=True, size=max(total, 1), dtype=torch.uint8)
    tensors, position = {}, start
    for name, tensor in stored.items():
        raw = memory[position : position + tensor.nbytes]
        empty = torch.zeros(tensor.shape, dtype=tensor.dtype)
        tensors[name] = raw.view(tensor.dtype).view(tensor.shape) if tensor.nbytes else empty
        position += tensor.nbytes
    return tensors


def mapped_apart(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """One tensor per name, each with a file and so a storage of its own, which `torch.save` then writes alone."""
    return {
        name: mapped_tensors(folder / str(number), {name: tensor})[name]
        for number, (name, tensor) in enumerate(stored.items())
    }


def by_alignment(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same tensors, largest elements first, then by name."""
    return dict(sorted(stored.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


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
