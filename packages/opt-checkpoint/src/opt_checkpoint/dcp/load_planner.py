"""The load plan: checks that every requested box is stored completely, in the right dtype, before memory is written."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from opt_checkpoint.boxes.box import FlatBox, boxes_of
from opt_checkpoint.boxes.reshard import Copy, StoredBoxes, first_overlap
from opt_checkpoint.dcp.main_values import aliased, may_convert
from opt_checkpoint.dcp.save_planner import view_of
from opt_checkpoint.dcp.stored_names import asked_plain, merged, plain_paths, stored_names, stored_under
from opt_checkpoint.dcp.strictness import StrictHandling, judge_missing, judge_unexpected, warn_of_empty, warn_of_none
from opt_checkpoint.disk.detect import read_object
from opt_checkpoint.disk.dtype_names import converts_exactly
from opt_checkpoint.disk.index import COMMON_KEY, COPIES, CheckpointIndex, Kind, StoredTensor
from opt_checkpoint.disk.stored_objects import SafeGlobals, load_object, loaded_whole
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException, CheckpointMismatchError
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


class _Wanted(NamedTuple):
    """The keys that a rank requests: one bit per stored key, in sorted order."""

    asked: bytes


class ShardedLoadPlanner(LoadPlanner):
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
        self._flat: FlatState | None = None
        self._targets: list[_Target] = []
        self._to_zero: list[ShardedTensor] = []
        self._stored_boxes: dict[str, StoredBoxes] = {}
        self._loaded_objects: dict[str, Any] = {}
        self._plain: dict[Path, Any] = {}
        self._stock_objects: set[str] = set()
        self._objects_within: dict[Path, dict[Path, Any]] = {}
        self._names: dict[Path, str] = {}
        self._made: dict[Path, dict[Path, ShardedTensor]] = {}
        self._to_copy: list[tuple[Tensor, Tensor]] = []
        self._to_quantize: list[tuple[Tensor, Tensor]] = []
        self.missing: list[str] = []
        self.unexpected: tuple[str, ...] = ()
        self.cast: list[str] = []
        self.dropped: set[Path] = set()
        self.assembled: Any = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state. The arguments are ignored: state and index were given to the constructor."""
        self._flat = flatten_state(self._state)
        self._names = stored_names(self._flat, self._index, self._aliases)

    @property
    def flat(self) -> FlatState:
        """The flattened state."""
        if self._flat is None:
            raise RuntimeError("set_up_planner has not been called")
        return self._flat

    def create_local_plan(self) -> LoadPlan:
        """All reads of this rank.

        Raises:
            CheckpointKeyError: keys are not stored, and `strict` does not allow that.
            CheckpointMismatchError: shape, dtype or coverage do not fit.
        """
        self._find_missing()
        check_stages(self.flat.tensors.values(), self._index.tensors, str(self._index.path))
        stored = [*self._index.tensors, *self._index.objects]
        judge_missing(self._strict, self.missing, stored, str(self._index.path))
        items = [item for path, shard in self._wanted().items() for item in self._reads_of(path, shard)]
        for path in self.flat.objects:
            if path not in self.dropped:
                items += self._object_reads(self._names[path])
        return LoadPlan(items, planner_data=_Wanted(self._asked_bits()))

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

    def _object_reads(self, key: str) -> list[ReadItem]:
        """Read an object of a foreign checkpoint now: whether it can be loaded must be known before memory changes."""
        if self._index.kind is not Kind.OURS:
            value = read_object(self._index, key, safe_globals=self._safe_globals)
            self._loaded_objects[key] = loaded_whole(value, key)
            return []
        where = MetadataIndex(key)
        return [ReadItem(LoadItemType.BYTE_IO, where, _NONE, where, _NONE, _NONE)]

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

    def _reads_of(self, path: Path, shard: ShardedTensor) -> list[ReadItem]:
        key = self._names.get(path, shard.key)
        stored = self._index.tensors[key]
        self._check_description(shard, stored)
        if shard.data is None:
            shard.init_data("cpu")
        elif is_quantized(shard.data):
            shard = self._dense(shard, shard.data)
        boxes = self._boxes_of(key, stored)
        items: list[ReadItem] = []
        for held in boxes_of(shard):
            copies = list(boxes.copies_to(held.box))
            self._check_coverage(shard, stored, held, copies)
            items += [self._read_item(key, len(self._targets), stored, copy) for copy in copies]
            self._targets.append(_Target(shard, held))
        return items

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
        found = sum(_numel(copy.sizes) for copy in copies)
        if found != held.box.numel and shard.global_shape == stored.shape:
            raise CheckpointMismatchError(
                f"{shard.key}: the checkpoint holds {found} of the {held.box.numel} elements of box {held.box}"
            )

    def _read_item(self, key: str, target: int, stored: StoredTensor, copy: Copy) -> ReadItem:
        chunk = stored.chunks[copy.chunk]
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(key, index=target),
            dest_offsets=torch.Size(copy.to_offsets),
            storage_index=MetadataIndex(key, chunk.box.offsets, copy.chunk),
            storage_offsets=torch.Size(copy.from_offsets),
            lengths=torch.Size(copy.sizes),
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Send every rank the stored keys that no rank requests.

        Raises:
            CheckpointKeyError: there are some, and `strict` does not allow that.
        """
        keys = self._stored_keys()
        asked = np.zeros(len(keys), dtype=np.uint8)
        for plan in global_plan:
            asked |= np.unpackbits(np.frombuffer(plan.planner_data.asked, dtype=np.uint8), count=len(keys))
        copies = self._index.details.get(COPIES, ())
        unexpected = tuple(key for key, by_any in zip(keys, asked) if not by_any and key not in copies)
        judge_unexpected(self._strict, unexpected, str(self._index.path))
        warn_of_empty(map(path_text, self.flat.empty), unexpected, str(self._index.path))
        nones = (path_text(path) for path, value in self.flat.common.items() if value is None)
        warn_of_none(nones, unexpected, str(self._index.path))
        return [LoadPlan(plan.items, plan.storage_data, unexpected) for plan in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Allocate the memory. After this, only reading can fail."""
        self.unexpected = central_plan.planner_data
        for shard in self._to_zero:
            if shard.data is not None:
                shard.data.detach().zero_()
        for template, value in self._to_copy:
            template.detach().copy_(value)
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep an object that was read; only what `torch.load(weights_only=True)` accepts."""
        key = read_item.dest_index.fqn
        loaded = load_object(value.getvalue(), allowed=self._safe_globals)
        self._loaded_objects[key] = loaded_whole(self._index.kind.unwrapped(loaded), key)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory for one read, as a view."""
        number = read_item.dest_index.index
        if number is None:
            raise CheckpointingException(f"{read_item.dest_index} is not a target of this plan")
        view = view_of(*self._targets[number], self._targets[number].held.box)
        for axis, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            view = view.narrow(axis, start, size)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: values were read directly into their memory."""

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


_NONE = torch.Size(())


def _numel(sizes: Iterable[int]) -> int:
    numel = 1
    for n in sizes:
        numel *= n
    return numel


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
