"""`megatron.core.dist_checkpointing.mapping`: the sharded types and the factories among them."""

from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from opt_checkpoint.state.tree import apply_factories, apply_factory_merges

__all__ = [
    "LocalNonpersistentObject", "ReplicaId", "ShardedBase", "ShardedObject", "ShardedStateDict", "ShardedTensor",
    "ShardedTensorFactory", "StateDict", "apply_factories", "apply_factory_merges", "is_main_replica",
]  # fmt: skip
