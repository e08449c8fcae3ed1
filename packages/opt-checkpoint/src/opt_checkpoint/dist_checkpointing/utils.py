"""`megatron.core.dist_checkpointing.utils`: prefixes of all sharded keys of a state."""

from opt_checkpoint.state.tree import add_prefix_for_sharding, apply_prefix_mapping, replace_prefix_for_sharding

__all__ = ["add_prefix_for_sharding", "apply_prefix_mapping", "replace_prefix_for_sharding"]
