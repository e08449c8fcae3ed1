"""One double for directories and buckets: calls that raise, act and then raise, act twice, lag, die, or lose power."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from opt_checkpoint import ObjectPath
from opt_checkpoint.store import store as store_module
from opt_checkpoint.store import store_at

T = TypeVar("T")
WRITES = ("put", "create", "upload", "delete")  # requests


class Calls:
    """Stands around every system call and request during a `with` block.

    Args:
        before: called with the name and key before each call. Its exceptions are raised by the call.
        after: called in the same way after the call was made; an exception stands for a lost response.
        times: how often requests that write are made.
    """

    def __init__(
        self,
        before: Callable[[str, str], object] = lambda name, key: None,
        *,
        after: Callable[[str, str], object] = lambda name, key: None,
        times: int = 1,
    ) -> None:
        self.before = before
        self.after = after
        self._times = times
        self.hidden: Callable[[str], bool] = lambda key: False
        self.made: list[tuple[str, str]] = []
        self.details: list[str] = []

    @property
    def names(self) -> list[str]:
        """The names of the calls so far."""
        return [name for name, _ in self.made]

    def __call__(self, name: str, key: str, act: Callable[[], Any], detail: str = "") -> Any:
        self.made.append((name, key))
        self.details.append(detail)
        self.before(name, key)
        result = act()
        for _ in range(self._times - 1 if name in WRITES else 0):
            act()
        self.after(name, key)
        if name == "listing":
            return [listed for listed in result if not self.hidden(listed["path"])]
        return [folder for folder in result if not self.hidden(f"{key}/{folder}")] if name == "folders" else result

    def __enter__(self) -> Self:
        self._outer = store_module.current
        store_module.current = self
        return self

    def __exit__(self, *error: object) -> None:
        store_module.current = self._outer


def at(number: int, act: Callable[[], object]) -> Calls:
    """Does something before the call of this number, counted from 1."""
    calls = Calls()
    calls.before = lambda name, key: act() if len(calls.made) == number else None
    return calls


def error(code: int) -> None:
    raise OSError(code, os.strerror(code))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing_at(number: int, code: int) -> Calls:
    """Raises an OSError once, at the given call."""
    return at(number, lambda: error(code))


def failing(count: int, matches: Callable[[str, str], bool], code: int = 5) -> Callable[[str, str], None]:
    """Raise an OSError at the first `count` calls that match."""
    left = [count]

    def fail(name: str, key: str) -> None:
        if matches(name, key) and left[0] > 0:
            left[0] -= 1
            error(code)

    return fail


class PowerLoss(BaseException):
    """The machine goes dark."""


class LossyCalls(Calls):
    """Forgets, when the power goes at call `number`, what was not synced: file contents, and names in directories.

    `after_loss` turns the real directory into what a disk may hold then. A rename that was not synced may have reached
    the disk or not: `rename_lasts` says which.
    """

    def __init__(self, number: int, *, rename_lasts: bool) -> None:
        super().__init__(self._maybe_lose)
        self._number = number
        self._rename_lasts = rename_lasts
        self._contents: set[Path] = set()  # unsynced, as the others
        self._names: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []

    def _maybe_lose(self, name: str, key: str) -> None:
        if len(self.made) >= self._number:
            raise PowerLoss

    def __call__(self, name: str, key: str, act: Callable[[], Any], detail: str = "") -> Any:
        result = super().__call__(name, key, act, detail)
        path = Path(key)
        if name in ("make_dir", "create"):
            self._names.add(path)
        if name in ("create", "write"):
            self._contents.add(path)
        elif name == "fsync":
            self._contents.discard(path)
        elif name == "sync_dir":
            self._names = {p for p in self._names if p.parent != path}
            self._renames = [(a, b) for a, b in self._renames if b.parent != path]
        elif name == "rename":
            self._renames.append((path, Path(detail)))
            inside = {p for p in self._contents | self._names if path in p.parents}
            moved = {p: Path(detail) / p.relative_to(path) for p in inside}
            self._contents = {moved.get(p, p) for p in self._contents}
            self._names = {moved.get(p, p) for p in self._names} - {path}
        return result

    def after_loss(self) -> None:
        """Make the directory what the disk holds."""
        for path in self._contents:
            if path.exists():
                os.truncate(path, 0)
        for path in self._names:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        if not self._rename_lasts:
            for source, target in reversed(self._renames):
                if target.exists():
                    target.rename(source)


# ----- damage


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """The same bytes with a few parts changed, removed, repeated or exchanged, or with the end cut off."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        start, other = (rng.randrange(len(changed) + 1) for _ in range(2))
        size = rng.choice((1, 4, 8, 64, 4096))
        part = changed[start : start + size]
        others = changed[other : other + size]
        parts = (bytes(len(part)), rng.randbytes(len(part)), part + rng.randbytes(size), b"", others, part + others)
        changed[start : rng.choice((*[start + size] * 9, len(changed)))] = rng.choice(parts)
    return bytes(changed)


def flip_bit(file: Path, at: int | None = None) -> None:
    """Change a bit of the byte at a position, by default in the middle."""
    at = file.stat().st_size // 2 if at is None else at
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))


# ----- buckets


def bucket_in(folder: Path | str) -> ObjectPath:
    """A bucket whose objects are files, so that processes can share it; a checkpoint in it is not synced."""
    obstore = pytest.importorskip("obstore.store")
    return ObjectPath("bucket://files", str(folder).strip("/"), obstore.LocalStore("/"))


def objects_in(place: ObjectPath) -> dict[str, Any]:
    """All objects below a place, by the rest of their keys."""
    store: Any = store_at(place)
    return dict(store._listing(""))


def put(place: ObjectPath, content: bytes) -> None:
    """Write an object."""
    store_at(place).put("", content)


def get(place: ObjectPath) -> bytes:
    """Read an object."""
    content: bytes = store_at(place).read("")
    return content
