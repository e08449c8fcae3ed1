"""Names of `megatron.core.optimizer.muon`."""

from opt_stack.megatron.kinds import get_megatron_muon_optimizer

__all__ = ["get_megatron_muon_optimizer"]
