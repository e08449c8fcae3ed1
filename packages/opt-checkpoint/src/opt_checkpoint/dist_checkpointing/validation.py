"""`megatron.core.dist_checkpointing.validation`: what to do about keys on one side only."""

from opt_checkpoint.dcp.names import StrictHandling

__all__ = ["StrictHandling"]
