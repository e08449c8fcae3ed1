"""Reads files of other programs for conversion. Errors are one sentence, and no code in a file is run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike
from opt_checkpoint.store.paths import local_path

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


def read_names(file: PathLike) -> list[str]:
    """A JSON list of names.

    Raises:
        CheckpointingException: it is not a JSON list of names.
    """
    names = _read_list(file, "names")
    if not all(isinstance(name, str) for name in names):
        raise CheckpointValueError(f"{file} is not a JSON list of names: {names!r:.200}")
    return names


def read_rows(file: PathLike, row: Callable[..., T]) -> list[T]:
    """A JSON list of objects, each made into `row(**fields)`; lists among the fields become tuples.

    Raises:
        CheckpointingException: it is not a JSON list of objects, or an object has other fields.
    """
    made = []
    for number, fields in enumerate(_read_list(file, "objects")):
        try:
            made.append(row(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}))
        except (TypeError, AttributeError) as error:
            raise CheckpointValueError(f"{file}: entry {number} is {fields!r:.200}: {error}") from None
    return made


def _read_list(file: PathLike, of: str) -> list[Any]:
    try:
        rows = json.loads(Path(file).read_text())
    except ValueError as error:
        raise CheckpointValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise CheckpointValueError(f"{file} holds a {type(rows).__name__}, not a JSON list of {of}")
    return rows
