"""A fake accelerator: queued work runs later, in random legal orders, so that a wait that is missing shows on a CPU.

`run_deferred` runs ranks as threads. Each has a `Device` with streams; every torch operation of a rank is queued to its
current stream and returns at once, with garbage in its results until it has run. Collectives run on streams of their
own, as over NCCL. A missing wait, memory that is dropped or given back too early, and a host read of unfinished data
give wrong numbers, or an error, in some of the orders.
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
