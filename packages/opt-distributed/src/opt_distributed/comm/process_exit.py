"""Let collectives finish before the interpreter shuts down, so that a script ends with status 0 on its own.

When a gloo collective completes, the thread that ran it releases its tensors, for which it needs the interpreter's
lock. A thread that asks for that lock during shutdown is unwound by Python, and C++ turns this into `terminate called
without an active exception`. A script that ends right after its last step would abort every now and then, and one that
ends while parameters are still being gathered would also break its peers' gathers.
"""

import atexit
import time
from typing import Any

import torch.distributed as dist

FINISH_SECONDS = 5.0  # for collectives under way; one whose peer has died never completes
RELEASE_SECONDS = 0.1  # for gloo's threads to release the tensors of completed collectives; they need microseconds


class Started:
    """A collective under way; it is kept, even if nobody else keeps it, until somebody has waited for it."""

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


@atexit.register
def _finish_collectives() -> None:
    if not dist.is_initialized():  # no group was made, or the script destroyed them
        return
    deadline = time.monotonic() + FINISH_SECONDS
    while time.monotonic() < deadline and not all(started.work.is_completed() for started in _under_way):
        time.sleep(0.001)
    time.sleep(RELEASE_SECONDS)
