"""Checkpoints in two tiers, for `TieredCheckpointManager`: the core does not import this."""
