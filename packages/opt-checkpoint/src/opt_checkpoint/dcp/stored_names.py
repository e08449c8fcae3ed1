"""Finds the stored name of each value of a state, and the plain values of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from opt_checkpoint.disk.detect import read_tensor
from opt_checkpoint.disk.index import CheckpointIndex, Kind
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.tree import ABSENT, Path, leaves, lookup, path_text

_MAINS = "optimizer.state.fp32_param."


def aliased(key: str, stored: Iterable[str] | Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """The stored name of a key: the key itself, else the first stored name that replacing a prefix by `aliases`
    yields."""
    if key in stored:
        return key
    for old, new in aliases.items():
        if key.startswith(old) and new + key.removeprefix(old) in stored:
            return new + key.removeprefix(old)
    return key


def stored_names(flat: FlatState, index: CheckpointIndex, aliases: Mapping[str, str]) -> dict[Path, str]:
    """The stored name of every tensor and object of a state; its own key if it is not stored.

    A tensor whose key is not stored is searched under its path in the state. If its values are stored in another
    precision, more exact ones may exist under another name, see `_main_values`.
    A value in a scoped part is stored under its path. In checkpoints of other programs it is stored under its relative
    key; that is used if nothing is stored under the path of the part, and no other part has the same relative key.
    """
    relative = _relative_names(flat, index)
    names = {}
    for path, shard in flat.tensors.items():
        name = aliased(shard.key, index.tensors, aliases)
        if name not in index.tensors:
            name = path_text(path) if path_text(path) in index.tensors else relative.get(path, name)
        names[path] = name
    names.update(_main_values(flat, index, names, aliases))
    for path, held in flat.objects.items():
        shortened = relative.get(path)
        names[path] = held.unique_key if shortened is None or held.unique_key in index.objects else shortened
    return names


def _main_values(
    flat: FlatState, index: CheckpointIndex, names: Mapping[Path, str], aliases: Mapping[str, str]
) -> dict[Path, str]:
    """The tensors that are read from another stored tensor with more exact values.

    A parameter requested in a wider dtype than it is stored in is read from its main values. Main values that are not
    stored are read from the parameter.
    """
    stored = index.tensors
    own = {path: flat.relative[path].key if path in flat.relative else t.key for path, t in flat.tensors.items()}
    asked: dict[str, set[str]] = defaultdict(set)
    for path, key in own.items():
        asked[key].add(names[path])

    def name_of(key: str) -> str | None:
        """The stored name of a key: the key itself, or that of the only value of this state with the key."""
        found = {name for name in {aliased(key, stored, aliases), *asked.get(key, ())} if name in stored}
        found = found or {name for name in stored if name.endswith(f".{key}") and ".state." not in f".{name}"}
        return found.pop() if len(found) == 1 else None

    chosen: dict[Path, str | None] = {}
    for path, shard in flat.tensors.items():
        name = names[path]
        if name not in stored:
            if own[path].startswith(_MAINS):
                chosen[path] = name_of(own[path].removeprefix(_MAINS))
        elif shard.has_mains and shard.dtype.is_floating_point and shard.dtype.itemsize > stored[name].dtype.itemsize:
            chosen[path] = name_of(_MAINS + own[path])
    return {path: name for path, name in chosen.items() if name is not None}


def _relative_names(flat: FlatState, index: CheckpointIndex) -> dict[Path, str]:
    if not flat.relative or index.kind is Kind.OURS:
        return {}
    claimed: dict[str, set[Path]] = defaultdict(set)
    for scope, key in flat.relative.values():
        claimed[key].add(scope)
    parts = {scope for scope, _ in flat.relative.values()}
    stored = index.tensors.keys() | index.objects.keys()
    nested = {part for part in parts if any(key.startswith(f"{path_text(part)}.") for key in stored)}
    names = {}
    for path, (scope, key) in flat.relative.items():
        name = key if path in flat.tensors else f"{key}/{flat.objects[path].unique_key.rpartition('/')[2]}"
        if name in stored and len(claimed[key]) == 1 and (scope not in nested or key.startswith(path_text(scope))):
            names[path] = name
    return names


def plain_paths(common: Any) -> dict[str, Path]:
    """The paths of the stored plain values, by the text of each path."""
    return {path_text(path): path for path, value in leaves(common) if path and not isinstance(value, dict)}


def stored_under(path: Path, index: CheckpointIndex) -> dict[Path, str]:
    """The stored keys at or below a path, by the rest of their paths.

    They are those of plain tensors; in stock directories also those of objects. At the root, a tensor of a foreign
    checkpoint that records no path for it is at its key.
    """
    is_stock = index.kind is Kind.DCP
    stored: Collection[str] = [*index.tensors, *index.objects] if is_stock else index.tensors
    if path_text(path) in stored:
        return {(): path_text(path)}
    recorded: Mapping[str, Sequence[Any]] = index.details.get("paths") or {}
    found = {key: tuple(recorded[key]) for key in stored if key in recorded}
    if index.kind is not Kind.OURS and not path:
        found = {key: found.get(key, (key,)) for key in stored}
    return {own[len(path) :]: key for key, own in found.items() if own[: len(path)] == path}


def merged(value: Any, parts: Mapping[Path, Any], *, lists: bool = False) -> Any:
    """A plain value with parts inserted at paths within it.

    Args:
        value: a nested value; None for none.
        parts: what to insert.
        lists: whether new containers whose keys count from 0 are lists, as in stock directories; else dicts.
    """
    if not parts or () in parts:
        return parts.get((), value)
    by_key: dict[Any, dict[Path, Any]] = defaultdict(dict)
    for (key, *rest), part in parts.items():
        by_key[key][tuple(rest)] = part
    if isinstance(value, list | tuple):
        items = list(value)
        for key, inner in by_key.items():
            if type(key) is not int or not 0 <= key < len(items):
                raise CheckpointCorruptError(f"a stored list of {len(items)} values has none at {key!r}")
            items[key] = merged(items[key], inner, lists=lists)
        return type(value)(items)
    root: dict[Any, Any] = dict(value) if isinstance(value, dict) else {}
    for key, inner in by_key.items():
        root[key] = merged(root.get(key), inner, lists=lists)
    is_list = lists and all(type(key) is int for key in root) and sorted(root) == list(range(len(root)))
    return [root[i] for i in range(len(root))] if is_list else root


def stored_value(path: Path, common: Any, index: CheckpointIndex) -> Any:
    """The plain value at a path, with the tensors in its lists read; `ABSENT` if there is none."""
    value = lookup(common, path)
    if value is ABSENT or index.kind is not Kind.OURS:
        return value
    return merged(value, {inner: read_tensor(index, key) for inner, key in stored_under(path, index).items()})


def asked_plain(asked: Iterable[Path], common: Any) -> Iterator[str]:
    """The texts of the stored plain values at, above or below these paths of templates; only a list is above one."""
    for path in asked:
        value = lookup(common, path)
        if value is not ABSENT:
            yield from (path_text(path[:n]) for n in range(1, len(path)))
            for inner, leaf in leaves(value):
                if not isinstance(leaf, dict):
                    yield path_text(path + inner)
