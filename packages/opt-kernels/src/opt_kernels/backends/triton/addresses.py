"""Compares the addresses of hundreds of tensors with those of the last step, in one call if there is a C++ compiler.

`Tensor.data_ptr` takes 70 ns, most of them for Python's objects; reading and comparing an address in C++ takes 10 ns.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from opt_kernels.backends.cpp.compiler import Source, quietly

SOURCE = Path(__file__).parents[1] / "cpp" / "addresses.cpp"
ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr


class Addresses:
    """The addresses of tensors in one step."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.values = tuple(map(ADDRESS, tensors))
        self._array = array("Q", self.values)

    def same(self, tensors: list[Tensor]) -> bool:
        """Whether tensors, as many as given before, are at the same addresses."""
        compiled = _compiled()
        if compiled is None:
            return tuple(map(ADDRESS, tensors)) == self.values
        address, count = self._array.buffer_info()
        return bool(compiled.same_addresses(tensors, address, count, compiled.address_of))


def same_objects(some: list[Any], others: list[Any]) -> bool:
    """Whether these are the same objects."""
    compiled = _compiled()
    if compiled is None or len(some) != len(others):
        return len(some) == len(others) and all(map(is_, some, others))
    return bool(compiled.same_objects(some, others, len(some)))


class _Compiled(NamedTuple):
    same_objects: Callable[[list[Any], list[Any], int], int]
    same_addresses: Callable[[list[Tensor], int, int, int], int]
    address_of: int  # a C function that returns the address of a Python tensor


@cache
def _compiled() -> _Compiled | None:
    """The functions of `addresses.cpp`; None without a compiler, or if torch does not have the function for its own
    compiled code."""
    library = quietly(Source("addresses", SOURCE.read_text(), is_sweep=False))
    address_of = getattr(import_module("torch._C._dynamo.guards"), "_torchinductor_pyobject_tensor_data_ptr", None)
    if library is None or not isinstance(address_of, int):
        return None
    functions = ctypes.PyDLL(library._name)  # holds the GIL in calls: the functions read Python's objects
    lists, numbers = ctypes.py_object, ctypes.c_int64
    functions.same_objects.argtypes = (lists, lists, numbers)
    functions.same_addresses.argtypes = (lists, ctypes.c_void_p, numbers, ctypes.c_void_p)
    return _Compiled(functions.same_objects, functions.same_addresses, address_of)
