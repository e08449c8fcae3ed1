"""The hook around every system call and request of a store, by which tests make any of them fail."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")
_ATTEMPTS = 3
_FIRST_WAIT_S = 0.5
# Valid responses, not failures.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError)


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


def retried(request: Callable[[], T]) -> T:
    """Make a request up to three times, with a pause after each failure.

    obstore retries single HTTP requests. This also repeats what obstore must not repeat: a `create` without a response,
    after which `FileExistsError` may mean that the first attempt wrote the object, and an upload from its start.
    """
    for attempt in range(_ATTEMPTS - 1):
        try:
            return request()
        except _FINAL:
            raise
        except OSError:
            time.sleep(_FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
    return request()
