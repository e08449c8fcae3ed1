"""Reads a pickle as a description: nothing is imported, called or changed.

`pickle.Unpickler` executes the instructions of a file, and a list of allowed names does not make that safe: an allowed
class can still be called with any arguments and have its attributes set. This reader builds only plain values. A class
or function that the pickle names becomes a `Name`, and an object becomes a `Made`, which records how the pickle would
have created it. The caller extracts what it needs from these.

Memory and time are proportional to the length of the pickle. Values may be shared, so a small pickle can describe a
nested value that is exponentially large when printed or traversed. Callers check types and lengths, and never print a
value.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from opt_checkpoint.errors import CheckpointCorruptError


class Name(NamedTuple):
    """A class or function that a pickle names; it is not imported."""

    module: str
    name: str


class Made:
    """An object as described by a pickle.

    Args:
        of: the callable that would create it, usually a `Name`.
        args: the arguments of that call.
    """

    __slots__ = ("args", "entries", "of", "state")

    def __init__(self, of: Any, args: Any) -> None:
        self.of, self.args = of, args
        self.state: Any = None
        self.entries: dict[Any, Any] = {}

    def is_a(self, module: str, name: str) -> bool:
        """Whether the class or function of this name would create it."""
        return bool(self.of == (module, name))

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes that its state sets; empty if the state has another form."""
        return self.state if type(self.state) is dict else {}

    def extend(self, values: list[Any]) -> None:
        """Ignore items of a list subclass, which no caller needs."""

    append = extend


PERSISTENT = Name("", "persistent id")  # creates a persistent id, which is its one argument
_ATOMS = frozenset({str, int, bool, float, bytes, type(None), Name, Made})
_ERRORS = (IndexError, KeyError, TypeError, ValueError, AttributeError, EOFError, struct.error, pickle.UnpicklingError)


def read_pickle(raw: bytes, what: str, known: Callable[[Name], bool]) -> Any:
    """The value that a pickle describes, built from plain values, `Name` and `Made`.

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


class _Reader(pickle._Unpickler):
    """Python's own unpickler, whose memory is limited by the pickle, with a table of opcodes that run nothing."""

    stack: list[Any]
    append: Callable[[Any], None]  # to the stack
    pop_mark: Callable[[], list[Any]]

    def __init__(self, raw: bytes, what: str, known: Callable[[Name], bool]) -> None:
        super().__init__(io.BytesIO(raw))
        self._what, self._known = what, known

    def find_class(self, module: str, name: str) -> Any:
        found = Name(module, name)
        if not self._known(found):
            raise CheckpointCorruptError(
                f"{self._what} names {module[:80]}.{name[:80]}, which no checkpoint needs; nothing was run"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        return Made(PERSISTENT, (pid,))

    def _make(self) -> None:
        args, of = self.stack.pop(), self.stack.pop()
        self.append(Made(of, args))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
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
            if type(key) not in _ATOMS and not (type(key) is tuple and all(type(k) in _ATOMS for k in key)):
                raise TypeError(f"a key is a {type(key).__name__}")
            entries[key] = value

    _SAFE = (
        "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
        "SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE "
        "EMPTY_LIST APPEND APPENDS EMPTY_DICT GLOBAL STACK_GLOBAL BINPERSID BINPUT LONG_BINPUT MEMOIZE "
        "BINGET LONG_BINGET"
    )
    dispatch: ClassVar[dict[int, Any]] = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in _SAFE.split())},
        pickle.EMPTY_SET[0]: pickle._Unpickler.dispatch[pickle.EMPTY_LIST[0]],
        pickle.ADDITEMS[0]: pickle._Unpickler.dispatch[pickle.APPENDS[0]],
        # Sets are read as lists, because their items may not be hashable.
        pickle.FROZENSET[0]: pickle._Unpickler.dispatch[pickle.LIST[0]],
        pickle.REDUCE[0]: _make,
        pickle.NEWOBJ[0]: _make,
        pickle.NEWOBJ_EX[0]: lambda reader: (reader.stack.pop(), reader._make()),
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: lambda reader: reader._set([reader.stack.pop(), reader.stack.pop()][::-1]),
        pickle.SETITEMS[0]: lambda reader: reader._set(reader.pop_mark()),
    }
