"""Descriptions of what a rank holds: sharded tensors and objects, nested states, optimizer state and groups."""

from opt_checkpoint.state.checksums import checksums
from opt_checkpoint.state.groups import Conflict
from opt_checkpoint.state.megatron_types import from_megatron
from opt_checkpoint.state.model_parallel import ModelAxes, Replica, place_
from opt_checkpoint.state.optimizer_state import SPLIT_MARK
from opt_checkpoint.state.sharded import EMPTY, ShardedStateDict, StateDict
from opt_checkpoint.state.tree import FlatState, flatten_state
from opt_checkpoint.state.wrappers import former_names

__all__ = [
    "EMPTY", "SPLIT_MARK", "Conflict", "FlatState", "ModelAxes", "Replica", "ShardedStateDict", "StateDict",
    "checksums", "flatten_state", "former_names", "from_megatron", "place_",
]  # fmt: skip
