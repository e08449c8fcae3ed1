"""`megatron.core.dist_checkpointing.optimizer`: optimizer state sharded as the model's parameters are."""

from opt_checkpoint.state.optimizer_state import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    logger,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)

__all__ = [
    "KEEP_VARS_HINT", "get_optim_param_to_id_map", "get_param_id_to_sharded_param_map", "logger",
    "make_sharded_optimizer_tensor", "optim_state_to_sharding_state",
]  # fmt: skip
