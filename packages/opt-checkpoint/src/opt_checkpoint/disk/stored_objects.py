"""Stored objects: plain values from `torch.save` archives, with placeholders for objects of classes that are not
loaded.

Checkpoints of other programs contain objects of their own classes next to plain values: Megatron-Core stores its
command line (an `argparse.Namespace` with enums) next to the step, and numpy arrays in its RNG state. Reading the step
must not need these classes, so an object of an unknown class becomes a `NotLoaded`. Only requesting it is an error.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from opt_checkpoint.disk.torch_zip_reader import check_archive_size
from opt_checkpoint.errors import CheckpointCorruptError

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

_changing_globals = threading.Lock()  # torch keeps its list of safe globals in one place for all threads


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """Stands for an object of a class that was not loaded.

    Args:
        name: the class, as `argparse.Namespace`.
    """

    name: str


class _Unknown:
    """Placeholder class that `torch.load` uses for unknown classes. Accepts any arguments and state, and discards
    them."""

    global_name = ""

    def __init__(self, *args: object) -> None:
        """Accept any arguments."""

    def __new__(cls, *args: object) -> _Unknown:
        """Accept any arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Discard the state."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def load_object(raw: bytes, *, allowed: SafeGlobals = ()) -> Any:
    """Load a stored object by `torch.load(weights_only=True)`. Objects of unknown classes become `NotLoaded`.

    Args:
        raw: an archive of `torch.save`.
        allowed: classes and functions that the archive may use, as for `torch.serialization.safe_globals`.

    Raises:
        CheckpointCorruptError: it is damaged, or names a global that runs code.
    """
    check_archive_size(raw)
    try:
        with _changing_globals, safe_globals(list(allowed)):
            names = get_unsafe_globals_in_checkpoint(io.BytesIO(raw))
            stubs = [(type("Unknown", (_Unknown,), {"global_name": name}), name) for name in names]
            with safe_globals(list(stubs)):
                loaded = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many exception types here; all mean that the bytes cannot be trusted
        raise CheckpointCorruptError(f"a stored object cannot be loaded safely: {error}") from error
    return _with_placeholders(loaded) if names else loaded


def _with_placeholders(value: Any) -> Any:
    """The value with a `NotLoaded` in place of every object of an unknown class."""
    if isinstance(value, _Unknown):
        return NotLoaded(value.global_name)
    if isinstance(value, dict):
        return {_with_placeholders(k): _with_placeholders(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_placeholders(v) for v in value)
    if isinstance(value, set | frozenset):
        return {_with_placeholders(v) for v in value}
    # A class that another library has made loadable, as megatron.core does, may have attributes of an unknown class.
    attributes = {} if isinstance(value, torch.Tensor | type) else getattr(value, "__dict__", {})
    incomplete = next(not_loaded_in(_with_placeholders(dict(attributes))), None)
    return value if incomplete is None else NotLoaded(incomplete)


def not_loaded_in(value: Any) -> Iterator[str]:
    """Names of the classes that were not loaded, anywhere in a value."""
    if isinstance(value, NotLoaded):
        yield value.name
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from not_loaded_in(key)
            yield from not_loaded_in(inner)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from not_loaded_in(inner)


def loaded_whole(value: Any, name: str) -> Any:
    """The value itself, if all of it was loaded.

    Args:
        value: from `load_object`.
        name: the key or path it is stored under.

    Raises:
        CheckpointCorruptError: it holds objects of classes that were not loaded.
    """
    classes = sorted(set(not_loaded_in(value)))
    if classes:
        raise CheckpointCorruptError(
            f"{name} cannot be loaded safely: it holds {_listed(classes)}. If you trust this checkpoint, pass "
            f"safe_globals=[{_listed(classes)}]{_numpy_hint(classes)}"
        )
    return value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.removeprefix("builtins.") for name in names)


def _numpy_hint(names: Iterable[str]) -> str:
    return "; NUMPY_GLOBALS of opt_checkpoint has those of numpy" if any(n.startswith("numpy.") for n in names) else ""
