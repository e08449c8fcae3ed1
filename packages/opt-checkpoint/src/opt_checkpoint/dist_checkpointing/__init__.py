"""Megatron-Core's modules by their own names, so that code written for them changes the package it imports from.

    from megatron.core.dist_checkpointing.optimizer import optim_state_to_sharding_state
    from opt_checkpoint.dist_checkpointing.optimizer import optim_state_to_sharding_state

`save` and `load` write and read the format of `opt_checkpoint.save`, which Megatron-Core 0.19 reads too. `load` also
reads the directories of its releases 0.12 to 0.19.
"""

from opt_checkpoint.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from opt_checkpoint.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    save,
)

__all__ = [
    "LocalNonpersistentObject", "ShardedObject", "ShardedTensor", "load", "load_common_state_dict",
    "load_content_metadata", "save",
]  # fmt: skip
