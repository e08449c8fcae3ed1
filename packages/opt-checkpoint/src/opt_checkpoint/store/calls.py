"""The hook around every system call and request of a store, by which tests make any of them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
current: Callable[..., Any] | None = None  # tests set it: is called in place of `act`, with all arguments


def call(name: str, key: str, act: Callable[[], T], detail: str = "") -> T:
    """Make one system call or request.

    Args:
        name: what it does, such as `fsync` or `upload`.
        key: the path or key that it concerns.
        act: makes the call.
        detail: the new path of a rename, or the ranges of a read.
    """
    return act() if current is None else current(name, key, act, detail)
