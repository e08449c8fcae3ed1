"""`megatron.core.dist_checkpointing.mapping`: the sharded types and the factories among them."""

from opt_checkpoint.dict_ops import apply_factories, apply_factory_merges
from opt_checkpoint.factory import ShardedTensorFactory
from opt_checkpoint.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)

__all__ = [
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]
