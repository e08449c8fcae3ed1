"""The functions of `snapshot.cpp`, and the functions of torch that they call."""

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import Source, quietly

SOURCE = Path(__file__).with_name("snapshot.cpp")
DLPACK = 1  # the major version that `snapshot.cpp` declares


class CompiledSnapshot(NamedTuple):
    """The compiled functions. Numbers that are not counts are addresses."""

    same_objects: Callable[[list[Any], list[Any], int], int]
    same_addresses: Callable[[list[Tensor], int, int, int], int]
    record_places: Callable[[list[Tensor], int, int, int, int], int]
    same_places: Callable[[list[Tensor], int, int, int], int]
    address_of: int  # of a Python tensor, as torch passes it to its own compiled code
    describe: int | None  # torch's implementation of DLPack's exchange of tensors in C; None before torch 2.10


@cache
def compiled_snapshot() -> CompiledSnapshot | None:
    """None without a compiler, or if torch does not have the function for addresses."""
    library = quietly(Source("snapshot", SOURCE.read_text(), is_sweep=False))
    address_of = getattr(import_module("torch._C._dynamo.guards"), "_torchinductor_pyobject_tensor_data_ptr", None)
    if library is None or not isinstance(address_of, int):
        return None
    functions = ctypes.PyDLL(library._name)  # holds the GIL in calls: the functions read Python's objects
    objects, number, address = ctypes.py_object, ctypes.c_int64, ctypes.c_void_p
    functions.same_objects.argtypes = (objects, objects, number)
    functions.same_addresses.argtypes = (objects, address, number, address)
    functions.record_places.argtypes = (objects, number, address, number, address)
    functions.same_places.argtypes = (objects, number, address, address)
    return CompiledSnapshot(
        functions.same_objects,
        functions.same_addresses,
        functions.record_places,
        functions.same_places,
        address_of,
        _describe(),
    )


class _Exchange(ctypes.Structure):
    """The `DLPackExchangeAPI` of DLPack 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", ctypes.c_void_p),
        ("dltensor_from_py_object_no_sync", ctypes.c_void_p),
    )


def _describe() -> int | None:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    exchange = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    described: int | None = exchange.dltensor_from_py_object_no_sync
    return described if exchange.major == DLPACK else None
