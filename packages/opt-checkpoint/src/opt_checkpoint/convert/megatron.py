"""Reads Megatron-Core directories: three sharded optimizer formats, the model, and the step wherever it is stored.

| `distrib_optim_sharding_type` | written by | what it holds | read by |
|---|---|---|---|
| `fully_reshardable` | 0.14 on | states by parameter name | `load`, or converted |
| `fully_sharded_model_space` | up to 0.13 | states by parameter name, in flattened blocks | `load`, or converted |
| `dp_reshardable` | all (its default) | buckets of memory without names | converted, given the saving run's layout |
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.convert.reading import read_mapped, scratch_folder
from opt_checkpoint.disk.archives import not_loaded_in
from opt_checkpoint.disk.checkpoint import read_common, read_index, read_object
from opt_checkpoint.disk.index import COMMON_KEY, CheckpointIndex, Kind
from opt_checkpoint.disk.main_weights import Moments, refuse_shifted, with_moments
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.save_load import PathLike, save
from opt_checkpoint.run.saved_optimizer import PREFIX, dicts_of, read_step, values_of
from opt_checkpoint.state.sharded import Shape, ShardedObject, ShardedTensor, ShardIdentity
from opt_checkpoint.state.tensors import sharded_like
from opt_checkpoint.store import AnyPath

BUCKETS = "dp_reshardable"
_MAIN = f"{PREFIX}fp32_param."
READABLE = frozenset({BUCKETS, "fully_reshardable", "fully_sharded_model_space"})
_STACKED = re.compile(r"(?:.*\.)?layers\.(?!\d)")
EXPERT = re.compile(r"(?:.*\.)?experts\.")
_CHAINED = re.compile(r"chained_(\d+)\.(?=optimizer\.)")  # before keys of an optimizer of several
_BUCKET_STATE = re.compile(
    r"(?:chained_(\d+)\.)?(?:.*\.)?dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(?:.+)\.bucket_idx_(\d+)\.(\w+)"
)
_START_MULTIPLE = 64  # of elements, on which Megatron-Core's parameters start: longer gaps are not padding


def megatron_to_checkpoint(
    source: PathLike,
    path: AnyPath,
    *,
    slots: Sequence[BucketSlot] | None = None,
    step: int | None = None,
    moments: Moments = "saved",
) -> None:
    """Convert a Megatron-Core directory to a checkpoint of opt-checkpoint, in one process, with tensors in scratch
    files.

    Model tensors keep their keys. The optimizer's are `optimizer.state.<state>.<key>`: `fp32_param` for main weights,
    the moments, and `step`; the loss scale is in `optimizer`. Objects and plain values keep their places, except those
    of classes that are not loaded (the command line, numpy's RNG state) and the parameter groups, which name no
    parameters.

    Args:
        source: the directory.
        path: the checkpoint to write: a directory, or a place in an object store.
        slots: for `dp_reshardable`: where each parameter is in the buckets.
        step: how many updates were made; None for the stored count.
        moments: `"new"` converts no state of the optimizer: for damaged directories, and buckets without `slots`.

    Raises:
        CheckpointingException: it is not a Megatron-Core directory, has a format that is not read, needs `slots`, or
            has no buckets for them.
    """
    if moments == "new" and not (slots is None and step is None):
        raise CheckpointValueError("moments='new' converts no states, for which slots and step would be")
    index = with_moments(read_index(source), moments)
    has_buckets = any(map(_BUCKET_STATE.fullmatch, index.tensors))
    if index.kind is not Kind.MEGATRON and not has_buckets:
        raise CheckpointValueError(f"{source} was not written by Megatron-Core: it has no metadata.json")
    common = read_common(index)
    forms = set(values_of(common, "param_state_sharding_type")) or ({BUCKETS} if has_buckets else set())
    form = str(forms.pop()) if len(forms) == 1 else None  # of the optimizer; None if there is none
    if form is not None and form not in READABLE:
        raise CheckpointValueError(
            f"{source} stores its optimizer as {form}, which is not read; allowed: {', '.join(sorted(READABLE))}. "
            f"Load it with Megatron-Core and save it with --dist-ckpt-optim-fully-reshardable"
        )
    if form == BUCKETS and slots is None and moments == "saved":
        raise CheckpointValueError(
            f"{source} stores its optimizer as {BUCKETS}: buckets of memory in which no parameter has a name. Pass "
            f"slots= (--slots FILE), the layout of the run that saved it; see opt_checkpoint.BucketSlot"
        )
    refuse_shifted(index)
    step = read_step(index, common) if step is None else step
    named = {key: stored for key, stored in index.tensors.items() if not _BUCKET_STATE.fullmatch(key)}
    with scratch_folder(path) as scratch:
        tensors = read_mapped(index, named, scratch)
        sharded = [sharded_like(_converted_key(key), tensor) for key, tensor in tensors.items()]
        if slots is not None:
            sharded += _bucket_states(index, slots, scratch)
        if step is not None:
            sharded += _steps(sharded, step)
        values = _plain(index, common)
        if any(tensor.key.startswith(PREFIX) for tensor in sharded):  # as an opt-stack optimizer without groups
            values["optimizer"] = {"version": 1, "groups": {"groups": [], "names": []}, **values.get("optimizer", {})}
        save({"tensors": sharded, **values}, path)


def _converted_key(key: str) -> str:
    """The key of a tensor without the number of an optimizer in a chain, with the name of main weights that we use."""
    main = f"{PREFIX}param."
    key = _CHAINED.sub("", key)
    return f"{_MAIN}{key.removeprefix(main)}" if key.startswith(main) else key


def _steps(states: Sequence[ShardedTensor], step: int) -> Iterator[ShardedTensor]:
    """The step of every parameter with a state; layers and experts that are stacked have a step each."""
    shapes: dict[str, Shape] = {}
    for tensor in states:
        state, _, name = tensor.key.removeprefix(PREFIX).partition(".")
        if tensor.key.startswith(PREFIX) and (name not in shapes or state == "fp32_param"):
            shapes[name] = tensor.global_shape
    for name, shape in shapes.items():
        stacked = shape[:1] if _STACKED.match(name) else ()
        if EXPERT.match(name):  # of matrices and biases
            stacked = shape[: max(0, len(shape) - (1 if name.endswith("bias") else 2))]
        steps = torch.full(stacked, step, dtype=torch.int64, device="cpu")
        yield sharded_like(f"{PREFIX}step.{name}", steps)


def _plain(index: CheckpointIndex, common: Any) -> dict[str, Any]:
    """The loaded objects and plain values under their keys; of the optimizer, only the loss scale, if it changes.

    Raises:
        CheckpointValueError: optimizers of a chain have different loss scales.
    """
    values: dict[str, Any] = {}
    if isinstance(common, Mapping):
        values = {k: v for k, v in common.items() if k != "optimizer" and not any(not_loaded_in(v))}
    keys = [key for key in sorted(index.objects) if ".grad_scaler/shard_" in key and "optimizer.distributed." in key]
    stored = [*dicts_of(common, "grad_scaler"), *(read_object(index, key) for key in keys)]
    scales = [{name: float(value) for name, value in scale.items()} for scale in stored if scale]
    if any(scale != scales[0] for scale in scales):
        raise CheckpointValueError(f"{index.path} holds different loss scales: {scales}")
    for scale in scales[:1]:
        kept = {name: value if name == "scale" else int(value) for name, value in scale.items()}
        values["optimizer"] = {"grad_scaler": kept}
    objects = []
    for key in sorted(index.objects):
        is_of_optimizer = _CHAINED.sub("", key).startswith("optimizer.distributed.")
        value = None if key == COMMON_KEY or is_of_optimizer else read_object(index, key)
        if value is not None and not any(not_loaded_in(value)):
            shard = ShardedObject.empty_from_unique_key(key)
            shard.data = value
            objects.append(shard)
    return {**values, "objects": objects} if objects else values


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSlot:
    """Position of a parameter, or of a tensor-parallel rank's block of it, in a `dp_reshardable` directory.

    Args:
        name: the parameter's key.
        shape: the block's.
        start: its first element in its bucket.
        bucket: number of the bucket.
        buffer: number of the buffer.
        group: number of the data-parallel group: which model-parallel rank saved it.
        optimizer: number of the optimizer in the chain, N of keys `chained_N.optimizer...`: experts have their own.
        global_shape: the parameter's; None if the block is the whole parameter.
        global_offset: where the block begins in the parameter.
    """

    name: str
    shape: Shape
    start: int
    bucket: int = 0
    buffer: int = 0
    group: int = 0
    optimizer: int = 0
    global_shape: Shape | None = None
    global_offset: Shape | None = None

    @property
    def stop(self) -> int:
        """End of its elements in the bucket, exclusive."""
        return self.start + math.prod(self.shape)


def _bucket_states(index: CheckpointIndex, slots: Sequence[BucketSlot], scratch: Path) -> Iterator[ShardedTensor]:
    """The states of every parameter, cut from the buckets: main weights as `optimizer.state.fp32_param.<name>`.

    Every block is returned once. Model-parallel ranks that hold the same block must have the same values.

    Args:
        index: the directory.
        slots: where each parameter is; together they must fill every bucket except for padding.
        scratch: a folder for the buckets; the states are views of files in it.

    Raises:
        CheckpointingException: the directory holds no buckets, or remainders in place of main weights; slots do not fit
            its buckets, or two groups hold different values of one block.
    """
    buckets = _buckets(index)
    by_bucket = defaultdict[_BucketId, list[BucketSlot]](list)
    for slot in sorted(slots, key=lambda slot: slot.start):
        by_bucket[_BucketId(slot.optimizer, slot.group, slot.buffer, slot.bucket)].append(slot)
    if unknown := by_bucket.keys() - buckets.keys():
        first_unknown = min(unknown)
        known = "; ".join(map(str, sorted(buckets)))
        name = by_bucket[first_unknown][0].name
        raise CheckpointValueError(f"{name}: no bucket has {first_unknown}; there are {known}")
    slots_of = {key: by_bucket[bucket] for bucket, states in buckets.items() for key in states.values()}
    for key, placed in slots_of.items():
        _check_filled(key, math.prod(index.tensors[key].shape), placed)
    folder = scratch / "buckets"
    folder.mkdir()
    flat = read_mapped(index, {key: index.tensors[key] for key in slots_of}, folder)
    first: dict[ShardIdentity, Tensor] = {}
    for states in buckets.values():
        for state, key in states.items():
            for slot in slots_of[key]:
                values = flat[key][slot.start : slot.stop].view(slot.shape)
                block = sharded_like(f"{PREFIX}{'fp32_param' if state == 'param' else state}.{slot.name}", values)
                if slot.global_shape is not None:
                    at = slot.global_offset or (0,) * len(slot.shape)
                    block = replace(block, global_shape=slot.global_shape, global_offset=at, axis_fragmentations=None)
                earlier = first.setdefault(block.identity, values)
                if earlier is values:
                    yield block
                elif not torch.equal(earlier, values):
                    raise CheckpointValueError(
                        f"{block.key} at {block.global_offset} has other values in group {slot.group} than in an "
                        f"earlier one: give slots of different parameters different names or offsets"
                    )


def _check_filled(key: str, numel: int, slots: Sequence[BucketSlot]) -> None:
    """Raise CheckpointValueError unless slots, by their start, fill the `numel` elements of a bucket but padding."""
    end = 0
    for slot in slots:
        if not end <= slot.start < end + _START_MULTIPLE or slot.stop > numel:
            raise CheckpointValueError(
                f"{slot.name}: elements [{slot.start}, {slot.stop}) of {key} must begin less than {_START_MULTIPLE} "
                f"after element {end} and end within its {numel} elements; pass the slots of the run that saved it"
            )
        end = slot.stop
    if end != numel:
        raise CheckpointValueError(f"elements [{end}, {numel}) of {key} belong to no slot: it has another layout")


class _BucketId(NamedTuple):
    """The optimizer in its chain, the data-parallel group, the buffer and the bucket, by number."""

    optimizer: int
    group: int
    buffer: int
    bucket: int

    def __str__(self) -> str:
        return ", ".join(f"{field} {number}" for field, number in self._asdict().items())


def _buckets(index: CheckpointIndex) -> dict[_BucketId, dict[str, str]]:
    """The key of each state, by bucket.

    Raises:
        CheckpointingException: no bucket is stored, a buffer has two pairs of dtypes, or main weights are missing.
    """
    found: dict[_BucketId, dict[str, str]] = defaultdict(dict)
    for key in sorted(index.tensors):
        match = _BUCKET_STATE.fullmatch(key)
        if match is None:
            continue
        *numbers, state = match.groups()
        bucket = _BucketId(*(int(number or 0) for number in numbers))
        states = found[bucket]
        if state in states:
            raise CheckpointValueError(f"{states[state]} and {key} are both {bucket}")
        if not index.tensors[key].dtype.is_floating_point:
            raise CheckpointValueError(
                f"{key} is stored as {index.tensors[key].dtype}: 16-bit remainders, which are main weights only "
                f"together with the model's weights of that run; save it without store_param_remainders"
            )
        states[state] = key
    if not found:
        raise CheckpointValueError(
            f"{index.path} holds no buckets (keys ...dp_group_idx_0.gbuf_idx_0.dtype_....bucket_idx_0.param): it is "
            f"not dp_reshardable; fully_reshardable directories load as they are"
        )
    return found
