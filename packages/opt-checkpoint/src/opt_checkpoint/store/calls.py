"""The hook around every system call and request of a store, by which tests make any of them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Calls(Protocol):
    """Carries out one call: `act()`, or an error in its place."""

    def __call__(self, name: str, key: str, act: Callable[[], T], detail: str = "") -> T: ...


def direct(name: str, key: str, act: Callable[[], T], detail: str = "") -> T:
    """Make a call without anything around it."""
    return act()


current: Calls = direct  # tests replace it


def call(name: str, key: str, act: Callable[[], T], detail: str = "") -> T:
    """Make one system call or request.

    Args:
        name: what it does, such as `fsync` or `upload`.
        key: the path or key that it concerns.
        act: makes the call.
        detail: the new path of a rename, or the ranges of a read.
    """
    return current(name, key, act, detail)
