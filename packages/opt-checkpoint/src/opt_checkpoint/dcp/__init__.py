"""Planners and storage for torch.distributed.checkpoint."""

from opt_checkpoint.dcp.megatron_types import local_object, to_megatron

__all__ = ["local_object", "to_megatron"]
