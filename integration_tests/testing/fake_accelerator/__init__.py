"""A fake accelerator: queued work runs later, in random legal orders, so that tests on a CPU find missing waits.

`run_deferred` runs ranks as threads. Each has a `Device` with streams. Every torch operation of a rank is queued to its
current stream and returns at once; its results are garbage until it has run. Collectives run on streams of their own,
as over NCCL. A missing wait, memory that is freed too early, or a host read of unfinished data gives wrong numbers or
an error in some of the orders.
"""

from fake_accelerator.graphs import CaptureError
from fake_accelerator.memory import ReleasedError
from fake_accelerator.operations import HostReadError
from fake_accelerator.queues import DeadlockError
from fake_accelerator.ranks import DeferredComm, DeferredDevice, DeferredRank, run_deferred

__all__ = [
    "CaptureError",
    "DeadlockError",
    "DeferredComm",
    "DeferredDevice",
    "DeferredRank",
    "HostReadError",
    "ReleasedError",
    "run_deferred",
]
