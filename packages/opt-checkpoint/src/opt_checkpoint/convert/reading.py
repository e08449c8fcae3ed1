"""Reads checkpoints and files of other programs in one process, to convert, compare and show them.

Tensors are in mapped scratch files, or read in pieces, so that little memory is needed. Errors are one sentence, and no
code in a file is run.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from opt_checkpoint.boxes import Box, split_rows
from opt_checkpoint.dcp.layout import fingerprint
from opt_checkpoint.disk.checkpoint import Opened, check_sizes, read_object, size_problems
from opt_checkpoint.disk.index import CheckpointIndex, Kind, StoredTensor
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike, load_alone, read_tensors
from opt_checkpoint.state.checksums import bits_of
from opt_checkpoint.state.sharded import ShardedTensor
from opt_checkpoint.store import AnyPath, location_of
from opt_checkpoint.store.paths import local_path

T = TypeVar("T")
_PIECE_BYTES = 64 << 20


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
        raise CheckpointCorruptError(f"{file} holds more than tensors and values; nothing of it was run") from error
    except Exception as error:  # torch raises many exception types on files that it did not write
        cause = str(error).strip().partition("\n")[0]
        raise CheckpointCorruptError(f"{file} cannot be read by torch.load(weights_only=True): {cause}") from error


def read_list(file: PathLike, of: type[T], what: str) -> list[T]:
    """Return a JSON list of values of one type; `what` names them in errors.

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
    """Return a JSON list of objects, each made into `row(**fields)`; lists among the fields become tuples.

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


@contextmanager
def scratch_folder(target: AnyPath) -> Iterator[Path]:
    """Provide an empty folder next to a target; for a target in an object store, in the system's folder for temporary
    files."""
    location = location_of(target)
    beside = location.parent if isinstance(location, Path) else None
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside, prefix=".scratch-") as folder:
        yield Path(folder)


def read_mapped(index: CheckpointIndex, stored: Mapping[str, StoredTensor], folder: Path) -> dict[str, Tensor]:
    """Read whole stored tensors. Each is in memory that is a new file in `folder`: `torch.save` writes whole storages.

    Raises:
        CheckpointingException: as `load`.
    """
    if index.kind is not Kind.SAFETENSORS:  # its files may be links
        check_sizes(index)
    mapped = {}
    for number, (key, tensor) in enumerate(stored.items()):
        nbytes = tensor.nbytes
        memory = torch.from_file(str(folder / str(number)), shared=True, size=max(nbytes, 1), dtype=torch.uint8)
        # `torch.load` refuses an archive with memory that an empty tensor does not need.
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        mapped[key] = memory[:nbytes].view(tensor.dtype).view(tensor.shape) if nbytes else empty
    load_alone(mapped, Opened(index=index, common={}))
    return mapped


def read_whole(index: CheckpointIndex, key: str) -> Tensor:
    """Read one whole stored tensor to the CPU.

    Raises:
        CheckpointingException: as `load`.
    """
    return read_tensors(Opened(index=index, common={}), [key])[key]


class Difference(NamedTuple):
    """A key, and how the two checkpoints differ in it."""

    key: str
    text: str


def differences(first: CheckpointIndex, second: CheckpointIndex, *, rtol: float = 0.0) -> Iterator[Difference]:
    """Yield the differences between two checkpoints, which may be sharded differently.

    Args:
        first: a checkpoint.
        second: the checkpoint to compare it with.
        rtol: allowed difference as a fraction of the value in `second`; 0 requires equal bits (NaNs included).
    """
    for which, index in (("first", first), ("second", second)):
        for file, problem in size_problems(index.path, index.files).items():
            yield Difference(file, f"damaged in the {which}: {problem}")
    for key in sorted(first.tensors.keys() | second.tensors.keys()):
        a = first.tensors.get(key)
        b = second.tensors.get(key)
        if a is None or b is None:
            yield Difference(key, f"only in the {'second' if a is None else 'first'}")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(key, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        else:
            yield from _value_differences(first, second, key, rtol)
    for key in sorted(first.objects.keys() | second.objects.keys()):
        if key not in first.objects or key not in second.objects:
            yield Difference(key, f"only in the {'first' if key in first.objects else 'second'}")
            continue
        try:
            if fingerprint(read_object(first, key)) != fingerprint(read_object(second, key)):
                yield Difference(key, "the stored objects differ")
        except CheckpointCorruptError as error:
            yield Difference(key, f"damaged: {error}")


def _value_differences(first: CheckpointIndex, second: CheckpointIndex, key: str, rtol: float) -> Iterator[Difference]:
    differing = 0
    largest = 0.0
    nans = [0, 0]  # elements that are NaN in one checkpoint only
    stored = first.tensors[key]
    rows = -(-stored.nbytes // _PIECE_BYTES)
    for piece in split_rows(Box.whole(stored.shape), rows) if rows else ():
        values = []
        for which, index in (("first", first), ("second", second)):
            data = torch.empty(piece.sizes, dtype=stored.dtype, device="cpu")
            wanted = ShardedTensor(key, data, stored.dtype, piece.sizes, stored.shape, piece.offsets, None)
            try:
                load_alone({"": wanted}, Opened(index=index, common={}))
                values.append(data)
            except CheckpointCorruptError as error:
                yield Difference(key, f"damaged in the {which}: {error}")
                return
        a, b = values
        wide = torch.complex128 if a.is_complex() else torch.float64
        if rtol:
            differs = ~torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=0.0, equal_nan=True)
        else:
            has_other_bits = (bits_of(a) != bits_of(b)).view(a.numel(), -1)  # complex elements have two parts
            differs = has_other_bits.any(dim=1).view(a.shape)
        differing += int(differs.sum())
        a = a[differs].to(wide)
        b = b[differs].to(wide)
        nans[0] += int((a.isnan() & ~b.isnan()).sum())
        nans[1] += int((b.isnan() & ~a.isnan()).sum())
        gaps = (a - b).abs()
        gaps = gaps[~gaps.isnan()]  # infinite where an infinity meets another number
        if gaps.numel():
            largest = max(largest, float(gaps.max()))
    if differing:
        only = [f"; {count} NaN only in the {which}" for which, count in zip(("first", "second"), nans) if count]
        gap = f", by up to {largest:.3g}" if differing > sum(nans) else ""
        yield Difference(key, f"{differing} elements differ{gap}{''.join(only)}")
