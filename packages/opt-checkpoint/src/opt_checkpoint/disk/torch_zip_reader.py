"""Finding the values inside a `torch.save` archive that somebody else wrote, without running its pickle.

A stock chunk is a zip whose `data.pkl` says which storage the tensor views and how. Where that is a contiguous tensor
from the storage's first element, its values are one run of bytes of the file and can be read in part; where it is
not, the archive is loaded whole.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from opt_checkpoint.boxes.box import row_major_strides
from opt_checkpoint.disk.dtype_names import dtype_of_storage_class
from opt_checkpoint.disk.index import ByteRange
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException
from opt_checkpoint.state.sharded import Shape


class ReadAt(Protocol):
    """Reads `nbytes` at `start` of one file."""

    def __call__(self, start: int, nbytes: int) -> bytes: ...


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    name: str


class _View(NamedTuple):
    """A tensor as its pickle tells it."""

    storage: _Storage
    offset: int
    shape: Shape
    strides: Shape
    dtype: torch.dtype | None


def _rebuilt(storage: _Storage, offset: int, shape: Shape, strides: Shape, *rest: Any) -> _View:
    """Takes the arguments of torch's own rebuild functions; the third form names the dtype last."""
    named = next((x for x in rest if isinstance(x, torch.dtype)), None)
    return _View(storage, offset, tuple(shape), tuple(strides), named or storage.dtype)


class _Describe(pickle.Unpickler):
    """Reads the pickle of one tensor as a description, and knows nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return _rebuilt
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise CheckpointCorruptError(f"a stored tensor names {module}.{name}; nothing was run")

    def persistent_load(self, pid: Any) -> _Storage:
        return _Storage(dtype_of_storage_class(pid[1]), str(pid[2]))


class _Slice(io.RawIOBase):
    """A run of a file as a file of its own."""

    def __init__(self, read: ReadAt, place: ByteRange) -> None:
        self._read, self._place, self._position = read, place, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, self._place.nbytes)[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._place.nbytes - self._position)
        size = left if size is None or size < 0 else min(size, left)
        data = self._read(self._place.start + self._position, size)
        self._position += size
        return data


def find_values(read: ReadAt, place: ByteRange, dtype: torch.dtype, shape: Shape) -> ByteRange | None:
    """Where the bare values of an archived tensor are, or None when they are not one run in row-major order.

    Args:
        read: reads the file that holds the archive.
        place: the archive.
        dtype: dtype the index tells.
        shape: shape the index tells.

    Raises:
        CheckpointCorruptError: the archive is damaged, or holds another tensor than the index tells.
    """
    try:
        with zipfile.ZipFile(_Slice(read, place)) as archive:
            root = archive.namelist()[0].split("/")[0]
            view = _Describe(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
            return _values_place(archive, root, view, place, dtype, shape)
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, IndexError, EOFError, TypeError) as error:
        raise CheckpointCorruptError(f"the archive at {place.start} of {place.file} is damaged: {error!r}") from error


def _values_place(
    archive: zipfile.ZipFile, root: str, view: Any, place: ByteRange, dtype: torch.dtype, shape: Shape
) -> ByteRange | None:
    if not isinstance(view, _View) or view.dtype != dtype or view.shape != shape:
        raise CheckpointCorruptError(
            f"the archive at {place.start} of {place.file} holds {view}, the index says {dtype} {shape}"
        )
    if view.offset or (view.strides != row_major_strides(shape) and 0 not in shape):
        return None
    entry = archive.getinfo(f"{root}/data/{view.storage.name}")
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    with archive.open(entry):  # reads the local header, and checks its name against the directory's
        start = place.start + entry.header_offset + _local_header_bytes(archive, entry)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < nbytes:
        return None
    return ByteRange(file=place.file, start=start, nbytes=nbytes)


def _local_header_bytes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> int:
    """Length of an entry's own header, whose extra field may differ from the directory's (torch pads there)."""
    stream: Any = archive.fp
    stream.seek(entry.header_offset + 26)
    lengths = stream.read(4)
    return 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def load_archive(raw: bytes) -> Any:
    """An archived tensor or object; only what `torch.load(weights_only=True)` accepts.

    Raises:
        CheckpointCorruptError: it is damaged, or wants code that is not torch's to run.
    """
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here; all mean that the bytes cannot be trusted
        raise CheckpointCorruptError(f"a stored object cannot be loaded safely: {error}") from error


def dump_object(value: object, name: str) -> bytes:
    """An object as `torch.save` writes it, in a list of one as the reference does, proven to load again.

    Raises:
        CheckpointingException: `torch.load(weights_only=True)` would refuse it.
    """
    stream = io.BytesIO()
    try:
        torch.save([value], stream)
        load_archive(stream.getvalue())
    except Exception as error:
        raise CheckpointingException(
            f"{name} is a {type(value).__name__} that could not be loaded again without running its pickle: {error}. "
            f"Store plain values (numbers, text, lists, dicts, tensors), or make it a LocalNonpersistentObject"
        ) from error
    return stream.getvalue()


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor detached, contiguous and on the CPU; itself where it is so already."""
    return tensor.detach().to("cpu").contiguous()
