"""Planners and storage for torch.distributed.checkpoint."""
