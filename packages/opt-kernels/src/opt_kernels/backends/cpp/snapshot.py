"""The functions of `snapshot.cpp`."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_kernels.backends.cpp.compiler import Source, quietly

SOURCE = Path(__file__).with_name("snapshot.cpp")


class Objects(ctypes.Structure):
    """Where the pointers to its type and to its tensor are in a Python object, and the types of which this is known."""

    _fields_ = (
        ("type_word", ctypes.c_int64),
        ("word", ctypes.c_int64),
        ("tensor", ctypes.py_object),
        ("parameter", ctypes.py_object),
    )


class Tensors(ctypes.Structure):
    """The tensors of a snapshot, and the memory of what is known about them. Integers that are not counts are
    addresses."""

    _fields_ = (
        ("num_first", ctypes.c_int64),
        ("num_others", ctypes.c_int64),
        ("reads_grads", ctypes.c_int64),
        ("objects", Objects),
        ("addresses", ctypes.c_void_p),
        ("descriptions", ctypes.c_void_p),
        ("room", ctypes.c_int64),
        ("seen", ctypes.c_void_p),
    )


class Counted(ctypes.Structure):
    """Tensors whose writes are counted, and the memory of the counts."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("objects", Objects),
        ("versions", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
    )


NUM_SEEN = 5  # integers in a `Seen` of `snapshot.cpp`


class CompiledSnapshot(NamedTuple):
    """The compiled functions. Structures are passed by reference."""

    objects: Objects
    record: Callable[[list[Tensor], list[Tensor], Any], int]  # Tensors
    compare: Callable[[list[Tensor], list[Tensor], Any], int]  # Tensors
    count_writes: Callable[[list[Tensor], Any], int]  # Counted
    same_versions: Callable[[list[Tensor], Any], int]  # Counted
    same_objects: Callable[[list[Any], list[Any], int], int]
    same_entries: Callable[[list[dict[Any, Any]], int, list[Any], list[Any], int], int]


@cache
def compiled_snapshot() -> CompiledSnapshot | None:
    """None without a compiler, or if torch does not come with its headers."""
    words = _words()
    library = quietly(Source("snapshot", SOURCE.read_text(), is_sweep=False, flags=_flags()))
    if library is None or words is None:
        return None
    functions = ctypes.PyDLL(library._name)  # holds the GIL in calls: the functions read Python's objects
    list_, number = ctypes.py_object, ctypes.c_int64
    functions.record.argtypes = functions.compare.argtypes = (list_, list_, ctypes.c_void_p)
    functions.count_writes.argtypes, functions.count_writes.restype = (list_, ctypes.c_void_p), number
    functions.same_versions.argtypes = (list_, ctypes.c_void_p)
    functions.same_objects.argtypes = (list_, list_, number)
    functions.same_entries.argtypes = (list_, number, list_, list_, number)
    return CompiledSnapshot(
        Objects(*words, Tensor, nn.Parameter),
        functions.record,
        functions.compare,
        functions.count_writes,
        functions.same_versions,
        functions.same_objects,
        functions.same_entries,
    )


def _flags() -> tuple[str, ...]:
    """For code that uses torch's headers and libraries."""
    folder = Path(torch.__file__).parent
    return (
        "-std=c++20",
        f"-I{folder / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DTORCH_BUILD={torch.version.git_version}",  # a library works only with the build whose headers it includes
        f"-L{folder / 'lib'}",
        "-lc10",
    )


def _words() -> tuple[int, int] | None:
    """The indices of the pointers to the type and to the tensor in a Python object; None if they are not found."""
    found = {_words_of(tensor) for tensor in (torch.empty(1), nn.Parameter(torch.empty(2)))}
    return found.pop() if len(found) == 1 else None


def _words_of(tensor: Tensor) -> tuple[int, int] | None:
    size = torch._C.TensorBase.__basicsize__ // ctypes.sizeof(ctypes.c_void_p)
    words = list((ctypes.c_uint64 * size).from_address(id(tensor)))
    pointers = id(type(tensor)), tensor._cdata
    return (words.index(pointers[0]), words.index(pointers[1])) if set(pointers) <= set(words) else None
