"""Finds the stored name of each value of a state, and the plain values of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opt_checkpoint.dcp.main_values import MAINS, aliased, is_wider
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.tree import ABSENT, Path, leaves, lookup, path_text

NESTED_KEYS = "nested_keys"  # in the manifest's details: keys begin with the paths of their scoped parts


def stored_names(flat: FlatState, index: CheckpointIndex, aliases: Mapping[str, str]) -> dict[Path, str]:
    """The stored name of every tensor and object of a state; its own key if it is not stored.

    A tensor whose key is not stored is searched under its path in the state. If its values are stored in another
    precision, more exact ones may exist under another name, see `_main_values`.
    A value in a scoped part is stored under its path. In checkpoints without such keys it is stored under its relative
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
        if names[path] not in stored and own[path].startswith(MAINS):
            chosen[path] = name_of(own[path].removeprefix(MAINS))
        elif names[path] in stored and shard.has_mains and is_wider(shard, stored[names[path]]):
            chosen[path] = name_of(MAINS + own[path])
    return {path: name for path, name in chosen.items() if name is not None}


def _relative_names(flat: FlatState, index: CheckpointIndex) -> dict[Path, str]:
    if not flat.relative or index.details.get(NESTED_KEYS):
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
    """The plain tensors that are stored at or below a path, by the rest of their paths."""
    if path_text(path) in index.tensors:
        return {(): path_text(path)}
    recorded: Mapping[str, list[Any]] = index.details.get("paths") or {}
    found = {key: tuple(own) for key, own in recorded.items() if key in index.tensors}
    return {own[len(path) :]: key for key, own in found.items() if own[: len(path)] == path}


def merged(value: Any, tensors: Mapping[Path, Any]) -> Any:
    """A plain value with tensors inserted at paths within it."""
    if () in tensors:
        return tensors[()]
    root: dict[Any, Any] = dict(value) if isinstance(value, dict) else {}
    by_key: dict[Any, dict[Path, Any]] = defaultdict(dict)
    for (key, *rest), tensor in tensors.items():
        by_key[key][tuple(rest)] = tensor
    for key, inner in by_key.items():
        root[key] = merged(root.get(key), inner)
    return root


def asked_plain(asked: Iterable[Path], common: Any) -> Iterator[str]:
    """The texts of the stored plain values at or below these paths of templates."""
    for path in asked:
        value = lookup(common, path)
        if value is not ABSENT:
            for inner, leaf in leaves(value):
                if not isinstance(leaf, dict):
                    yield path_text(path + inner)
