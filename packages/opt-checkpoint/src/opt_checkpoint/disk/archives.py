"""Archives of `torch.save`: the position of a tensor's values in a foreign one, and objects, which are read as plain
values.

A stock chunk is a zip file whose `data.pkl` describes how the tensor views a storage. If the tensor is contiguous and
begins at the storage's first element, its values are one run of bytes and can be read in part. Otherwise the whole
archive is loaded.

Checkpoints of other programs contain objects of their own classes next to plain values: Megatron-Core stores its
command line (an `argparse.Namespace` with enums) next to the step, and numpy arrays in its RNG state. Reading the step
must not need these classes, so an object of an unknown class becomes a `NotLoaded`. Only requesting it is an error.
"""

from __future__ import annotations

import io
import math
import re
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from opt_checkpoint.boxes import row_major_strides
from opt_checkpoint.disk.data_file import DataFiles
from opt_checkpoint.disk.foreign import Name, is_dtype, read_pickle
from opt_checkpoint.disk.index import ByteRange
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException, CheckpointValueError
from opt_checkpoint.state.sharded import Shape
from opt_checkpoint.state.tensors import BY_STORAGE_CLASS, dtype_from_name

_NAMES = frozenset(
    {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"), ("collections", "OrderedDict")}
)
_DESCRIPTION_BYTES = 1 << 20  # of a pickle that describes one tensor; a few hundred are needed


def _is_known(name: Name) -> bool:
    is_storage = name.module in ("torch", "torch.storage") and name.name.endswith("Storage")
    return name in _NAMES or is_storage or is_dtype(name)


class _Slice(io.RawIOBase):
    """A run of a file as a separate file object."""

    def __init__(self, files: DataFiles, place: ByteRange) -> None:
        self._files = files
        self._place = place
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, self._place.nbytes)[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._place.nbytes - self._position)
        size = remaining if size < 0 else min(size, remaining)
        data = self._files.read(self._place.part(self._position, size))
        self._position += size
        return data


def find_values(files: DataFiles, place: ByteRange, dtype: torch.dtype, shape: Shape) -> ByteRange | None:
    """Return the position of the bare values of an archived tensor; None unless they are one run in row-major order.

    Args:
        files: the data files.
        place: the archive.
        dtype: the dtype in the index.
        shape: the shape in the index.

    Raises:
        CheckpointCorruptError: the archive is damaged, or holds another tensor than the index describes.
    """
    where = f"the archive at {place.start} of {place.file}"
    try:
        with zipfile.ZipFile(_Slice(files, place)) as archive:
            root = archive.namelist()[0].split("/")[0]
            pickled = archive.getinfo(f"{root}/data.pkl")
            if pickled.compress_type != zipfile.ZIP_STORED or pickled.file_size > _DESCRIPTION_BYTES:
                raise CheckpointCorruptError(
                    f"{where} is damaged: its description is compressed or too large ({pickled.file_size} bytes)"
                )
            # Either _rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks, metadata), whose optional
            # metadata has the conjugate and negative bits; or _v3, which takes the dtype before the metadata.
            call = read_pickle(archive.read(pickled), "a stored tensor", _is_known)
            storage, offset, stored_shape, strides, *rest = call.args
            _, kind, name, *_ = storage.args[0]  # the persistent id: "storage", class, name, device, number of elements
            dtype_names = [value.name for value in rest if type(value) is Name and value.module == "torch"]
            stored_dtype = BY_STORAGE_CLASS.get(kind.name)
            if dtype_names:
                stored_dtype = dtype_from_name(dtype_names[0])
            is_tensor = call.of.name.startswith("_rebuild_tensor_v") and type(name) is str
            if not is_tensor or stored_dtype != dtype or stored_shape != shape:
                raise CheckpointCorruptError(f"{where} does not hold {dtype} {shape}, as the index says")
            is_run = strides == row_major_strides(shape) or 0 in shape
            has_bits = any(type(x) is dict and x for x in rest)  # conjugate or negative: the bytes are not the values
            byteorder = f"{root}/byteorder"  # not recorded before torch 2.1, whose archives are little-endian
            is_little = byteorder not in archive.namelist() or archive.open(byteorder).read(9) == b"little"
            if offset or not is_run or has_bits or not is_little:
                return None
            entry = archive.getinfo(f"{root}/data/{name}")
            with archive.open(entry):  # reads the local header, and checks its name against the directory's
                stream: Any = archive.fp
                stream.seek(entry.header_offset + 26)
                lengths = stream.read(4)  # of the name and the extra field, which torch pads in this header only
        nbytes = math.prod(shape) * dtype.itemsize
        header = 30 + sum(struct.unpack("<HH", lengths))
        start = place.start + entry.header_offset + header
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < nbytes:
            return None
        if start + nbytes > place.stop:
            raise CheckpointCorruptError(f"the values of {where} lie outside it")
        return ByteRange(file=place.file, start=start, nbytes=nbytes)
    except (CheckpointingException, OSError):
        raise
    except Exception as error:  # zipfile raises many kinds on damaged archives
        raise CheckpointCorruptError(f"{where} is damaged: {type(error).__name__}: {error}") from error


def archive_of(value: object) -> bytes:
    """Return the archive that `torch.save` makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def dump_object(value: object, name: str) -> bytes:
    """Serialize an object by `torch.save`, in a list of one as Megatron-Core does, and check that it loads again.

    Raises:
        CheckpointingException: `torch.load(weights_only=True)` would refuse it.
    """
    try:
        raw = archive_of([value])
        torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's message has many lines
        found = re.search(r"GLOBAL (\S+)", str(error))
        first_line = str(error).partition("\n")[0]
        raise CheckpointValueError(
            f"{name} is a {type(value).__name__} that could not be loaded again without running its pickle: "
            f"{f'it needs {found[1]}' if found else first_line}. Store plain values (numbers, text, lists, dicts, "
            f"tensors; int(x), x.tolist() or torch.from_numpy(x) of numpy's), or make it a LocalNonpersistentObject"
        ) from error
    return raw


def contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor detached, contiguous, on the CPU and with negative bits resolved; the same tensor if it is
    already so."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


SafeGlobals: TypeAlias = Sequence[Callable[..., Any] | tuple[Callable[..., Any], str]]

_ARRAY: Any = np.zeros(1).__reduce__()[0]
_SCALAR: Any = np.float64(0).__reduce__()[0]
NUMPY_GLOBALS: SafeGlobals = (
    np.ndarray,
    np.dtype,
    *((function, f"numpy.{core}.multiarray.{function.__name__}") for function in (_ARRAY, _SCALAR)
      for core in ("core", "_core")),
    *dict.fromkeys(type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"),
)  # fmt: skip
"""What `safe_globals` needs for numpy arrays and scalars, as in the RNG state of Megatron-Core."""

_globals_lock = threading.Lock()  # torch has one list of safe globals for all threads


@dataclass(frozen=True)
class NotLoaded:
    """Stands for an object of a class that was not loaded.

    Args:
        name: the class, as `argparse.Namespace`.
    """

    name: str

    def __setstate__(self, state: object) -> None:
        """Discard the state of the object, which `torch.load` sets."""

    def __reduce__(self) -> tuple[Any, ...]:
        return NotLoaded, (self.name,)


def load_object(raw: bytes, *, allowed: SafeGlobals = ()) -> Any:
    """Load an archived object or tensor by `torch.load(weights_only=True)`. Objects of unknown classes become
    `NotLoaded`.

    Args:
        raw: an archive of `torch.save`.
        allowed: classes and functions that the archive may use, as for `torch.serialization.safe_globals`.

    Raises:
        CheckpointCorruptError: the archive is corrupt, or references a global that could execute code.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile raises many kinds on damaged archives
        raise CheckpointCorruptError(f"a stored object is not an archive of torch.save: {error}") from error
    # Entries that are compressed or overlap would be larger in memory than in the file.
    nbytes = sum(entry.file_size for entry in entries)
    if nbytes > len(raw) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointCorruptError("a stored object is compressed, which torch.save never does; it is not read")
    try:
        with _globals_lock, safe_globals(list(allowed)):
            names = get_unsafe_globals_in_checkpoint(io.BytesIO(raw))
            # Each unknown class is replaced by one whose objects are `NotLoaded`.
            stubs = [(type("Stub", (), {"__new__": lambda *_, name=name: NotLoaded(name)}), name) for name in names]
            with safe_globals([*stubs, NotLoaded]):
                return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many exception types here; all mean that the bytes cannot be trusted
        raise CheckpointCorruptError(f"a stored object cannot be loaded safely: {error}") from error


def not_loaded_in(value: Any) -> Iterator[str]:
    """Yield names of the classes that were not loaded, anywhere in a value. Its parts may be shared."""
    seen = set[int]()
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, NotLoaded):
            yield part.name
        elif id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, dict):
                rest += [*part, *part.values()]
            elif isinstance(part, list | tuple | set | frozenset):
                rest += part
            elif not isinstance(part, Tensor | type):  # an object of an allowed class
                rest += getattr(part, "__dict__", {}).values()


def loaded_whole(value: Any, name: str) -> Any:
    """Return the value itself, if all of it was loaded.

    Args:
        value: from `load_object`.
        name: the key or path it is stored under.

    Raises:
        CheckpointCorruptError: it holds objects of classes that were not loaded.
    """
    classes = sorted(set(not_loaded_in(value)))
    if classes:
        listed = ", ".join(class_name.removeprefix("builtins.") for class_name in classes)
        is_numpy = any(class_name.startswith("numpy.") for class_name in classes)
        hint = "; NUMPY_GLOBALS of opt_checkpoint has those of numpy" if is_numpy else ""
        raise CheckpointCorruptError(
            f"{name} cannot be loaded safely: it holds {listed}. If you trust this checkpoint, pass "
            f"safe_globals=[{listed}]{hint}"
        )
    return value
