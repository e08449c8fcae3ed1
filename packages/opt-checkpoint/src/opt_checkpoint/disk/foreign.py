"""What other programs write: pickles, read as a description, and the `.metadata` of torch.distributed.checkpoint.

Nothing is imported, called or changed. `pickle.Unpickler` executes the instructions of a file, and a list of allowed
names does not make that safe: an allowed class can still be called with any arguments and have its attributes set. This
reader builds only plain values. A class or function that the pickle names becomes a `Name`, and an object becomes a
`Made`, which records how the pickle would have created it. The caller extracts what it needs from these.

Memory and time are proportional to the length of the pickle. Values may be shared, so a small pickle can describe a
nested value that is exponentially large when printed or traversed. Callers check types and lengths, and never print a
value.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from opt_checkpoint.boxes import Box, cut_flat_range
from opt_checkpoint.disk.index import (
    MAX_DIMS,
    PATHS,
    ByteRange,
    CheckpointIndex,
    Kind,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_index,
)
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.sharded import Path, Shape
from opt_checkpoint.state.tensors import dtype_from_name
from opt_checkpoint.store import Location, store_at


class Name(NamedTuple):
    """A class or function that a pickle names; it is not imported."""

    module: str
    name: str


# Of a class and a name: Python 3.11.0 to 3.11.3, such as Debian's, pickles members of enums by it. It is not called.
_GETATTRS = (Name("builtins", "getattr"), Name("__builtin__", "getattr"))


@dataclass(slots=True, eq=False, repr=False)  # its values may be huge when printed
class Made:
    """An object as described by a pickle.

    Args:
        of: the callable that would create it, usually a `Name`.
        args: the arguments of that call.
        state: what the pickle sets as its state.
        entries: the items that the pickle sets.
    """

    of: Any
    args: Any
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)

    def is_a(self, module: str, name: str) -> bool:
        """Return whether the class or function of this name would create it."""
        return bool(self.of == (module, name))

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes that its state sets; empty if the state has another form."""
        if type(self.state) is dict:
            return self.state
        return {}

    def extend(self, values: list[Any]) -> None:
        """Ignore items of a list subclass, which no caller needs."""

    append = extend


_ATOMS = frozenset({str, int, bool, float, bytes, type(None), Name, Made})
_ERRORS = (IndexError, KeyError, TypeError, ValueError, AttributeError, EOFError, struct.error, pickle.UnpicklingError)


def read_pickle(raw: bytes, what: str, known: Callable[[Name], bool]) -> Any:
    """Return the value that a pickle describes, built from plain values, `Name` and `Made`.

    Args:
        raw: the pickle, of protocol 2 or higher.
        what: name of the file for error messages, such as `.metadata`.
        known: returns whether the pickle may use a name; other names are an error.

    Raises:
        CheckpointCorruptError: it is damaged, uses an unknown name, or an opcode that no checkpoint needs.
    """
    try:
        return _Reader(raw, what, known).load()
    except _ERRORS as error:
        if isinstance(error, CheckpointCorruptError):
            raise
        raise CheckpointCorruptError(
            f"{what} is damaged: it is not a pickle of a checkpoint ({type(error).__name__}); nothing was run"
        ) from error


_PYTHONS = pickle._Unpickler.dispatch  # by opcode


class _Reader(pickle._Unpickler):
    """Python's own unpickler, whose memory is limited by the pickle, with a table of opcodes that run nothing."""

    stack: list[Any]
    append: Callable[[Any], None]  # to the stack
    pop_mark: Callable[[], list[Any]]

    def __init__(self, raw: bytes, what: str, known: Callable[[Name], bool]) -> None:
        super().__init__(io.BytesIO(raw))
        self._what = what
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        found = Name(module, name)
        if not self._known(found):
            raise CheckpointCorruptError(
                f"{self._what} names {module[:80]}.{name[:80]}, which no checkpoint needs; nothing was run"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        return Made(None, (pid,))

    def _make(self) -> None:
        args = self.stack.pop()
        of = self.stack.pop()
        if of in _GETATTRS and list(map(type, args)) != [Name, str]:
            raise CheckpointCorruptError(
                f"{self._what} names {'.'.join(of)}, which no checkpoint needs; nothing was run"
            )
        self.append(Made(of, args))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not Made:
            raise CheckpointCorruptError(
                f"{self._what} is damaged: it sets the state of a {type(target).__name__}; nothing was run"
            )
        target.state = state

    def _set(self, values: list[Any]) -> None:
        target = self.stack[-1]
        entries = target.entries if type(target) is Made else target
        if type(entries) is not dict or len(values) % 2:
            raise TypeError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2]):
            # Hashing a nested tuple may take time that is exponential in its depth.
            atoms = key
            if type(key) is not tuple:
                atoms = (key,)
            if not _ATOMS.issuperset(map(type, atoms)):
                raise TypeError(f"a key is a {type(key).__name__}")
            entries[key] = value

    _SAFE = (
        "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
        "SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE "
        "EMPTY_LIST APPEND APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL BINPERSID BINPUT LONG_BINPUT MEMOIZE "
        "BINGET LONG_BINGET"
    )
    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: _PYTHONS[code[0]] for code in map(vars(pickle).__getitem__, _SAFE.split())
    }
    # Sets are read as lists, because their items may not be hashable.
    dispatch[pickle.EMPTY_SET[0]] = _PYTHONS[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = _PYTHONS[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = _PYTHONS[pickle.LIST[0]]
    dispatch[pickle.REDUCE[0]] = _make
    dispatch[pickle.NEWOBJ[0]] = _make
    dispatch[pickle.NEWOBJ_EX[0]] = lambda reader: (reader.stack.pop(), reader._make())
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]] = lambda reader: reader._set([reader.stack.pop(), reader.stack.pop()][::-1])
    dispatch[pickle.SETITEMS[0]] = lambda reader: reader._set(reader.pop_mark())


METADATA = ".metadata"
MEGATRON_MARK = "metadata.json"  # marks a directory as Megatron-Core's `torch_dist` format; its content:
MEGATRON_MARKED = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
MEGATRON_COMMON = "common.pt"


_DCP = "torch.distributed.checkpoint.metadata"
# Names in `.metadata` files other than dtypes and the classes of DCP and Megatron-Core. Of these, only `Size` and
# layouts are read.
_NAMES = frozenset({
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    *(("builtins", name) for name in ("set", "frozenset", "list", "dict")), *_GETATTRS,
    *((module, f"{system}Path") for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
})  # fmt: skip
_PACKAGES = ("torch.distributed.checkpoint.", "megatron.core.")
_LIMIT = 1 << 63
_MAX_DEPTH = 100  # of a state, so that rebuilding it cannot exhaust the stack


def is_dtype(name: Name) -> bool:
    """Return whether it names a dtype of torch."""
    return name.module == "torch" and isinstance(vars(torch).get(name.name), torch.dtype)


def _known(name: Name) -> bool:
    return is_dtype(name) or name in _NAMES or name.module.startswith(_PACKAGES)


def read_dcp_index(path: Location, sizes: Mapping[str, int]) -> CheckpointIndex:
    """Return the index of a stock or Megatron-Core directory.

    Args:
        path: the checkpoint's directory or place; it holds `.metadata`.
        sizes: of all files in it, by name; -1 for anything but a regular file.

    Raises:
        CheckpointCorruptError: `.metadata` names unexpected classes, or contradicts itself or the files.
        OSError: it cannot be read.
    """
    metadata = read_pickle(store_at(path).read(METADATA), METADATA, _known)
    of = metadata.of if type(metadata) is Made else None
    # Megatron-Core's class has moved between modules.
    is_megatron = type(of) is Name and of.name == "MCoreMetadata" and of.module.startswith("megatron.core.")
    if of != Name(_DCP, "Metadata") and not is_megatron:
        raise CheckpointCorruptError(f"{METADATA} holds something other than the metadata of a checkpoint")
    places = _places(_entries(metadata.attributes.get("storage_data") or {}, "storage_data"))
    tensors = {}
    objects = {}
    for key, stored in _entries(metadata.attributes.get("state_dict_metadata"), "state_dict_metadata").items():
        if type(key) is not str:
            raise _damaged(f"a key is a {type(key).__name__}")
        if type(stored) is Made and stored.is_a(_DCP, "TensorStorageMetadata"):
            tensors[key] = _tensor_of(key, stored, places)
        elif type(stored) is Made and stored.is_a(_DCP, "BytesStorageMetadata"):
            if (key, None) not in places:
                raise CheckpointCorruptError(f"{METADATA} lists the object {key} without a location")
            objects[key] = places[key, None]
        else:
            raise _damaged(f"{key} is neither a tensor nor an object")
    for key, about in _entries(metadata.attributes.get("mcore_data") or {}, "mcore_data").items():
        shape = _entries(about, "mcore_data").get("nd_reformulated_orig_global_shape")  # of flattened blocks
        if shape is not None and key in tensors:
            tensors[key] = unflattened(key, tensors[key], _integers(shape, "nd_reformulated_orig_global_shape"))
    files = {}
    for name in {place.file for place in places.values()}:
        if sizes.get(name, -1) < 0:
            problem = "is missing"
            if name in sizes:
                problem = "is not a regular file; it is not read"
            raise CheckpointCorruptError(f"data file {path / name} {problem}")
        files[name] = StoredFile(size=sizes[name])
    kind = Kind.MEGATRON if MEGATRON_MARK in sizes else Kind.DCP
    details = {PATHS: _paths_of(metadata, {*tensors, *objects})}
    index = CheckpointIndex(path=path, kind=kind, tensors=tensors, objects=objects, files=files, details=details)
    check_index(index)
    return index


def _paths_of(metadata: Made, stored: Container[str]) -> dict[str, Path]:
    """The paths of values in the saved state, by key, as stock planners that flatten it record them."""
    recorded = metadata.attributes.get("planner_data")
    if type(recorded) is not dict:
        return {}
    paths = {}
    for key, path in recorded.items():
        if type(key) is str and key in stored and type(path) is tuple:
            is_plain = {str, int}.issuperset(map(type, path))
            if is_plain and 0 < len(path) <= _MAX_DEPTH:
                paths[key] = path
    return paths


def _damaged(problem: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{METADATA} is damaged: {problem}")


def _entries(value: Any, what: str) -> dict[Any, Any]:
    """The entries of a dict or OrderedDict."""
    if type(value) is dict:
        return value
    if type(value) is Made and value.is_a("collections", "OrderedDict"):
        return value.entries
    raise _damaged(f"{what} is not a dict")


def _integer(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise _damaged(f"{what} is not a number of elements or bytes")
    return value


def _integers(value: Any, what: str) -> Shape:
    """The integers of a `torch.Size`, tuple or list."""
    if type(value) is Made and value.is_a("torch", "Size") and type(value.args) is tuple:
        value = value.args[0] if value.args else ()
    if type(value) not in (tuple, list) or len(value) > MAX_DIMS:
        raise _damaged(f"{what} is not a shape of at most {MAX_DIMS} axes")
    return tuple(_integer(n, what) for n in value)


def _attributes(value: Any, name: str) -> Mapping[str, Any]:
    """The attributes of an object of the class `name`, in any module."""
    if type(value) is not Made or type(value.of) is not Name or value.of.name != name:
        raise _damaged(f"expected a {name}, found another object")
    return value.attributes


_Key: TypeAlias = "tuple[str, Shape | None]"


def _places(storage: dict[Any, Any]) -> dict[_Key, ByteRange]:
    places = {}
    for index, stored in storage.items():
        where = _attributes(index, "MetadataIndex")
        info = _attributes(stored, "_StorageInfo")
        key = where.get("fqn")
        offset = where.get("offset")
        file = info.get("relative_path")
        if type(key) is not str or type(file) is not str:
            raise _damaged("a key or file name is not text")
        if info.get("transform_descriptors"):
            raise CheckpointCorruptError(
                f"{key} was stored through transforms (compression or the like), which this version cannot undo; "
                f"load it with torch.distributed.checkpoint and save it again without them"
            )
        box_offsets = None
        if offset is not None:
            box_offsets = _integers(offset, key)
        start = _integer(info.get("offset"), key)
        nbytes = _integer(info.get("length"), key)
        places[key, box_offsets] = ByteRange(file=file, start=start, nbytes=nbytes, archive=True)
    return places


def _tensor_of(key: str, stored: Made, places: Mapping[_Key, ByteRange]) -> StoredTensor:
    listed = stored.attributes.get("chunks")
    if type(listed) is not list:
        raise _damaged(f"{key} has no list of chunks")
    chunks = []
    for chunk in listed:
        of_chunk = _attributes(chunk, "ChunkStorageMetadata")
        offsets = _integers(of_chunk.get("offsets"), key)
        box = Box(offsets, _integers(of_chunk.get("sizes"), key))
        if box.numel:
            place = places.get((key, offsets))
            if place is None:
                raise CheckpointCorruptError(f"{METADATA} lists chunk {box} of {key} without a location")
            chunks.append(StoredChunk(box=box, place=place))
    properties = stored.attributes.get("properties")  # its state is a tuple that begins with dtype and layout
    state = None
    if type(properties) is Made:
        state = properties.state
    if type(state) is not tuple or len(state) < 2 or type(state[0]) is not Name:
        raise _damaged(f"{key} has no dtype")
    if type(state[1]) is not Made or state[1].args != ("torch.strided",):
        raise CheckpointCorruptError(f"{key} is stored in a sparse layout, which this version does not read")
    shape = _integers(stored.attributes.get("size"), key)
    dtype = dtype_from_name(state[0].name)
    return StoredTensor(shape=shape, dtype=dtype, chunks=tuple(chunks))


def unflattened(key: str, stored: StoredTensor, shape: Shape) -> StoredTensor:
    """Return the tensor in the parameter's shape, with its chunks cut into boxes.

    Args:
        key: for error messages.
        stored: as listed in `.metadata`, with the shape `(blocks per axis..., elements of a block)`.
        shape: the parameter's.

    Raises:
        CheckpointCorruptError: the two shapes do not fit.
    """
    blocks = stored.shape[:-1]
    is_cut_evenly = all(b and n % b == 0 for n, b in zip(shape, blocks))
    has_long_chunks = any(n != 1 for chunk in stored.chunks for n in chunk.box.sizes[:-1])
    if len(blocks) != len(shape) or not is_cut_evenly or has_long_chunks:
        raise CheckpointCorruptError(
            f"{key} is stored as flattened blocks of shape {list(stored.shape)}, which do not fit {list(shape)}"
        )
    block = tuple(n // b for n, b in zip(shape, blocks))
    chunks = list[StoredChunk]()
    for chunk in stored.chunks:
        *position, start = chunk.box.offsets
        corner = tuple(p * n for p, n in zip(position, block))
        first = 0
        for box in cut_flat_range(block, start, start + chunk.box.sizes[-1]):
            box = box.moved(corner)
            chunks.append(StoredChunk(box=box, place=chunk.place, archived=chunk.box.sizes, first=first))
            first += box.numel
    return StoredTensor(shape=shape, dtype=stored.dtype, chunks=tuple(chunks))
