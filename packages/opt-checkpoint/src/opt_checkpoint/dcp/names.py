"""Finds the stored name of each value of a state, and decides what to do about keys that are only requested, or only
stored."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

from opt_checkpoint.disk.index import PATHS, CheckpointIndex, Kind
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointKeyError, check_choice
from opt_checkpoint.state.optimizer_state import LAYOUT_MARK, SPLIT_MARK
from opt_checkpoint.state.sharded import Path, path_text
from opt_checkpoint.state.tree import ABSENT, FlatState, is_below, leaves, lookup
from opt_checkpoint.state.wrappers import former_names
from opt_checkpoint.store import Location

_MAINS = "optimizer.state.fp32_param."
_STATE_PREFIX = re.compile(r"^optimizer\.state\.[^.]+\.")


def aliased(key: str, stored: Iterable[str], aliases: Mapping[str, str]) -> str:
    """Return the stored name of a key: the key itself, else the first stored name that replacing a prefix by `aliases`
    yields."""
    others = (new + key.removeprefix(old) for old, new in aliases.items() if key.startswith(old))
    return next((name for name in (key, *others) if name in stored), key)


def stored_names(flat: FlatState, index: CheckpointIndex, aliases: Mapping[str, str]) -> dict[Path, str]:
    """Return the stored name of every tensor and object of a state; its own key if it is not stored.

    A tensor whose key is not stored is searched under its path in the state. If its values are stored in another
    precision, more exact ones may exist under another name, see `_main_values`.
    A value in a `ScopedState` is stored under its path. In checkpoints of other programs it is stored under its
    relative key; that is used if nothing is stored under the path of the scope, and no other scope has the same
    relative key. Earlier versions gave other names to tensors of some models, see `former_names`.
    """
    relative = _relative_names(flat, index)
    names = {}
    for path, shard in flat.tensors.items():
        name = aliased(shard.key, index.tensors, aliases)
        if name not in index.tensors:
            name = path_text(path) if path_text(path) in index.tensors else relative.get(path, name)
        names[path] = name
    _use_former_names_(flat, index, names)
    names |= _main_values(flat, index, names, aliases)
    for path, item in flat.objects.items():
        name = item.unique_key
        names[path] = name if name in index.objects else relative.get(path, name)
    return names


def _use_former_names_(flat: FlatState, index: CheckpointIndex, names: dict[Path, str]) -> None:
    """Name tensors of models and optimizers that are stored under former names of their parameters only; writes to
    `names` and to the relative keys of the state."""
    if all(names[path] in index.tensors for path in flat.relative if path in names):
        return
    parts: dict[str, dict[str, Path]] = defaultdict(dict)  # the paths of tensors by the rest of the key, and name
    for path, (_, key) in flat.relative.items():
        if path in flat.tensors:
            name = _STATE_PREFIX.sub("", key)
            parts[flat.tensors[path].key.removesuffix(name)][name] = path
    for base, paths in parts.items():
        stored = {key.removeprefix(base) for key in index.tensors if key.startswith(base)}
        for name, old in former_names(paths, stored.__contains__).items():
            path = paths[name]
            relative = flat.relative[path]
            names[path] = base + old
            flat.relative[path] = relative._replace(key=relative.key.removesuffix(name) + old)


def _main_values(
    flat: FlatState, index: CheckpointIndex, names: Mapping[Path, str], aliases: Mapping[str, str]
) -> dict[Path, str]:
    """The tensors that are read from another stored tensor with more exact values.

    A parameter requested in a wider dtype than it is stored in is read from its main values. Main values that are not
    stored are read from the parameter.
    """
    stored = index.tensors
    keys = {path: shard.key for path, shard in flat.tensors.items()}
    keys |= {path: relative.key for path, relative in flat.relative.items() if path in keys}
    asked: dict[str, set[str]] = defaultdict(set)
    for path, key in keys.items():
        asked[key].add(names[path])

    def name_of(key: str) -> str | None:
        """Return the stored name of a key: the key itself, or that of the only value of this state with the key."""
        candidates = {aliased(key, stored, aliases), *asked.get(key, ())}
        found = {name for name in candidates if name in stored}
        if not found:
            weights = (name for name in stored if ".state." not in f".{name}")
            found = {name for name in weights if name.endswith(f".{key}")}
        return found.pop() if len(found) == 1 else None

    chosen: dict[Path, str | None] = {}
    for path, shard in flat.tensors.items():
        name = names[path]
        if name not in stored:
            if keys[path].startswith(_MAINS):
                chosen[path] = name_of(keys[path].removeprefix(_MAINS))
        elif shard.has_mains and shard.dtype.is_floating_point and shard.dtype.itemsize > stored[name].dtype.itemsize:
            chosen[path] = name_of(_MAINS + keys[path])
    return {path: name for path, name in chosen.items() if name is not None}


def _relative_names(flat: FlatState, index: CheckpointIndex) -> dict[Path, str]:
    if not flat.relative or index.kind is Kind.OURS:
        return {}
    claimed: dict[str, set[Path]] = defaultdict(set)
    for scope, key in flat.relative.values():
        claimed[key].add(scope)
    stored = index.tensors.keys() | index.objects.keys()
    prefixes = {scope: f"{path_text(scope)}." for scope, _ in flat.relative.values()}
    nested = {scope for scope, prefix in prefixes.items() if any(key.startswith(prefix) for key in stored)}
    names = {}
    for path, (scope, key) in flat.relative.items():
        name = key
        if path in flat.objects:
            _, _, shard = flat.objects[path].unique_key.rpartition("/")
            name = f"{key}/{shard}"
        is_outside = scope not in nested or key.startswith(path_text(scope))
        if name in stored and len(claimed[key]) == 1 and is_outside:
            names[path] = name
    return names


def stored_under(path: Path, index: CheckpointIndex, *, has_value: bool = False) -> dict[Path, str]:
    """Return the stored keys at or below a path, by the rest of their paths.

    They are those of plain tensors; in stock directories also those of objects. At the root, a tensor of a foreign
    checkpoint that records no path for it is at its key. If a plain value is there (`has_value`), a key that reads like
    the path is that of another value.
    """
    stored: Collection[str] = index.tensors
    if index.kind is Kind.DCP:
        stored = [*index.tensors, *index.objects]
    if path_text(path) in stored and not has_value:
        return {(): path_text(path)}
    recorded: Mapping[str, Sequence[Any]] = index.details.get(PATHS) or {}
    found = {key: tuple(recorded[key]) for key in stored if key in recorded}
    if index.kind is not Kind.OURS and not path:
        found = {key: found.get(key, (key,)) for key in stored}
    return {place[len(path) :]: key for key, place in found.items() if is_below(place, [path])}


def merged(value: Any, parts: Mapping[Path, Any], *, lists: bool = False) -> Any:
    """Return a plain value with parts inserted at paths within it.

    Args:
        value: a nested value; None for none.
        parts: what to insert, outer ones before inner ones.
        lists: whether new containers whose keys count from 0 are lists, as in stock directories; else dicts.
    """
    value = parts.get((), value)
    by_key: dict[Any, dict[Path, Any]] = defaultdict(dict)
    for path, part in parts.items():
        if path:
            by_key[path[0]][path[1:]] = part
    if not by_key:
        return value
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
    numbers = range(len(root))
    if lists and all(type(key) is int for key in root) and root.keys() == set(numbers):
        return [root[number] for number in numbers]
    return root


def asked_plain(asked: Iterable[Path], common: Any) -> Iterator[str]:
    """Yield the texts of the stored plain values at, above or below these paths of templates; only a list is above
    one."""
    for path in asked:
        value = lookup(common, path)
        if value is not ABSENT:
            yield from (path_text(path[:n]) for n in range(1, len(path)))
            for inner, leaf in leaves(value):
                if not isinstance(leaf, dict):
                    yield path_text(path + inner)


logger = logging.getLogger(__name__)
_SHOWN = 12
_SPLIT = re.compile(rf"{SPLIT_MARK}([\w-]+)")
_STATE = "optimizer.state."
_MAIN_NAMES = frozenset({"fp32_param", "param"})  # names of main weights: ours, and Megatron-Core's other one


class StrictHandling(StrEnum):
    """What to do about keys on one side only, with Megatron-Core's names.

    For Megatron-Core, an *unexpected* key is requested but not stored, and a *missing* key is stored but requested by
    no rank. torch's `load_state_dict` and `LoadReport` call the first one missing. `strict=` also accepts names in
    torch's sense: `raise_missing`, `log_missing`, `return_missing`.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"  # keys that are not stored raise
    LOG_UNEXPECTED = "log_unexpected"  # keys that are not stored are left out with a warning
    LOG_ALL = "log_all"  # both with a warning
    RAISE_UNEXPECTED = "raise_unexpected"  # keys that are not stored raise
    RAISE_ALL = "raise_all"  # both raise
    RETURN_UNEXPECTED = "return_unexpected"  # keys that are not stored are left out and reported
    RETURN_ALL = "return_all"  # both are reported
    IGNORE_ALL = "ignore_all"  # keys that are not stored are left out


Reaction: TypeAlias = Literal["raise", "log", "allow"]
_TORCHS_NAMES = ("raise_missing", "log_missing", "return_missing")
_REACTIONS: dict[str, Reaction] = {"log": "log", "return": "allow", "ignore": "allow"}


class Strictness(NamedTuple):
    """What to do about keys on one side only, in torch's words.

    Args:
        missing: requested, but not stored.
        unexpected: stored, but requested by no rank.
    """

    missing: Reaction
    unexpected: Reaction

    @classmethod
    def parse(cls, value: str) -> Strictness:
        """Make one from the name of a mode.

        Raises:
            ValueError: no mode has this name.
        """
        check_choice("strict", value, [*_TORCHS_NAMES, *StrictHandling], ValueError)
        reaction, _, side = value.rpartition("_")
        missing = _REACTIONS.get(reaction, "raise")  # Megatron-Core's "assume_ok" lets its load raise
        return cls(missing, missing if side == "all" else "allow")

    def report_missing(self, keys: Sequence[str], stored: Sequence[str], where: Location) -> None:
        """Raise CheckpointKeyError or log about keys that are requested but not stored."""
        if keys and self.missing != "allow":
            text = f"{len(keys)} requested key(s) are not in {where}: {some_of(keys)}{_hint(keys, stored)}"
            _react(self.missing, text, "strict='return_missing'")

    def report_unexpected(self, keys: Sequence[str], where: Location) -> None:
        """Raise CheckpointKeyError or log about keys that are stored but requested by no rank."""
        if keys:
            text = f"{len(keys)} key(s) of {where} are requested by no rank: {some_of(keys)}"
            _react(self.unexpected, text, "strict='return_all'")


def _react(reaction: Reaction, text: str, instead: str) -> None:
    if reaction == "raise":
        raise CheckpointKeyError(f"{text}; load with {instead} to continue without them")
    if reaction == "log":
        logger.warning(text)


def warn_of_left_out(empty: Iterable[str], nones: Iterable[str], unexpected: Sequence[str], where: Location) -> None:
    """Warn where an empty dict or a None of the state stands for stored values that it does not load.

    Args:
        empty: paths of empty dicts.
        nones: paths of None, which loads plain values and plain tensors only.
        unexpected: stored keys that no rank requests.
        where: the checkpoint.
    """
    for path in filter(None, empty):
        if inside := _inside(path, unexpected):
            logger.warning(
                f"the state has an empty dict at {path}, which loads nothing; {where} holds {some_of(inside)} there. "
                f"Pass None in its place to load all of it"
            )
    for path in nones:
        if inside := _inside(path, unexpected):
            logger.warning(
                f"None at {path or 'the top of the state'} loads plain values and plain tensors only; {where} holds "
                f"sharded tensors there, which were not loaded: {some_of(inside)}. Describe them, as "
                f"sharded_model(model) does"
            )


def _inside(path: str, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if not path or key.startswith(f"{path}.")]


def some_of(keys: Sequence[str]) -> str:
    """Return the first keys as text, and how many more there are."""
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _hint(missing: Sequence[str], stored: Sequence[str]) -> str:
    """A hint at the cause, for example that the state is stored under other names."""
    if any(".bucket_idx_" in key for key in stored):
        return (
            " (it holds buckets as they lay in memory, Megatron-Core's dp_reshardable, where parameters have no names; "
            "convert it first: optckpt convert ... --from megatron --slots ...)"
        )
    by_split = {_SPLIT.sub("", key): key for key in stored if key.startswith(_STATE)}
    bound = {key.split(LAYOUT_MARK)[0] for key in stored if LAYOUT_MARK in key}
    of_mains = tuple(f"{_STATE}{name}." for name in _MAIN_NAMES)
    mains = [key for key in missing if key.startswith(of_mains)]
    for key in missing:
        name, mark, _ = key.partition(LAYOUT_MARK)
        if mark and name in bound:
            return f" ({name} was saved, but on another layout, and cannot be loaded on this one; reset it)"
        saved = by_split.get(_SPLIT.sub("", key))
        if saved is not None and _split_of(saved) != _split_of(key):
            return (
                f" (it was saved for {_split_of(saved)}, and is asked for {_split_of(key)}: set soap_split_qkv, "
                "head_rows, split_sizes and split_rows as in the run that saved it, or reset the state)"
            )
        others = _other_states(key, stored)
        if others and (key not in mains or _MAIN_NAMES.intersection(others)):
            return (
                f" (this parameter was saved by another rule, with {', '.join(others)}; reset its state, or map one of "
                f"them by aliases={{'optimizer.state.<wanted>.': 'optimizer.state.<saved>.'}})"
            )
    if mains:
        return (
            " (no main weights were saved, e.g. by an fp32 run; leave them out: they are made from the model's weights)"
        )
    return _path_hint(missing[0], stored)


def _split_of(key: str) -> str:
    found = _SPLIT.search(key)
    return f"rows split as {found[1]!r}" if found else "whole matrices"


def _path_hint(key: str, stored: Sequence[str]) -> str:
    """A hint for a key that is stored under another path: the alias to pass."""
    names = set(stored)
    cuts = [position + 1 for position, letter in enumerate(key) if letter == "."]
    aliases = [(key[:cut], "") for cut in cuts if key[cut:] in names]
    longer = [name for name in sorted(stored, key=len) if name.endswith(f".{key}")]
    aliases += [("", name.removesuffix(key)) for name in longer]
    if not aliases:
        return ""
    old, new = aliases[0]
    return f" ({key} is stored as {new}{key.removeprefix(old)}; pass aliases={{{old!r}: {new!r}}})"


def _other_states(key: str, stored: Sequence[str]) -> list[str]:
    """Names of the states that are stored for the parameter of a key `optimizer.state.<name>.<parameter>`."""
    name, dot, param = key.removeprefix(_STATE).partition(".")
    if not key.startswith(_STATE) or not dot:
        return []
    ending = f".{param}"
    of_param = (k for k in stored if k.startswith(_STATE) and k.endswith(ending))
    found = (k.removeprefix(_STATE).removesuffix(ending) for k in of_param)
    return sorted(n for n in found if "." not in n and n != name)
