"""Sharded optimizer state that reloads on any number of ranks."""

from opt_checkpoint.errors import CheckpointingException
from opt_checkpoint.factory import Segment, ShardedTensorFactory
from opt_checkpoint.mapping import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor, is_main_replica

__version__ = "0.1.0"

__all__ = [
    "CheckpointingException",
    "LocalNonpersistentObject",
    "Segment",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "is_main_replica",
]
