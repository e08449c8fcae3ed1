"""An `ObjectClient` that retries failed requests of another one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from opt_checkpoint.objects.client import ByteSpan, Listed, ObjectClient

T = TypeVar("T")
_ATTEMPTS = 3
_FIRST_WAIT_S = 0.5
# Valid responses, not failures.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError)


class RetryingClient:
    """Tries every request up to three times; uploads only once, because their parts are consumed.

    obstore retries single HTTP requests. This also repeats requests that obstore must not repeat, such as a `create`
    without a response. `FileExistsError` may then mean that the first attempt wrote the object.

    Args:
        client: makes the requests.
        wait: called with the seconds to wait before the next attempt.
    """

    def __init__(self, client: ObjectClient, wait: Callable[[float], None] = time.sleep) -> None:
        self._client, self._wait = client, wait

    def put(self, key: str, content: bytes) -> None:
        self._repeated(lambda: self._client.put(key, content))

    def create(self, key: str, content: bytes) -> None:
        self._repeated(lambda: self._client.create(key, content))

    def upload(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        self._client.upload(key, parts)

    def get(self, key: str) -> bytes:
        return self._repeated(lambda: self._client.get(key))

    def get_spans(self, key: str, spans: Sequence[ByteSpan]) -> list[memoryview]:
        return self._repeated(lambda: self._client.get_spans(key, spans))

    def head(self, key: str) -> Listed:
        return self._repeated(lambda: self._client.head(key))

    def listing(self, prefix: str) -> list[Listed]:
        return self._repeated(lambda: self._client.listing(prefix))

    def folders(self, prefix: str) -> list[str]:
        return self._repeated(lambda: self._client.folders(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._repeated(lambda: self._client.delete(keys))

    def _repeated(self, request: Callable[[], T]) -> T:
        for attempt in range(_ATTEMPTS - 1):
            try:
                return request()
            except _FINAL:
                raise
            except OSError:
                self._wait(_FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
        return request()
