"""A fake accelerator: queued work runs later, in random legal orders, so that tests on a CPU find missing waits.

`run_deferred` runs ranks as threads. Each has a `Device` with streams. Every torch operation of a rank is queued to its
current stream and returns at once; its results are garbage until it has run. Collectives run on streams of their own,
as over NCCL. A missing wait, memory that is freed too early, or a host read of unfinished data gives wrong numbers or
an error in some of the orders.
"""

from opt_distributed.comm.deferred.graphs import CaptureError
from opt_distributed.comm.deferred.memory import ReleasedError
from opt_distributed.comm.deferred.operations import HostReadError
from opt_distributed.comm.deferred.queues import DeadlockError
from opt_distributed.comm.deferred.ranks import DeferredComm, DeferredDevice, DeferredRank, run_deferred

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
