"""Megatron-Core's modules by their own names, so that code written for them changes the package it imports from.

    from megatron.core.dist_checkpointing.optimizer import optim_state_to_sharding_state
    from opt_checkpoint.dist_checkpointing.optimizer import optim_state_to_sharding_state

Here are descriptions and their helpers. Saving and loading are `opt_checkpoint.save` and `opt_checkpoint.load`, which
take the same states and have signatures of their own.
"""

from opt_checkpoint.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

__all__ = ["LocalNonpersistentObject", "ShardedObject", "ShardedTensor"]
