"""`megatron.core.dist_checkpointing.serialization`: its `save` and `load`, with the format of `opt_checkpoint.save`.

`save` writes a directory for `opt_checkpoint.load`. Megatron-Core 0.19 reads it too, in each of its strict modes: plain
values, and tensors that are not sharded, are stored together, not each under its key as `torch.distributed.checkpoint`
needs them. Earlier releases need a file `common.pt`: for these, pass the same state to Megatron-Core's own `save`, or
use `optckpt convert --to megatron`. `load` reads it, and the `torch_dist` directories of Megatron-Core 0.12 to 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

import opt_checkpoint.run.save_load as checkpoints
from opt_checkpoint.dcp.names import StrictHandling
from opt_checkpoint.disk.checkpoint import read_common, read_index
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.ranks import on_all, ranks_of
from opt_checkpoint.run.save_load import PathLike
from opt_checkpoint.state.megatron_types import from_megatron
from opt_checkpoint.state.sharded import LocalNonpersistentObject, ShardedBase, ShardedStateDict, StateDict
from opt_checkpoint.state.tree import ABSENT, ScopedState, map_leaves

_METADATA = "content_metadata"


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    *,
    content_metadata: Mapping[str, Any] | None = None,
) -> None:
    """`opt_checkpoint.save` to a directory that is empty or does not exist, for Megatron-Core too. Collective.

    Args:
        sharded_state_dict: as for `opt_checkpoint.save`; Megatron-Core's own types are taken. Rank 0 writes all tensors
            that are not sharded, and has them in memory twice meanwhile.
        checkpoint_dir: the directory.
        sharded_strategy: None: there is one format.
        validate_access_integrity: accepted and ignored: every save is checked.
        async_sharded_save: False; `opt_checkpoint.async_save` saves in the background.
        content_metadata: stored under this name, for `load_content_metadata`.
    """
    _check_strategy(sharded_strategy)
    if async_sharded_save:
        raise CheckpointValueError("async_sharded_save=True: call opt_checkpoint.async_save(state, path) instead")
    if ranks_of(None).rank == 0:
        with suppress(OSError, TypeError):  # refused below, on all ranks
            Path(checkpoint_dir).rmdir()  # if it is empty: the caller of Megatron-Core's makes it
    state = sharded_state_dict
    if content_metadata is not None:
        state = {**sharded_state_dict, _METADATA: content_metadata}
        if isinstance(sharded_state_dict, ScopedState):
            state = ScopedState(state, check=sharded_state_dict.check)
    checkpoints.save_as(state, checkpoint_dir, lists_values=False)


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: PathLike,
    sharded_strategy: None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> Any:
    """Load what is sharded into the tensors of `sharded_state_dict`. Collective.

    Args:
        sharded_state_dict: as for `opt_checkpoint.load`; its plain values are not looked at.
        checkpoint_dir: a directory of `save`, `opt_checkpoint.save` or Megatron-Core.
        sharded_strategy: None: the format is recognised.
        validate_access_integrity: accepted and ignored.
        strict: as for `opt_checkpoint.load`.

    Returns:
        All plain values of the checkpoint and the loaded ones; and the missing and the unexpected keys, if `strict`
        asks for them.
    """
    _check_strategy(sharded_strategy)

    def request(_: object, value: Any) -> Any:
        return value if isinstance(value, ShardedBase | LocalNonpersistentObject | Tensor) else ABSENT

    sharded = map_leaves(from_megatron(sharded_state_dict), request, scoped=True)
    # One rank may not see the directory, and the others would wait for it.
    common = on_all(ranks_of(None), lambda: load_common_state_dict(checkpoint_dir), f"reading {checkpoint_dir}")
    wanted = _merged(common, sharded)
    report = checkpoints.load(wanted, checkpoint_dir, strict=strict)
    if "return" in strict:
        return report.state, set(report.missing), set(report.unexpected)
    return report.state


def load_common_state_dict(checkpoint_dir: PathLike) -> StateDict:
    """Return the plain values of a checkpoint."""
    found: StateDict = read_common(read_index(checkpoint_dir))
    return found


def load_content_metadata(checkpoint_dir: PathLike) -> dict[str, Any] | None:
    """Return the `content_metadata` of a checkpoint; None if there is none."""
    found: dict[str, Any] | None = load_common_state_dict(checkpoint_dir).get(_METADATA)
    return found


def _check_strategy(strategy: object) -> None:
    if strategy is not None:
        raise CheckpointValueError(
            f"sharded_strategy={strategy!r:.80}: there is one format here; leave it at None, or pass the state to "
            "megatron.core.dist_checkpointing for its formats"
        )


def _merged(common: Any, sharded: Any) -> Any:
    """The plain values of a checkpoint, and what is sharded in their place."""
    if isinstance(common, dict) and isinstance(sharded, dict):
        both = {key: _merged(common.get(key, ABSENT), sharded.get(key, ABSENT)) for key in {**common, **sharded}}
        return sharded.like(both) if isinstance(sharded, ScopedState) else both
    return common if sharded is ABSENT else sharded
