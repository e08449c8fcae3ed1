"""Object stores that fail: requests that raise, that act and then raise, lists that lag, and deaths."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from opt_checkpoint import ObjectPath
from opt_checkpoint.objects.client import ByteSpan, Listed, ObjectClient
from opt_checkpoint.objects.retrying import RetryingClient

T = TypeVar("T")


class FaultyClient:
    """Forwards requests to another client, and lets a test make any of them fail.

    Args:
        client: executes the requests.
        before: called with the method's name and the key before each request. Its exceptions are raised by the request.
        after: called in the same way after the request was executed; an exception stands for a lost response.
        times: how often requests that write are executed.
    """

    def __init__(
        self,
        client: ObjectClient,
        *,
        before: Callable[[str, str], None] = lambda name, key: None,
        after: Callable[[str, str], None] = lambda name, key: None,
        times: int = 1,
    ) -> None:
        self._client, self.before, self.after, self._times = client, before, after, times
        self.hidden: Callable[[str], bool] = lambda key: False
        self.requests: list[tuple[str, str]] = []
        self.spans: list[ByteSpan] = []

    def _request(self, name: str, key: str, act: Callable[[], T]) -> T:
        self.requests.append((name, key))
        self.before(name, key)
        result = act()
        self.after(name, key)
        return result

    def put(self, key: str, content: bytes) -> None:
        self._request("put", key, lambda: [self._client.put(key, content) for _ in range(self._times)])

    def create(self, key: str, content: bytes) -> None:
        self._request("create", key, lambda: [self._client.create(key, content) for _ in range(self._times)])

    def upload(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        self._request("upload", key, lambda: self._client.upload(key, parts))

    def get(self, key: str) -> bytes:
        return self._request("get", key, lambda: self._client.get(key))

    def get_spans(self, key: str, spans: Sequence[ByteSpan]) -> list[memoryview]:
        self.spans += spans
        return self._request("get_spans", key, lambda: self._client.get_spans(key, spans))

    def head(self, key: str) -> Listed:
        return self._request("head", key, lambda: self._client.head(key))

    def listing(self, prefix: str) -> list[Listed]:
        found = self._request("listing", prefix, lambda: self._client.listing(prefix))
        return [listed for listed in found if not self.hidden(listed.key)]

    def folders(self, prefix: str) -> list[str]:
        self._request("folders", prefix, lambda: None)
        start = len(prefix) + 1 if prefix else 0
        keys = [listed.key for listed in self._client.listing(prefix) if not self.hidden(listed.key)]
        return sorted({key[start:].partition("/")[0] for key in keys if "/" in key[start:]})

    def delete(self, keys: Sequence[str]) -> None:
        self._request("delete", ",".join(keys), lambda: self._client.delete(keys))


def faulty(path: ObjectPath, *, retry: bool = True, times: int = 1) -> tuple[ObjectPath, FaultyClient]:
    """The same place, reached through a store that can be made to fail."""
    client = FaultyClient(path.client, times=times)
    outer: ObjectClient = RetryingClient(client, wait=lambda seconds: None) if retry else client
    return ObjectPath(outer, path.root, path.key), client


def failing(count: int, matches: Callable[[str, str], bool], error: int = errno.EIO) -> Callable[[str, str], None]:
    """Raise an OSError at the first `count` requests that match."""
    left = [count]

    def fail(name: str, key: str) -> None:
        if matches(name, key) and left[0] > 0:
            left[0] -= 1
            raise OSError(error, os.strerror(error), key)

    return fail


def dying_at(number: int) -> Callable[[str, str], None]:
    """Kill this process, for real, at the given request that writes."""
    count = [0]

    def die(name: str, key: str) -> None:
        if name in ("put", "create", "upload", "delete"):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return die
