"""The load plan: checks that every requested box is stored completely, in the right dtype, before memory is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes import boxes_of, columns_of, overlapping_pairs, view_of
from opt_checkpoint.dcp.names import (
    Strictness,
    aliased,
    asked_plain,
    merged,
    stored_names,
    stored_under,
    warn_of_left_out,
)
from opt_checkpoint.dcp.shared_memory import check_own_memory, sharing_pairs
from opt_checkpoint.dcp.templates import check_form, inner_value, value_for
from opt_checkpoint.disk.archives import SafeGlobals, loaded_whole
from opt_checkpoint.disk.checkpoint import Opened, read_objects
from opt_checkpoint.disk.data_file import DataFiles
from opt_checkpoint.disk.index import COMMON_KEY, COPIES, PADDED, Kind, Region, StoredChunk, StoredTensor
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointMismatchError, check_choice
from opt_checkpoint.state.checksums import are_equal
from opt_checkpoint.state.factory import is_quantized
from opt_checkpoint.state.model_parallel import check_stages
from opt_checkpoint.state.sharded import EMPTY, Path, ShardedStateDict, ShardedTensor, path_text
from opt_checkpoint.state.tensors import converts_exactly, is_dtensor, local_tensor, sharded_like
from opt_checkpoint.state.tree import ABSENT, flatten_state, is_below, leaves, lookup, scopes, without_tensors

EXTRA_STATE = "_extra_state"  # torch's name for what a module's get_extra_state returns


class TensorRead(NamedTuple):
    """Values of a stored chunk to read into the memory of a state.

    Args:
        key: the stored name of the tensor.
        dtype: its stored dtype.
        chunk: where the values are stored.
        region: the box of values in the chunk.
        target: a view of the memory that they are read into.
    """

    key: str
    dtype: torch.dtype
    chunk: StoredChunk
    region: Region
    target: Tensor


class ShardedLoadPlanner:
    """Plans the load of one nested state of sharded types.

    Args:
        state: what to load; its sharded tensors are written once the plan is complete.
        opened: what is stored, and the stored common state.
        strict: what to do about keys on one side only.
        dtype: what to do if a stored dtype differs from the requested one: with `"exact"` it is converted and reported
            where that is exact, as bfloat16 to float32, and an error elsewhere; `"cast"` converts it.
        aliases: other prefixes under which a key may be stored.
        safe_globals: classes and functions that stored objects may use.

    Raises:
        ValueError: `strict` or `dtype` is unknown.
    """

    def __init__(
        self,
        state: ShardedStateDict,
        opened: Opened,
        *,
        strict: str = "raise_missing",
        dtype: str = "exact",
        aliases: Mapping[str, str] = EMPTY,
        safe_globals: SafeGlobals = (),
    ) -> None:
        check_choice("dtype", dtype, ("exact", "cast"), ValueError)
        self._state = state
        self.index = opened.index
        self._common = opened.common
        self._strict = Strictness.parse(strict)
        self._casts = dtype == "cast"
        self._aliases = aliases
        self._safe_globals = safe_globals
        self.files = DataFiles(opened.index)
        self._plain: dict[Path, Any] = {}  # loaded plain values
        # Within plain values: tensors that are read; and loaded objects of stock directories, or tensors of templates.
        self._within: dict[Path, dict[Path, Any]] = defaultdict(dict)
        self._asked: set[str] = {COMMON_KEY}  # stored keys
        self._to_zero: list[ShardedTensor] = []
        self._to_copy: list[tuple[Tensor, Tensor]] = []  # targets, and the values that they get after all are read
        self.items: list[TensorRead] = []
        self.missing: list[str] = []
        self.cast: list[str] = []

    @cached_property
    def stored_plain(self) -> list[str]:
        """The paths of the stored plain values, as text."""
        return [path_text(path) for path, value in leaves(self._common) if path and not isinstance(value, dict)]

    def stored_name(self, key: str) -> str:
        """Return the name under which a key is stored: the key itself, or the first alias that is stored."""
        return aliased(key, self.index.tensors, self._aliases)

    def plan(self) -> bytes:
        """Plan all reads of this rank, in `items`.

        Returns:
            The keys that this rank requests: one bit per stored key, in sorted order.

        Raises:
            CheckpointKeyError: keys are not stored, and `strict` does not allow that.
            CheckpointMismatchError: shape, dtype or coverage do not fit.
        """
        index = self.index
        self.flat = flatten_state(self._state)
        self._names = stored_names(self.flat, index, self._aliases)
        self._find_plain()
        self._find_missing()
        check_stages(self.flat.tensors.values(), index.tensors, index.path)
        self._strict.report_missing(self.missing, [*index.tensors, *index.objects], index.path)
        left_out = self.dropped | self._plain.keys()
        asked = [(self._names[path], shard) for path, shard in self.flat.tensors.items() if path not in left_out]
        within = [part for parts in self._within.values() for part in parts.values()]
        asked += [(part.key, part) for part in within if isinstance(part, ShardedTensor)]
        _check_disjoint({key: index.tensors[key] for key, _ in asked})
        self._sharing = list(sharing_pairs(asked))
        for key, shard in asked:
            self._check_description(key, shard, index.tensors[key])
            if shard.data is None:
                shard.init_data("cpu")
            elif is_quantized(shard.data):  # quantised after all values are read
                dense = torch.zeros(shard.data.shape, dtype=shard.data.dtype, device=shard.data.device)
                self._to_copy.append((shard.data, dense))
                shard = replace(shard, data=dense)
            self.items += self._reads_of(key, shard)
        objects = {path: self._names[path] for path in self.flat.objects.keys() - self.dropped}
        loaded = self._read_objects(objects.values())
        self._objects = {path: loaded[key] for path, key in objects.items()}
        keys = self._asked.union(self._names.values())
        keys.update(asked_plain((*self.flat.common, *self.flat.plain), self._common))
        keys |= {t.key for t in self.flat.tensors.values()}  # also where main values were read instead
        return np.packbits([key in keys for key in self._stored_keys()]).tobytes()

    def _stored_keys(self) -> list[str]:
        """All stored keys, and the paths of plain values; the same on all ranks."""
        return [*sorted(self.index.tensors), *sorted(self.index.objects), *sorted(self.stored_plain)]

    def _read_objects(self, keys: Iterable[str]) -> dict[str, Any]:
        """Read stored objects now: whether they can be loaded must be known before memory changes."""
        return read_objects(self.index, keys, safe_globals=self._safe_globals, files=self.files)

    def _find_plain(self) -> None:
        """Find the stored plain values: in the common state, as tensors, or, from stock writers, as objects by path.

        Raises:
            CheckpointMismatchError: something of another form is stored.
        """
        scoped = [path for path, _ in scopes(self.flat.state)]
        for path, template in self.flat.common.items():
            stored = self._find_value(path)
            if stored is ABSENT:
                continue
            check_form(path, template, stored)
            in_lists = {} if is_below(path, scoped) else without_tensors(template)[1]
            for inner, tensor in in_lists.items():  # are filled in place
                found = inner_value(path, inner, template, stored)
                parts = self._within[path]
                part = parts.get(inner)
                if isinstance(part, ShardedTensor):
                    parts[inner] = sharded_like(part.key, tensor)
                else:
                    parts[inner] = tensor
                    self._fill_later(path + inner, tensor, found)
        for path, template in self.flat.plain.items():
            if self._names[path] not in self.index.tensors:
                stored = self._find_value(path)
                if stored is not ABSENT:
                    self._plain[path] = template
                    self._fill_later(path, template, stored)

    def _find_value(self, path: Path) -> Any:
        """Find the plain value at a path, and return it with empty tensors for those that are read later; `ABSENT` if
        nothing is stored there."""
        value = lookup(self._common, path)
        tensors = self.index.tensors
        keys = stored_under(path, self.index, has_value=value is not ABSENT)
        objects = self._read_objects([key for key in keys.values() if key not in tensors])
        self._asked.update(keys.values())
        parts: dict[Path, Any] = {}
        shown: dict[Path, Any] = {}
        for inner, key in keys.items():
            if key in tensors:
                parts[inner] = whole_tensor(key, tensors[key])
                shown[inner] = torch.empty(tensors[key].shape, dtype=tensors[key].dtype, device="meta")
            else:
                parts[inner] = shown[inner] = objects[key]
        if parts:
            self._within[path] = parts
        elif value is ABSENT:
            return ABSENT
        plain = None if value is ABSENT else loaded_whole(value, path_text(path))
        if value is not ABSENT or objects:  # else there are tensors only
            self._plain[path] = plain
        return merged(plain, shown, lists=self.index.kind is Kind.DCP)

    def _fill_later(self, path: Path, template: Tensor, value: Any) -> None:
        """Fill a tensor of the state with a stored plain value, after all others are read."""
        if not isinstance(value, Tensor):
            self._to_copy.append((local_tensor(template), value_for(path, template, value)))
            return
        is_convertible = self._may_convert(value.dtype, template.dtype)
        if template.shape != value.shape or not is_convertible or is_dtensor(template):
            raise CheckpointMismatchError(
                f"{path_text(path)} is stored as {value.dtype} {list(value.shape)}, asked for as {template.dtype} "
                f"{list(template.shape)}; pass None in its place to take it as it is stored"
            )
        self._to_copy.append((template, value))

    def _find_missing(self) -> None:
        """Find what is not stored: `dropped`, and of that `missing`, which is not optional."""
        names = self._names
        tensors = self.flat.tensors
        objects = self.flat.objects.items()
        absent = {path: tensor.key for path, tensor in tensors.items() if names[path] not in self.index.tensors}
        absent |= {path: item.unique_key for path, item in objects if names[path] not in self.index.objects}
        absent |= {path: path_text(path) for path in self.flat.common if path not in self._within}
        self.dropped = absent.keys() - self._plain.keys()
        optional = [(*path, name) for path, scope in scopes(self.flat.state) for name in scope.optional]
        for path, key in absent.items():
            is_optional = is_below(path, optional) or (path in tensors and tensors[path].optional)
            if path in self.dropped and not is_optional:
                self.missing.append(key)

    def _reads_of(self, key: str, shard: ShardedTensor) -> Iterator[TensorRead]:
        stored = self.index.tensors[key]
        offsets, sizes = columns_of([chunk.box for chunk in stored.chunks], len(stored.shape))
        for flat_box in boxes_of(shard):
            low = np.array(flat_box.box.offsets)
            high = np.add(*flat_box.box)
            is_near = ((offsets < high) & (offsets + sizes > low)).all(axis=1)  # (chunks,)
            shared = []
            for number in np.flatnonzero(is_near).tolist():
                box = stored.chunks[number].box.overlap(flat_box.box)
                if box is not None:
                    shared.append((stored.chunks[number], box))
            found = sum(box.numel for _, box in shared)
            if found != flat_box.box.numel and shard.global_shape == stored.shape:
                raise CheckpointMismatchError(
                    f"{shard.key}: the checkpoint holds {found} of {flat_box.box.numel} elements of {flat_box.box}"
                )
            for chunk, box in shared:
                region = chunk.region(box.within(chunk.box), box.sizes)
                yield TensorRead(key, stored.dtype, chunk, region, view_of(shard, flat_box, box))

    def check_sharing(self, read: Callable[[Sequence[TensorRead]], None]) -> None:
        """Compare the stored values of tensors that share memory, and read the more exact one of two equal ones.

        Args:
            read: reads values into memory.

        Raises:
            CheckpointMismatchError: they differ.
        """
        for (key, shard), (other_key, other) in self._sharing:
            stored = self.index.tensors[key]
            other_stored = self.index.tensors[other_key]
            is_known = stored.fingerprint is not None and stored.fingerprint == other_stored.fingerprint
            if is_known or shard.data is None or other.data is None:
                continue
            values = torch.zeros_like(shard.data)
            other_values = torch.zeros_like(other.data)
            copies = (key, replace(shard, data=values)), (other_key, replace(other, data=other_values))
            read([item for copied in copies for item in self._reads_of(*copied)])
            dtype = min(stored.dtype, other_stored.dtype, key=lambda dtype: dtype.itemsize)
            if not are_equal(values.reshape(-1).to(dtype), other_values.reshape(-1).to(dtype)):
                raise CheckpointMismatchError(
                    f"{key} and {other_key} are stored with different values, and share their memory in this state, "
                    f"as tied weights do; leave the key out of the state that is not to be loaded, or untie them"
                )
            if stored.dtype != other_stored.dtype:
                less_exact = key if dtype == stored.dtype else other_key
                memory = shard.data.untyped_storage().data_ptr()
                self.items = [
                    item
                    for item in self.items
                    if item.key != less_exact or item.target.untyped_storage().data_ptr() != memory
                ]

    def _check_description(self, key: str, shard: ShardedTensor, stored: StoredTensor) -> None:
        if shard.global_shape != stored.shape:
            may_be_padded = key in self.index.details.get(PADDED, ())
            is_larger = all(n >= m for n, m in zip(shard.global_shape, stored.shape))
            is_allowed = shard.allow_shape_mismatch or (may_be_padded and is_larger)
            if not is_allowed or len(shard.global_shape) != len(stored.shape):
                hint = "set allow_shape_mismatch if the difference is padding"
                if key.endswith(EXTRA_STATE):
                    hint = (
                        "an extra state is one value of any length: load it with None in its place, and give what the "
                        "report's state has to the module's set_extra_state"
                    )
                raise CheckpointMismatchError(
                    f"{shard.key} is stored with global shape {list(stored.shape)}, asked for with "
                    f"{list(shard.global_shape)}; {hint}"
                )
            self._to_zero.append(shard)
        if shard.data is not None:
            check_own_memory(shard.key, shard.data)
        if shard.dtype != stored.dtype:
            has = stored.dtype.itemsize
            wanted = shard.dtype.itemsize
            # To fp32 mains, or rounded where mains are exact.
            is_exact = ("fp32_param." in shard.key and wanted >= has) or (shard.has_mains and wanted < has)
            is_exact = is_exact and shard.dtype.is_floating_point and stored.dtype.is_floating_point
            if not (is_exact or self._may_convert(stored.dtype, shard.dtype)):
                raise CheckpointMismatchError(
                    f"{shard.key} is stored as {stored.dtype}, asked for as {shard.dtype}, which would round; pass "
                    f"dtype='cast' to convert"
                )
            self.cast.append(shard.key)

    def _may_convert(self, stored: torch.dtype, wanted: torch.dtype) -> bool:
        return self._casts or converts_exactly(stored, wanted)

    def unexpected_of(self, per_rank: Sequence[bytes]) -> tuple[str, ...]:
        """Return the stored keys that no rank requests, from what `plan` has returned on all ranks.

        Raises:
            CheckpointKeyError: there are some, and `strict` does not allow that.
        """
        keys = self._stored_keys()
        where = self.index.path
        asked = np.zeros(len(keys), dtype=np.uint8)
        for bits in per_rank:
            asked |= np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(keys))
        copies = self.index.details.get(COPIES, ())
        unexpected = tuple(key for key, by_any in zip(keys, asked) if not by_any and key not in copies)
        self._strict.report_unexpected(unexpected, where)
        nones = [path_text(path) for path, value in self.flat.common.items() if value is None]
        warn_of_left_out(map(path_text, self.flat.empty), nones, unexpected, where)
        return unexpected

    def begin_writing(self) -> None:
        """Begin to write memory, after all ranks have planned. From here on, only reading can fail."""
        for shard in self._to_zero:
            if shard.data is not None:
                shard.data.detach().zero_()

    def assemble(self) -> Any:
        """Return the loaded state: replace every description by its loaded value, quantise, and merge factories."""
        with torch.no_grad():
            for target, source in self._to_copy:
                target.copy_(source)
        plain = dict(self._plain)
        for path, parts in self._within.items():
            values = {inner: part.data if isinstance(part, ShardedTensor) else part for inner, part in parts.items()}
            plain[path] = merged(plain.get(path), values, lists=self.index.kind is Kind.DCP)
        for path, template in self.flat.common.items():
            if isinstance(template, Number) and isinstance(plain.get(path), Tensor):
                plain[path] = plain[path].item()
        plain |= self.flat.plain
        return self.flat.assembled(self._objects, plain, frozenset(self.dropped))


def _check_disjoint(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointCorruptError if chunks of a tensor overlap. If they do not, their volumes prove coverage."""
    chunks = [(key, chunk.box) for key, stored in tensors.items() for chunk in stored.chunks]
    num_chunks = [len(stored.chunks) for stored in tensors.values()]
    owner = np.repeat(np.arange(len(tensors)), num_chunks)  # (chunks,)
    axes = max([1, *(len(stored.shape) for stored in tensors.values())])
    columns = columns_of([box for _, box in chunks], axes)
    for left, right in overlapping_pairs(owner, *columns):
        key, box = chunks[left[0]]
        _, other = chunks[right[0]]
        raise CheckpointCorruptError(f"chunks {box} and {other} of {key} overlap")


def whole_tensor(key: str, stored: StoredTensor) -> ShardedTensor:
    """Return the description of a whole stored tensor, to be loaded into new memory."""
    return ShardedTensor(key, None, stored.dtype, stored.shape, stored.shape, (0,) * len(stored.shape), None)
