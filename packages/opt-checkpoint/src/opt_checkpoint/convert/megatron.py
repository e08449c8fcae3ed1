"""Reads Megatron-Core directories: three sharded optimizer formats, the model, and the step wherever it is stored.

| `distrib_optim_sharding_type` | written by | what it holds | read by |
|---|---|---|---|
| `fully_reshardable` | 0.14 on | states by parameter name | `load`, or converted |
| `fully_sharded_model_space` | up to 0.13 | states by parameter name, in flattened blocks | `load`, or converted |
| `dp_reshardable` | all (its default) | buckets of memory without names | converted, given the saving run's layout |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint.convert.file_backed import mapped_apart, read_into, scratch_folder, select
from opt_checkpoint.convert.megatron_buckets import BucketSlot, buckets_to_states
from opt_checkpoint.disk.detect import read_common, read_index, read_object
from opt_checkpoint.disk.index import COMMON_KEY, CheckpointIndex, Kind
from opt_checkpoint.disk.stored_objects import not_loaded_in
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.save_load import PathLike, save
from opt_checkpoint.run.saved_optimizer import PREFIX
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.sharded import ShardedObject, ShardedTensor
from opt_checkpoint.store import AnyPath

BUCKETS = "dp_reshardable"
READABLE = frozenset({BUCKETS, "fully_reshardable", "fully_sharded_model_space"})
_GROUPS_OBJECT = re.compile(r"optimizer\.distributed\..*\.optimizer/shard_[\d.]+_[\d.]+")
_STACKED = re.compile(r"(?:.*\.)?layers\.(?!\d)")
_BUCKET_STATE = re.compile(r".*\.gbuf_idx_\d+\..*bucket_idx_\d+\.\w+")


def sharding_type(index: CheckpointIndex, common: Any) -> str | None:
    """The recorded format of the distributed optimizer's state; None if the optimizer has none.

    Args:
        index: a Megatron-Core directory.
        common: its common state.
    """
    found = set(_values_of(common, "param_state_sharding_type"))
    if not found and any(map(_BUCKET_STATE.fullmatch, index.tensors)):
        return BUCKETS
    return str(found.pop()) if len(found) == 1 else None


def read_step(index: CheckpointIndex, common: Any) -> int | None:
    """The step count of the whole optimizer; None if none is stored.

    Megatron-Core stores it in the parameter groups (in the common state, or in an object of its own), or as
    `common_step` next to the optimizer's states.

    Args:
        index: a Megatron-Core directory.
        common: its common state.

    Raises:
        CheckpointingException: parameters have different step counts.
    """
    places = [common.get("optimizer") if isinstance(common, dict) else None]
    places += [read_object(index, key) for key in sorted(index.objects) if _GROUPS_OBJECT.fullmatch(key)]
    steps = {int(v) for place in places for name in ("step", "common_step") for v in _values_of(place, name)}
    if len(steps) > 1:
        raise CheckpointValueError(
            f"{index.path} holds different step counts: {sorted(steps)}; pass the right one as step= (--step)"
        )
    return steps.pop() if steps else None


def _values_of(value: Any, name: str) -> Iterator[Any]:
    """Numbers, strings and one-element tensors under a key of this name, anywhere in a nested value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            is_single = isinstance(inner, int | float | str) or (isinstance(inner, Tensor) and inner.numel() == 1)
            if key == name and is_single:
                yield inner
            else:
                yield from _values_of(inner, name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values_of(inner, name)


def megatron_to_checkpoint(
    source: PathLike, path: AnyPath, *, slots: Sequence[BucketSlot] | None = None, step: int | None = None
) -> None:
    """Convert a Megatron-Core directory to a checkpoint of opt-checkpoint, in one process, with tensors in scratch
    files.

    Model tensors keep their keys. The optimizer's are `optimizer.state.<state>.<key>`: `fp32_param` for main weights,
    the moments, and `step`. Objects and plain values keep their places, except those of classes that are not loaded
    (the command line, numpy's RNG state) and the parameter groups, which name no parameters.

    Args:
        source: the directory.
        path: the checkpoint to write: a directory, or a place in an object store.
        slots: for `dp_reshardable`: where each parameter is in the buckets.
        step: how many updates were made; None for the stored count.

    Raises:
        CheckpointingException: it is not a Megatron-Core directory, has a format that is not read, or needs `slots`.
    """
    index = read_index(source)
    if index.kind is not Kind.MEGATRON and not any(map(_BUCKET_STATE.fullmatch, index.tensors)):
        raise CheckpointValueError(f"{source} was not written by Megatron-Core: it has no metadata.json")
    common = read_common(index)
    form = sharding_type(index, common)
    if form is not None and form not in READABLE:
        raise CheckpointValueError(
            f"{source} stores its optimizer as {form}, which is not read; allowed: {', '.join(sorted(READABLE))}. "
            f"Load it with Megatron-Core and save it with --dist-ckpt-optim-fully-reshardable"
        )
    if form == BUCKETS and slots is None:
        raise CheckpointValueError(
            f"{source} stores its optimizer as {BUCKETS}: buckets of memory in which no parameter has a name. Pass "
            f"slots= (--slots FILE), the layout of the run that saved it; see BucketSlot in the README"
        )
    step = read_step(index, common) if step is None else step
    named = [key for key in index.tensors if not _BUCKET_STATE.fullmatch(key)]
    with scratch_folder(path) as scratch:
        tensors = mapped_apart(Path(scratch), select(index, named))
        read_into(index, tensors)
        sharded = [whole_tensor(_our_key(key), tensor) for key, tensor in tensors.items()]
        if form == BUCKETS:
            sharded += buckets_to_states(index, slots or (), Path(scratch))
        save({"tensors": [*sharded, *_steps(sharded, step)], **_plain(index, common)}, path)


def _our_key(key: str) -> str:
    main = f"{PREFIX}param."
    return f"{PREFIX}fp32_param.{key.removeprefix(main)}" if key.startswith(main) else key


def _steps(tensors: Sequence[ShardedTensor], step: int | None) -> Iterator[ShardedTensor]:
    """The step count of every parameter with state: one number, or one per layer that is stacked under its key."""
    if step is None:
        return
    main = f"{PREFIX}fp32_param."
    shapes = {tensor.key.removeprefix(main): tensor.global_shape for tensor in tensors if tensor.key.startswith(main)}
    for name, shape in shapes.items():
        yield whole_tensor(f"{PREFIX}step.{name}", torch.full(shape[:1] if _STACKED.match(name) else (), step))


def _plain(index: CheckpointIndex, common: Any) -> dict[str, Any]:
    """The loaded objects and plain values under their keys, without those of the optimizer."""
    values: dict[str, Any] = {}
    if isinstance(common, Mapping):
        values = {k: v for k, v in common.items() if k != "optimizer" and not any(not_loaded_in(v))}
    objects = []
    for key in sorted(index.objects):
        value = None if key == COMMON_KEY or key.startswith("optimizer.distributed.") else read_object(index, key)
        if value is not None and not any(not_loaded_in(value)):
            shard = ShardedObject.empty_from_unique_key(key)
            shard.data = value
            objects.append(shard)
    return {**values, "objects": objects} if objects else values
