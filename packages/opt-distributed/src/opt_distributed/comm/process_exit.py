"""Let gloo's threads finish before the interpreter shuts down, so that scripts end with their exit status.

When a gloo collective completes, the thread that ran it releases its tensors, which requires the GIL. Python unwinds a
thread that requests the GIL during shutdown, and C++ then calls `terminate` ("terminate called without an active
exception"). So a script that ends right after its last collective would abort now and then, even if it has destroyed
its process groups: their threads live as long as anything refers to the groups. A script that ends while parameters are
being gathered would also break the gathers of its peers.
"""

import atexit
import time
from threading import Event
from typing import Any

FINISH_SECONDS = 5.0  # for pending collectives; one whose peer has died never completes
RELEASE_SECONDS = 0.1  # for gloo's threads to release the tensors of completed collectives; they need microseconds


class Started:
    """A pending collective. It is kept alive until `wait` was called, even if nothing else refers to it."""

    def __init__(self, work: Any):
        self.work = work
        _under_way.add(self)

    def wait(self) -> object:
        """Return when the result may be read."""
        try:
            return self.work.wait()
        finally:
            _under_way.discard(self)


_under_way: set[Started] = set()


def wait_at_exit() -> None:
    """Let the interpreter wait for collectives before it shuts down. Called by whatever uses a process group."""
    _is_used.set()


_is_used = Event()


@atexit.register  # at import, so that hooks of scripts, which may destroy groups, run before
def _finish_collectives() -> None:
    if not _is_used.is_set():
        return
    deadline = time.monotonic() + FINISH_SECONDS
    while time.monotonic() < deadline and not all(started.work.is_completed() for started in _under_way):
        time.sleep(0.001)
    time.sleep(RELEASE_SECONDS)
