"""Reads files of other programs for conversion, and maps scratch files, so that little memory is needed.

Errors are one sentence, and no code in a file is run."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from opt_checkpoint.disk.index import CheckpointIndex, StoredTensor
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike, load
from opt_checkpoint.state.tensors import sharded_like
from opt_checkpoint.store import AnyPath, location_of
from opt_checkpoint.store.paths import folder_beside, local_path

T = TypeVar("T")


def load_torch_file(file: PathLike) -> Any:
    """Load a file of `torch.save` by `torch.load(weights_only=True)`. Tensors are mapped, not read into memory.

    Raises:
        CheckpointCorruptError: it was not written by `torch.save`, or loading it would run code.
        CheckpointingException: it is a URL.
        OSError: it cannot be read.
    """
    try:
        return torch.load(local_path(file, "a file to convert"), map_location="cpu", weights_only=True, mmap=True)
    except (OSError, CheckpointingException):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointCorruptError(
            f"{file} holds more than tensors and plain values; nothing of it was run"
        ) from error
    except Exception as error:  # torch raises many exception types on files that it did not write
        cause = str(error).strip().partition("\n")[0]
        raise CheckpointCorruptError(f"{file} cannot be read by torch.load(weights_only=True): {cause}") from error


def read_list(file: PathLike, of: type[T], what: str) -> list[T]:
    """A JSON list of values of one type; `what` names them in errors.

    Raises:
        CheckpointingException: it is not such a list.
    """
    try:
        rows = json.loads(Path(file).read_text())
    except ValueError as error:
        raise CheckpointValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise CheckpointValueError(f"{file} holds a {type(rows).__name__}, not a JSON list of {what}")
    for number, row in enumerate(rows):
        if not isinstance(row, of):
            raise CheckpointValueError(f"{file} is not a JSON list of {what}: entry {number} is {row!r:.200}")
    return rows


def read_rows(file: PathLike, row: Callable[..., T]) -> list[T]:
    """A JSON list of objects, each made into `row(**fields)`; lists among the fields become tuples.

    Raises:
        CheckpointingException: it is not a JSON list of objects, or an object has other fields.
    """
    made = []
    for number, fields in enumerate(read_list(file, dict, "objects")):
        try:
            made.append(row(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}))
        except TypeError as error:
            raise CheckpointValueError(f"{file}: entry {number} is {fields!r:.200}: {error}") from None
    return made


def scratch_folder(target: AnyPath) -> tempfile.TemporaryDirectory[str]:
    """An empty folder next to a target; for a target in an object store, in the system's folder for temporary files."""
    beside = folder_beside(location_of(target))
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=beside, prefix=".scratch-")


def mapped_apart(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """One tensor per name, in memory that is a new file of its own: `torch.save` writes whole storages."""
    mapped = {}
    for number, (name, tensor) in enumerate(stored.items()):
        file, nbytes = folder / str(number), tensor.nbytes
        with file.open("xb"):
            os.truncate(file, max(nbytes, 1))
        memory = torch.from_file(str(file), shared=True, size=max(nbytes, 1), dtype=torch.uint8)
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        mapped[name] = memory[:nbytes].view(tensor.dtype).view(tensor.shape) if nbytes else empty
    return mapped


def read_into(index: CheckpointIndex, targets: Mapping[str, Tensor]) -> None:
    """Read whole stored tensors into the tensors given by key, in one process.

    Raises:
        CheckpointingException: as `load`.
    """
    load({key: sharded_like(key, tensor) for key, tensor in targets.items()}, index.path)
