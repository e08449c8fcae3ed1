"""Descriptions of what a rank holds: sharded tensors and objects, nested states, optimizer state and groups."""

from opt_checkpoint.state.groups import NO_OVERRIDE, Conflict
from opt_checkpoint.state.model_axes import ModelAxes, Replica
from opt_checkpoint.state.model_parallel import place_
from opt_checkpoint.state.sharded import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from opt_checkpoint.state.state_spec import SPLIT_MARK

__all__ = [
    "NO_OVERRIDE", "SPLIT_MARK", "Conflict", "LocalNonpersistentObject", "ModelAxes", "Replica", "ShardedObject",
    "ShardedStateDict", "ShardedTensor", "StateDict", "place_",
]  # fmt: skip
