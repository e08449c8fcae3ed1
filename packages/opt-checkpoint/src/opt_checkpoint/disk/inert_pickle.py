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

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

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

    __slots__ = ("args", "entries", "items", "of", "state")

    def __init__(self, of: Any, args: Any) -> None:
        self.of, self.args = of, args
        self.state: Any = None
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}

    def is_a(self, module: str, name: str) -> bool:
        """Whether the class or function of this name would create it."""
        return bool(self.of == (module, name))

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The attributes that its state sets; empty if the state has another form."""
        return self.state if type(self.state) is dict else {}


PERSISTENT = Name("", "persistent id")  # creates a persistent id, which is its one argument
_ATOMS = frozenset({str, int, bool, float, bytes, type(None), Name, Made})


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
        return _Reader(raw, what, known).read()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        if isinstance(error, CheckpointCorruptError):
            raise
        raise CheckpointCorruptError(f"{what} is damaged: it is not a pickle ({type(error).__name__})") from error


class _Mark:
    """Marks the start of a run of items on the stack."""


_MARK = _Mark()


class _Reader:
    """The state of one reading: a stack of values, the memo, and the position."""

    def __init__(self, raw: bytes, what: str, known: Callable[[Name], bool]) -> None:
        self.raw, self.what, self.known = raw, what, known
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        table, raw = _OPCODES, self.raw
        while True:
            opcode = raw[self.position]
            self.position += 1
            if opcode == _STOP:
                return self.pop()
            act = table.get(opcode)
            if act is None:
                self.fail(f"opcode {bytes([opcode])!r} at byte {self.position - 1} is in no checkpoint")
            act(self)

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointCorruptError(f"{self.what} is damaged: {problem}; nothing was run")

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if count < 0 or self.position > len(self.raw):
            self.fail("it ends early")
        return self.raw[start : self.position]

    def integer(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "little", signed=signed)

    def line(self) -> str:
        end = self.raw.index(b"\n", self.position)
        text = self.raw[self.position : end].decode()
        self.position = end + 1
        return text

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            self.fail("a mark is used as a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                self.fail("a mark is missing")
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self.fail("a name is not text")
        found = Name(module, name)
        if not self.known(found):
            raise CheckpointCorruptError(
                f"{self.what} names {module[:80]}.{name[:80]}, which no checkpoint needs; nothing was run"
            )
        self.push(found)

    def global_name(self) -> None:
        self.name(self.line(), self.line())

    def stack_name(self) -> None:
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def make(self) -> None:
        args, of = self.pop(), self.pop()
        self.push(Made(of, args))

    def make_with_keywords(self) -> None:
        self.pop()
        self.make()

    def persistent(self) -> None:
        self.push(Made(PERSISTENT, (self.pop(),)))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if type(target) is not Made:
            self.fail(f"it sets the state of a {type(target).__name__}")
        target.state = state

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Made:
            target.items.extend(values)
        elif type(target) is list:
            target.extend(values)
        else:
            self.fail(f"it appends to a {type(target).__name__}")

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        entries = target.entries if type(target) is Made else target
        if type(entries) is not dict or len(values) % 2:
            self.fail(f"it sets items of a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2]):
            if type(key) not in _ATOMS and not (type(key) is tuple and all(type(k) in _ATOMS for k in key)):
                self.fail(f"a key is a {type(key).__name__}")
            entries[key] = value

    def tuple_of(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def add_items(self) -> None:
        values = self.pop_to_mark()
        if type(self.stack[-1]) is not list:
            self.fail("it adds items to something other than a set")
        self.stack[-1].extend(values)


def _opcodes() -> dict[int, Callable[[_Reader], object]]:
    """The action of each opcode. Sets are read as lists, because their items may not be hashable."""
    return {
        0x80: lambda r: r.take(1),  # PROTO
        0x95: lambda r: r.take(8),  # FRAME
        ord("("): lambda r: r.push(_MARK),
        ord("0"): lambda r: r.stack.pop(),
        ord("1"): lambda r: r.pop_to_mark(),
        ord("N"): lambda r: r.push(None),
        0x88: lambda r: r.push(True),
        0x89: lambda r: r.push(False),
        ord("J"): lambda r: r.push(r.integer(4, signed=True)),
        ord("K"): lambda r: r.push(r.integer(1)),
        ord("M"): lambda r: r.push(r.integer(2)),
        0x8A: lambda r: r.push(r.integer(r.integer(1), signed=True)),
        ord("G"): lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
        0x8C: lambda r: r.push(r.take(r.integer(1)).decode("utf-8", "surrogatepass")),
        ord("X"): lambda r: r.push(r.take(r.integer(4)).decode("utf-8", "surrogatepass")),
        0x8D: lambda r: r.push(r.take(r.integer(8)).decode("utf-8", "surrogatepass")),
        ord("C"): lambda r: r.push(r.take(r.integer(1))),
        ord("B"): lambda r: r.push(r.take(r.integer(4))),
        ord(")"): lambda r: r.push(()),
        0x85: lambda r: r.tuple_of(1),
        0x86: lambda r: r.tuple_of(2),
        0x87: lambda r: r.tuple_of(3),
        ord("t"): lambda r: r.push(tuple(r.pop_to_mark())),
        ord("]"): lambda r: r.push([]),
        ord("a"): lambda r: r.append([r.pop()]),
        ord("e"): lambda r: r.append(r.pop_to_mark()),
        0x8F: lambda r: r.push([]),  # EMPTY_SET
        0x90: lambda r: r.add_items(),
        0x91: lambda r: r.push(r.pop_to_mark()),  # FROZENSET
        ord("}"): lambda r: r.push({}),
        ord("s"): lambda r: r.set_items([r.pop(), r.pop()][::-1]),
        ord("u"): lambda r: r.set_items(r.pop_to_mark()),
        ord("c"): _Reader.global_name,
        0x93: _Reader.stack_name,
        ord("R"): _Reader.make,
        0x81: _Reader.make,  # NEWOBJ
        0x92: _Reader.make_with_keywords,  # NEWOBJ_EX
        ord("b"): _Reader.build,
        ord("Q"): _Reader.persistent,
        ord("q"): lambda r: r.memo.__setitem__(r.integer(1), r.stack[-1]),
        ord("r"): lambda r: r.memo.__setitem__(r.integer(4), r.stack[-1]),
        0x94: lambda r: r.memo.__setitem__(len(r.memo), r.stack[-1]),
        ord("h"): lambda r: r.push(r.memo[r.integer(1)]),
        ord("j"): lambda r: r.push(r.memo[r.integer(4)]),
    }


_STOP = ord(".")
_OPCODES = MappingProxyType(_opcodes())
