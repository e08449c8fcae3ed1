"""The load plan: checks that every requested box is stored completely, in the right dtype, before memory is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes.box import FlatBox, boxes_of
from opt_checkpoint.boxes.reshard import Copy, StoredBoxes, first_overlap
from opt_checkpoint.dcp.main_values import aliased, may_convert
from opt_checkpoint.dcp.save_planner import view_of
from opt_checkpoint.dcp.stored_names import asked_plain, merged, plain_paths, stored_names, stored_under
from opt_checkpoint.dcp.strictness import StrictHandling, judge_missing, judge_unexpected, warn_of_empty, warn_of_none
from opt_checkpoint.disk.detect import read_object
from opt_checkpoint.disk.dtype_names import converts_exactly
from opt_checkpoint.disk.index import COMMON_KEY, COPIES, CheckpointIndex, Kind, StoredChunk, StoredTensor
from opt_checkpoint.disk.stored_objects import SafeGlobals, load_object, loaded_whole
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointMismatchError
from opt_checkpoint.state.dtensor import is_dtensor
from opt_checkpoint.state.flat_state import FlatState, check_stages, flatten_state
from opt_checkpoint.state.quantized import is_quantized, stand_in
from opt_checkpoint.state.sharded import ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import ABSENT, Path, lookup, path_text


class DtypeRule(Enum):
    """What to do when a stored dtype differs from the requested one."""

    EXACT = "exact"  # converted and reported where that is exact, as bfloat16 to float32; else an error
    CAST = "cast"  # convert while reading, and report the key

    @classmethod
    def parse(cls, value: str | DtypeRule) -> DtypeRule:
        """A rule from its name.

        Raises:
            ValueError: no rule has this name.
        """
        try:
            return cls(value)
        except ValueError:
            raise ValueError(f"dtype={value!r}; allowed: {', '.join(r.value for r in cls)}") from None


class _Target(NamedTuple):
    """Memory that stored values are read into."""

    shard: ShardedTensor
    held: FlatBox


class TensorRead(NamedTuple):
    """Values of a stored chunk to read into the memory of a state.

    Args:
        key: the stored name of the tensor.
        dtype: its stored dtype.
        chunk: where the values are stored.
        target: index of the memory in the planner.
        copy: the box of values, in the chunk and in the memory.
    """

    key: str
    dtype: torch.dtype
    chunk: StoredChunk
    target: int
    copy: Copy


class ShardedLoadPlanner:
    """Plans the load of one nested state of sharded types.

    Args:
        state: what to load; its sharded tensors are written once the plan is complete.
        index: what is stored.
        common: the stored common state.
        strict: what to do about keys on one side only.
        dtype: what to do if dtypes differ.
        aliases: other prefixes under which a key may be stored.
        safe_globals: classes and functions that stored objects may use.
    """

    def __init__(
        self,
        state: ShardedStateDict,
        index: CheckpointIndex,
        common: Any,
        *,
        strict: StrictHandling,
        dtype: DtypeRule,
        aliases: Mapping[str, str],
        safe_globals: SafeGlobals = (),
    ) -> None:
        self._state, self._index, self._common = state, index, common
        self._strict, self._dtype, self._aliases = strict, dtype, aliases
        self._safe_globals = safe_globals
        self._targets: list[_Target] = []
        self._to_zero: list[ShardedTensor] = []
        self._stored_boxes: dict[str, StoredBoxes] = {}
        self._loaded_objects: dict[str, Any] = {}
        self._plain: dict[Path, Any] = {}
        self._stock_objects: set[str] = set()
        self._objects_within: dict[Path, dict[Path, Any]] = {}
        self._made: dict[Path, dict[Path, ShardedTensor]] = {}
        self._to_copy: list[tuple[Tensor, Tensor]] = []
        self._to_quantize: list[tuple[Tensor, Tensor]] = []
        self.items: list[TensorRead | str] = []  # what to read: parts of tensors, and objects by key
        self.missing: list[str] = []
        self.unexpected: tuple[str, ...] = ()
        self.cast: list[str] = []
        self.dropped: set[Path] = set()
        self.assembled: Any = None

    @cached_property
    def flat(self) -> FlatState:
        """The flattened state."""
        return flatten_state(self._state)

    @cached_property
    def _names(self) -> dict[Path, str]:
        return stored_names(self.flat, self._index, self._aliases)

    def create_local_plan(self) -> bytes:
        """Plan all reads of this rank, in `items`.

        Returns:
            The keys that this rank requests: one bit per stored key, in sorted order.

        Raises:
            CheckpointKeyError: keys are not stored, and `strict` does not allow that.
            CheckpointMismatchError: shape, dtype or coverage do not fit.
        """
        self._find_missing()
        check_stages(self.flat.tensors.values(), self._index.tensors, str(self._index.path))
        stored = [*self._index.tensors, *self._index.objects]
        judge_missing(self._strict, self.missing, stored, str(self._index.path))
        for path, shard in self._wanted().items():
            self._plan_reads_of(path, shard)
        for path in self.flat.objects:
            if path not in self.dropped:
                self._plan_object(self._names[path])
        return self._asked_bits()

    @property
    def stored_plain(self) -> dict[str, Path]:
        """The paths of the stored plain values, by the text of each path."""
        return plain_paths(self._common)

    def stored_name(self, key: str) -> str:
        """The name under which a key is stored: the key itself, or the first alias that is stored."""
        return aliased(key, self._index.tensors, self._aliases)

    def _wanted(self) -> dict[Path, ShardedTensor]:
        """The tensors to read: those of the state, and those that plain templates request, for which memory is
        allocated."""
        wanted = {p: t for p, t in self.flat.tensors.items() if p not in self.dropped and p not in self._plain}
        for path, tensors in self._made.items():
            wanted.update({path + inner: tensor for inner, tensor in tensors.items()})
        return wanted

    def _plan_object(self, key: str) -> None:
        """Read an object of a foreign checkpoint now: whether it can be loaded must be known before memory changes."""
        if self._index.kind is not Kind.OURS:
            value = read_object(self._index, key, safe_globals=self._safe_globals)
            self._loaded_objects[key] = loaded_whole(value, key)
        else:
            self.items.append(key)

    def _find_missing(self) -> None:
        stored, objects = self._index.tensors, self._index.objects
        self._plain = dict(self._plain_values())
        absent = [(p, t.key) for p, t in self.flat.tensors.items() if self._names[p] not in stored]
        absent += [(p, o.unique_key) for p, o in self.flat.objects.items() if self._names[p] not in objects]
        absent += [(p, path_text(p)) for p in self.flat.common if p not in self._made]
        absent = [(path, key) for path, key in absent if path not in self._plain]
        self.dropped = {path for path, _ in absent}
        optional = {path for path, tensor in self.flat.tensors.items() if tensor.optional}
        self.missing = [key for path, key in absent if path not in optional]

    def _plain_values(self) -> Iterator[tuple[Path, Any]]:
        """The stored plain values: in the common state, as tensors, or, from stock writers, as objects by path."""
        tensor_keys = self._index.tensors.keys()
        for path in self.flat.common:
            value = lookup(self._common, path)
            stored = stored_under(path, self._index)
            tensors = {inner: _described(key, self._index) for inner, key in stored.items() if key in tensor_keys}
            if tensors:
                self._made[path] = tensors
            objects = {inner: self._stock_object(key) for inner, key in stored.items() if key not in tensor_keys}
            if objects:
                self._objects_within[path] = objects
            if value is not ABSENT or objects:
                yield path, None if value is ABSENT else loaded_whole(value, path_text(path))
        for path, template in self.flat.plain.items():
            value = lookup(self._common, path) if self._names[path] not in self._index.tensors else ABSENT
            if value is not ABSENT:
                if within := stored_under(path, self._index):
                    self._made[path] = {inner: _described(key, self._index) for inner, key in within.items()}
                yield path, self._into_template(path, template, loaded_whole(value, path_text(path)))

    def _into_template(self, path: Path, template: Tensor, value: Any) -> Any:
        """Return the stored plain value for a tensor template; a tensor is copied into the template later."""
        if not isinstance(value, Tensor) or is_dtensor(template):
            return value
        if template.shape != value.shape or not self._may_convert(value.dtype, template.dtype):
            raise CheckpointMismatchError(
                f"{path_text(path)} is stored as {value.dtype} {list(value.shape)}, asked for as {template.dtype} "
                f"{list(template.shape)}; pass None in its place to take it as it is stored"
            )
        self._to_copy.append((template, value))
        return template

    def _stock_object(self, key: str) -> Any:
        self._stock_objects.add(key)
        return loaded_whole(read_object(self._index, key, safe_globals=self._safe_globals), key)

    def _asked_bits(self) -> bytes:
        keys = {*self._names.values(), COMMON_KEY}
        keys |= {t.key for t in self.flat.tensors.values()}  # also where main values were read instead
        keys |= {tensor.key for tensors in self._made.values() for tensor in tensors.values()}
        keys |= self._stock_objects
        keys |= set(asked_plain((*self.flat.common, *self.flat.plain), self._common))
        return np.packbits([key in keys for key in self._stored_keys()]).tobytes()

    def _stored_keys(self) -> list[str]:
        """All stored keys, and the paths of plain values; the same on all ranks."""
        return [*sorted(self._index.tensors), *sorted(self._index.objects), *sorted(self.stored_plain)]

    def _plan_reads_of(self, path: Path, shard: ShardedTensor) -> None:
        key = self._names.get(path, shard.key)
        stored = self._index.tensors[key]
        self._check_description(shard, stored)
        if shard.data is None:
            shard.init_data("cpu")
        elif is_quantized(shard.data):
            shard = self._dense(shard, shard.data)
        boxes = self._boxes_of(key, stored)
        for held in boxes_of(shard):
            copies = list(boxes.copies_to(held.box))
            self._check_coverage(shard, stored, held, copies)
            target = len(self._targets)
            self.items += [TensorRead(key, stored.dtype, stored.chunks[copy.chunk], target, copy) for copy in copies]
            self._targets.append(_Target(shard, held))

    def _dense(self, shard: ShardedTensor, quantized: Tensor) -> ShardedTensor:
        """The tensors with dense memory in place of quantised ones, which are quantised after all values are read."""
        dense = stand_in(quantized)
        self._to_quantize.append((quantized, dense))
        return replace(shard, data=dense)

    def _boxes_of(self, key: str, stored: StoredTensor) -> StoredBoxes:
        """The stored boxes of a tensor. Checks that they are disjoint, on which the check of coverage relies."""
        if key not in self._stored_boxes:
            boxes = [chunk.box for chunk in stored.chunks]
            pair = first_overlap(boxes)
            if pair is not None:
                raise CheckpointCorruptError(f"chunks {boxes[pair[0]]} and {boxes[pair[1]]} of {key} overlap")
            self._stored_boxes[key] = StoredBoxes(boxes)
        return self._stored_boxes[key]

    def _check_description(self, shard: ShardedTensor, stored: StoredTensor) -> None:
        if shard.global_shape != stored.shape:
            if not shard.allow_shape_mismatch or len(shard.global_shape) != len(stored.shape):
                raise CheckpointMismatchError(
                    f"{shard.key} is stored with global shape {list(stored.shape)}, asked for with "
                    f"{list(shard.global_shape)}; set allow_shape_mismatch if the difference is padding"
                )
            self._to_zero.append(shard)
        if shard.data is not None and shard.data.is_meta:
            raise CheckpointMismatchError(
                f"{shard.key} is on the meta device, which has no memory to load into; materialise it first, as "
                f"model.to_empty(device=...) does"
            )
        _check_memory(shard)
        if shard.dtype != stored.dtype:
            if not (self._may_convert(stored.dtype, shard.dtype) or may_convert(shard, stored)):
                raise CheckpointMismatchError(
                    f"{shard.key} is stored as {stored.dtype}, asked for as {shard.dtype}, which would round; pass "
                    f"dtype='cast' to convert"
                )
            self.cast.append(shard.key)

    def _may_convert(self, stored: torch.dtype, wanted: torch.dtype) -> bool:
        return self._dtype is DtypeRule.CAST or converts_exactly(stored, wanted)

    def _check_coverage(self, shard: ShardedTensor, stored: StoredTensor, held: FlatBox, copies: list[Copy]) -> None:
        """Raise unless the stored chunks cover the requested box. They are disjoint, so adding up volumes suffices."""
        found = sum(prod(copy.sizes) for copy in copies)
        if found != held.box.numel and shard.global_shape == stored.shape:
            raise CheckpointMismatchError(
                f"{shard.key}: the checkpoint holds {found} of the {held.box.numel} elements of box {held.box}"
            )

    def unexpected_of(self, per_rank: Sequence[bytes]) -> tuple[str, ...]:
        """The stored keys that no rank requests, from what `create_local_plan` has returned on all ranks.

        Raises:
            CheckpointKeyError: there are some, and `strict` does not allow that.
        """
        keys = self._stored_keys()
        asked = np.zeros(len(keys), dtype=np.uint8)
        for bits in per_rank:
            asked |= np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(keys))
        copies = self._index.details.get(COPIES, ())
        unexpected = tuple(key for key, by_any in zip(keys, asked) if not by_any and key not in copies)
        judge_unexpected(self._strict, unexpected, str(self._index.path))
        warn_of_empty(map(path_text, self.flat.empty), unexpected, str(self._index.path))
        nones = (path_text(path) for path, value in self.flat.common.items() if value is None)
        warn_of_none(nones, unexpected, str(self._index.path))
        return unexpected

    def finish_plan(self, unexpected: tuple[str, ...]) -> None:
        """Begin to write memory, after all ranks have planned. From here on, only reading can fail."""
        self.unexpected = unexpected
        for shard in self._to_zero:
            if shard.data is not None:
                shard.data.detach().zero_()
        for template, value in self._to_copy:
            template.detach().copy_(value)

    def load_bytes(self, key: str, raw: bytes) -> None:
        """Keep an object that was read; only what `torch.load(weights_only=True)` accepts."""
        loaded = load_object(raw, allowed=self._safe_globals)
        self._loaded_objects[key] = loaded_whole(self._index.kind.unwrapped(loaded), key)

    def resolve_tensor(self, read: TensorRead) -> Tensor:
        """The memory for a read, as a view."""
        target = self._targets[read.target]
        view = view_of(*target, target.held.box)
        for axis, (start, size) in enumerate(zip(read.copy.to_offsets, read.copy.sizes)):
            view = view.narrow(axis, start, size)
        return view

    def assemble(self) -> None:
        """Assemble the loaded state: replace every description by its loaded value, quantise, and merge factories."""
        with torch.no_grad():
            for quantized, dense in self._to_quantize:
                quantized.copy_(dense)
        objects = {p: self._loaded_objects[self._names[p]] for p in self.flat.objects if p not in self.dropped}
        plain = dict(self._plain)
        for path in self._made.keys() | self._objects_within.keys():
            values = {inner: tensor.data for inner, tensor in self._made.get(path, {}).items()}
            values.update(self._objects_within.get(path, {}))
            plain[path] = merged(plain.get(path), values, lists=self._index.kind is Kind.DCP)
        plain.update((p, t) for p, t in self.flat.plain.items() if p not in self.dropped and p not in plain)
        self.assembled = self.flat.assembled(objects, plain, frozenset(self.dropped))


def _check_memory(shard: ShardedTensor) -> None:
    """Raise unless every element of a target has memory of its own."""
    data = shard.data
    if data is None or is_quantized(data):
        return
    if data.layout is not torch.strided:
        raise CheckpointMismatchError(f"{shard.key}: the target has layout {data.layout}; pass a dense tensor")
    if any(n > 1 and stride == 0 for n, stride in zip(data.shape, data.stride())):
        raise CheckpointMismatchError(
            f"{shard.key}: the target of shape {list(data.shape)} is expanded (strides {list(data.stride())}), so that "
            f"several elements share memory; pass target.contiguous()"
        )


def _described(key: str, index: CheckpointIndex) -> ShardedTensor:
    """A whole stored tensor, to be loaded into new memory."""
    stored = index.tensors[key]
    return ShardedTensor(key, None, stored.dtype, stored.shape, stored.shape, (0,) * len(stored.shape), None)
