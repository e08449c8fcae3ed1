"""Sharded optimizer state that reloads on any number of ranks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from opt_checkpoint.dcp.names import StrictHandling
from opt_checkpoint.dcp.plan import PlanCache
from opt_checkpoint.disk.archives import NUMPY_GLOBALS, NotLoaded
from opt_checkpoint.disk.checkpoint import read_common, read_index, verify_checkpoint
from opt_checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointingException,
    CheckpointKeyError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointStorageError,
    CheckpointValueError,
)
from opt_checkpoint.run.async_save import AsyncSaver, SaveHandle, async_save
from opt_checkpoint.run.best import KeepBest
from opt_checkpoint.run.manager import CheckpointManager
from opt_checkpoint.run.named_model import sharded_model
from opt_checkpoint.run.save_load import LoadReport, load, save
from opt_checkpoint.run.series import committed_steps
from opt_checkpoint.run.torch_optimizer import OptimizerLoadReport, load_optimizer, sharded_optimizer
from opt_checkpoint.state.factory import Segment, ShardedTensorFactory
from opt_checkpoint.state.groups import GroupMismatchError, GroupReport, apply_saved_groups, groups_to_saved
from opt_checkpoint.state.optimizer_state import (
    KEEP_VARS_HINT,
    REFERENCE_ALIASES,
    LayoutBound,
    LikeParam,
    PerMatrix,
    PerParam,
    Reduced,
    StateSpec,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    make_sharded_state,
    optim_state_to_sharding_state,
)
from opt_checkpoint.state.sharded import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from opt_checkpoint.state.tensors import sharded_like
from opt_checkpoint.state.tree import (
    ScopedState,
    add_prefix_for_sharding,
    apply_factories,
    apply_factory_merges,
    apply_prefix_mapping,
    replace_prefix_for_sharding,
)
from opt_checkpoint.store import ObjectPath

if TYPE_CHECKING:  # imported on use
    from opt_checkpoint.convert.megatron import BucketSlot
    from opt_checkpoint.convert.name_rules import (
        SAME_NAMES,
        NameRule,
        megatron_gpt2_names,
        megatron_llama_names,
        read_name_rules,
    )
    from opt_checkpoint.convert.reading import differences
    from opt_checkpoint.convert.safetensors import load_safetensors, save_safetensors
    from opt_checkpoint.tiers.tiered_manager import Resume, TieredCheckpointManager

__version__ = "0.1.0"
_ON_USE = {
    "convert.reading": ("differences",),
    "convert.megatron": ("BucketSlot",),
    "convert.name_rules": ("SAME_NAMES", "NameRule", "megatron_gpt2_names", "megatron_llama_names", "read_name_rules"),
    "convert.safetensors": ("load_safetensors", "save_safetensors"),
    "tiers.tiered_manager": ("Resume", "TieredCheckpointManager"),
}


def __getattr__(name: str) -> Any:
    for module, names in _ON_USE.items():
        if name in names:
            return getattr(import_module(f"opt_checkpoint.{module}"), name)
    raise AttributeError(f"module 'opt_checkpoint' has no attribute {name!r}")


__all__ = [
    "KEEP_VARS_HINT", "NUMPY_GLOBALS", "REFERENCE_ALIASES", "SAME_NAMES", "AsyncSaver", "BucketSlot",
    "CheckpointCorruptError", "CheckpointExistsError", "CheckpointFailedError", "CheckpointKeyError",
    "CheckpointManager", "CheckpointMismatchError", "CheckpointNotFoundError", "CheckpointStorageError",
    "CheckpointValueError", "CheckpointingException", "GroupMismatchError", "GroupReport", "KeepBest", "LayoutBound",
    "LikeParam", "LoadReport", "LocalNonpersistentObject", "NameRule", "NotLoaded", "ObjectPath",
    "OptimizerLoadReport", "PerMatrix", "PerParam", "PlanCache", "Reduced", "Resume", "SaveHandle", "ScopedState",
    "Segment", "ShardedBase", "ShardedObject", "ShardedTensor", "ShardedTensorFactory", "StateSpec", "StrictHandling",
    "TieredCheckpointManager", "add_prefix_for_sharding", "apply_factories", "apply_factory_merges",
    "apply_prefix_mapping", "apply_saved_groups", "async_save", "committed_steps", "differences",
    "get_optim_param_to_id_map", "get_param_id_to_sharded_param_map", "groups_to_saved", "is_main_replica", "load",
    "load_optimizer", "load_safetensors", "make_sharded_optimizer_tensor", "make_sharded_state", "megatron_gpt2_names",
    "megatron_llama_names", "optim_state_to_sharding_state", "read_common", "read_index", "read_name_rules",
    "replace_prefix_for_sharding", "save", "save_safetensors", "sharded_like", "sharded_model", "sharded_optimizer",
    "verify_checkpoint",
]  # fmt: skip
