"""`megatron.core.dist_checkpointing.core`: the error."""

from opt_checkpoint.errors import CheckpointingException

__all__ = ["CheckpointingException"]
