"""Contiguous buffers of parameters and gradients, and when they are reduced and gathered.

For packages that plan, wrap or compare models. Trainers find `DistributedDataParallel` at the top of the package.
"""

from opt_distributed.buffers.chunk_buffers import SyncedBuffer
from opt_distributed.buffers.data_parallel import DistributedDataParallel, share_launch_order
from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.param_sync import AwaitedGroup, stored_params
from opt_distributed.buffers.planner import (
    CODED_MULTIPLE,
    PRE_SHARDED,
    BufferPlan,
    WorldSizes,
    default_bucket_size,
    plan_buffers,
    short,
)
from opt_distributed.buffers.reduced import ReducedGrads
from opt_distributed.buffers.storage import ParamAndGradBuffer, matches
from opt_distributed.buffers.stored import (
    ReplicaError,
    StorageError,
    broadcast_replicas_,
    check_apart,
    check_replicas,
    check_untrained,
    compare_copies,
    copied_ids,
    describe_stored,
    is_bound,
    not_trained,
)
from opt_distributed.buffers.wires import naming
from opt_distributed.comm.roles import uses_qk_layernorm
from opt_paramgroups import Metas, Params

__all__ = [
    "CODED_MULTIPLE", "PRE_SHARDED", "AwaitedGroup", "BufferPlan", "DistributedDataParallel", "Metas",
    "ParamAndGradBuffer", "Params", "ReducedGrads", "ReplicaError", "StorageError", "SyncedBuffer",
    "UnusableGradientError", "WorldSizes", "broadcast_replicas_", "check_apart", "check_replicas", "check_untrained",
    "compare_copies", "copied_ids", "default_bucket_size", "describe_stored", "is_bound", "matches", "naming",
    "not_trained", "plan_buffers", "share_launch_order", "short", "stored_params", "uses_qk_layernorm",
]  # fmt: skip
