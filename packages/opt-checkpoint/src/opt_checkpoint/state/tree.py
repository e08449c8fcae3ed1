"""Nested state dicts as paths: walk, map, prefix, expand and merge; flatten by kind and path, and assemble again.

A state is nested dicts and lists. A list is a container only where something sharded (a sharded type or a DTensor) is
inside it; every other list is one value, whose plain tensors are stored separately, see `without_tensors`. Tuples are
always values. So two lists of different length meet nowhere, and nothing is ever merged by its place in a list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.checks import check_tree, read_source_
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.megatron_types import from_megatron
from opt_checkpoint.state.model_parallel import has_other_ranks
from opt_checkpoint.state.sharded import (
    EMPTY,
    LocalNonpersistentObject,
    Path,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    items_of,
    path_text,
)
from opt_checkpoint.state.tensors import DTYPE_NAMES, check_dense, is_dtensor, sharded_like

S = TypeVar("S", ShardedTensor, ShardedObject)


class ScopedState(dict[Any, Any]):
    """A part of a state whose keys are relative: its path in the whole state becomes part of every stored key.

    `{"model": sharded_model(m), "ema": sharded_model(e)}` stores `model.0.weight` and `ema.0.weight`, the keys that
    `torch.distributed.checkpoint` gives `{"model": m.state_dict(), "ema": e.state_dict()}`.

    Args:
        values: the part.
        replaces: a prefix of its keys that the path replaces, as `optimizer.` of an optimizer's; other keys get the
            path as a prefix.
        check: called before the part is saved (with True) or loaded (with False); raises if it does not describe its
            object any more, or must not be saved.
        optional: names of values that a checkpoint may lack; a load then leaves them out.
    """

    __slots__ = ("check", "optional", "replaces")

    def __init__(
        self,
        values: Mapping[Any, Any] = EMPTY,
        *,
        replaces: str = "",
        check: Callable[[bool], None] = lambda saves: None,
        optional: Sequence[str] = (),
    ) -> None:
        super().__init__(values)
        self.replaces = replaces
        self.check = check
        self.optional = optional

    def like(self, values: Mapping[Any, Any]) -> ScopedState:
        """Return the same scope with other values, which are not compared with an object."""
        return ScopedState(values, replaces=self.replaces, optional=self.optional)

    def key_at(self, path: Path, key: str) -> str:
        """Return the stored key of a value that has `key` in this part, where the part is at `path`."""
        return f"{path_text(path)}.{key.removeprefix(self.replaces)}" if path else key


class Leaf(NamedTuple):
    """A value of a state and the keys that lead to it."""

    path: Path
    value: Any


def holds_sharded(value: object) -> bool:
    """Return whether something sharded is a value, or anywhere inside its dicts, lists and tuples."""
    if isinstance(value, dict | list | tuple):
        return any(holds_sharded(inner) for _, inner in items_of(value))
    return isinstance(value, ShardedBase | LocalNonpersistentObject) or is_dtensor(value)


def _inner(state: Any) -> list[tuple[Any, Any]]:
    """The keys and values of a container; none for a value."""
    is_container = isinstance(state, dict) or (isinstance(state, list) and holds_sharded(state))
    return list(items_of(state)) if is_container else []


def leaves(state: Any, path: Path = ()) -> Iterator[Leaf]:
    """Yield the values of a state in order, each with its path; an empty dict is a value.

    Raises:
        CheckpointingException: something sharded is inside a tuple, where nothing would find it, or a key is neither
            text nor integer.
    """
    inner = _inner(state)
    if not inner:
        if isinstance(state, tuple) and holds_sharded(state):
            raise CheckpointValueError(f"{path_text(path)!r} is a tuple that contains sharded values; make it a list")
        yield Leaf(path, state)
    for key, value in inner:
        if not isinstance(key, str | int):
            raise CheckpointValueError(f"key {key!r} under {path_text(path)!r} must be a str or an int")
        yield from leaves(value, (*path, key))


def scopes(state: Any, path: Path = ()) -> Iterator[Leaf]:
    """Yield every `ScopedState` in a state, outer ones first, each with its path."""
    if isinstance(state, ScopedState):
        yield Leaf(path, state)
    for key, value in _inner(state):
        yield from scopes(value, (*path, key))


def is_below(path: Path, places: Iterable[Path]) -> bool:
    """Return whether a path begins with one of others, or is one of them."""
    return any(path[: len(place)] == place for place in places)


ABSENT: Any = object()  # stands for a value that does not exist


def map_leaves(
    state: Any,
    change: Callable[[Path, Any], Any],
    path: Path = (),
    *,
    scoped: bool = False,
    prunes: bool = False,
) -> Any:
    """Return a state of the same shape whose every value is `change(path, value)`; one that is `ABSENT` is left out.

    In a list, it is None.
    A `ScopedState` becomes a plain dict, unless `scoped`. With `prunes`, a container without values is `ABSENT` too.
    """
    inner = _inner(state)
    if not inner:
        return change(path, state)
    changed = [(key, map_leaves(value, change, (*path, key), scoped=scoped, prunes=prunes)) for key, value in inner]
    found = {key: value for key, value in changed if value is not ABSENT}
    if prunes and not found:
        return ABSENT
    if isinstance(state, list):
        return [found.get(key) for key, _ in changed]
    return state.like(found) if scoped and isinstance(state, ScopedState) else found


def without_tensors(value: Any) -> tuple[Any, dict[Path, Tensor]]:
    """Return a plain value with None in place of the tensors in its lists, tuples and dicts, and these by path within
    it.

    Only tensors of storable dtypes are taken out.
    """
    tensors: dict[Path, Tensor] = {}

    def separated(path: Path, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in DTYPE_NAMES:
            tensors[path] = value
            return None
        if type(value) in (list, tuple):
            return type(value)(separated((*path, i), inner) for i, inner in enumerate(value))
        if type(value) is dict and all(type(key) in (str, int) for key in value):
            return {key: separated((*path, key), inner) for key, inner in value.items()}
        return value

    return separated((), value), tensors


def lookup(state: Any, path: Path) -> Any:
    """Return the value at a path, or `ABSENT`; an integer key also finds the element of a list."""
    for key in path:
        in_list = isinstance(state, list) and isinstance(key, int) and 0 <= key < len(state)
        if in_list or (isinstance(state, dict) and key in state):
            state = state[key]
        else:
            return ABSENT
    return state


def sharded_values(state: Any) -> Iterator[ShardedBase]:
    """Yield all sharded values in a state, at any depth."""
    return (leaf.value for leaf in leaves(state) if isinstance(leaf.value, ShardedBase))


def apply_factories(state: ShardedStateDict) -> None:
    """Replace each factory in `state` by what it builds; writes only to `state`'s containers."""
    for key, value in list(items_of(state)):
        if isinstance(value, ShardedTensorFactory):
            state[key] = value.build()
        elif isinstance(value, dict | list):
            apply_factories(value)  # type: ignore[arg-type]


def apply_factory_merges(loaded: Any, factories: Any) -> Any:
    """Undo `apply_factories`: where `factories` holds a factory, merge the loaded pieces back into one tensor.

    Args:
        loaded: a state as loaded, pieces where the factories were; its containers are written to.
        factories: a nested dict of factories only, by the same paths; for a list, a dict by position is allowed too.

    Returns:
        `loaded`, merged.

    Raises:
        ValueError: the two nested states do not match.
    """
    if isinstance(factories, ShardedTensorFactory):
        return factories.merge(loaded)
    if not (isinstance(factories, dict | list) and isinstance(loaded, dict | list)):
        raise ValueError(f"Duplicate non-dict and non-list values encountered: {type(loaded)} and {type(factories)}")
    if isinstance(loaded, list) and isinstance(factories, list) and len(loaded) != len(factories):
        raise ValueError(f"Cannot merge two lists with different lengths ({len(loaded)} and {len(factories)})")
    for key, factory in items_of(factories):
        if isinstance(loaded, dict) and key not in loaded:
            raise ValueError(f"Different dict keys: {key!r} of the factories is not among the loaded {list(loaded)}")
        if isinstance(loaded, list) and not (isinstance(key, int) and 0 <= key < len(loaded)):
            raise ValueError(f"Cannot merge key {key!r} into a list of {len(loaded)}; keys must be positions in it")
        loaded[key] = apply_factory_merges(loaded[key], factory)
    return loaded


def add_prefix_for_sharding(state: ShardedStateDict, prefix: str) -> None:
    """Put `prefix` before every sharded key; writes the keys of the sharded values in `state`."""
    for value in sharded_values(state):
        value.key = prefix + value.key


def replace_prefix_for_sharding(state: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Swap `old_prefix` for `new_prefix` on every sharded key; nothing is written unless all of them have it.

    Raises:
        ValueError: a key does not begin with `old_prefix`.
    """
    values = list(sharded_values(state))
    for value in values:
        if not value.key.startswith(old_prefix):
            raise ValueError(f"Expected {value.key!r} to begin with prefix {old_prefix!r}")
    for value in values:
        value.key = new_prefix + value.key.removeprefix(old_prefix)


def apply_prefix_mapping(state: ShardedStateDict, prefixes: Mapping[str, str]) -> None:
    """Swap the first prefix of `prefixes` that a sharded key begins with; other keys stay."""
    for value in sharded_values(state):
        for old, new in prefixes.items():
            if value.key.startswith(old):
                value.key = new + value.key.removeprefix(old)
                break


class Relative(NamedTuple):
    """The key of a value within its scope, and the path of that scope."""

    scope: Path
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state by kind and path.

    Args:
        state: the nested state.
        tensors: sharded tensors under their stored keys; those built by a factory under its path and theirs.
        objects: sharded objects under their stored keys.
        common: values that are stored once for all ranks.
        built: the tensors that each factory built.
        empty: paths of empty dicts, which request nothing and may be non-empty on another rank.
        plain: paths of those `tensors` that are plain tensors or DTensors in the state; their path is their key.
        relative: the relative key of every tensor and object in a `ScopedState`.
    """

    state: ShardedStateDict
    tensors: dict[Path, ShardedTensor]
    objects: dict[Path, ShardedObject]
    common: dict[Path, Any]
    built: dict[Path, Any]
    empty: dict[Path, Any]
    plain: dict[Path, Tensor]
    relative: dict[Path, Relative]

    def nested_common(self) -> Any:
        """Return the common values and the empty dicts, nested as in the state; an empty dict if there are none."""
        values = {**self.empty, **self.common}
        nested = map_leaves(self.state, lambda path, _: values.get(path, ABSENT), prunes=True)
        return {} if nested is ABSENT else nested

    def separate_tensors_(self) -> None:
        """Move the tensors in lists and tuples of common values to the plain tensors, under the keys of stock DCP.

        Lists of a `ScopedState`, such as parameter groups, stay values.
        """
        scoped = [path for path, _ in scopes(self.state)]
        for path, value in self.common.items():
            if type(value) in (list, tuple) and not is_below(path, scoped):
                self.common[path], tensors = without_tensors(value)
                for inner, tensor in tensors.items():
                    self.tensors[path + inner] = sharded_like(path_text(path + inner), tensor)
                    self.plain[path + inner] = tensor

    def join_tensors_(self) -> None:
        """Move the plain tensors to the common values, as Megatron-Core has them. DTensors stay tensors."""
        for path, tensor in [*self.plain.items()]:
            if not is_dtensor(tensor):
                check_dense(path_text(path), tensor)
                self.common[path] = tensor.detach().to("cpu", copy=True)  # without what else is in its storage
                del self.plain[path]
                del self.tensors[path]

    def assembled(self, objects: Mapping[Path, Any], common: Mapping[Path, Any], dropped: frozenset[Path]) -> Any:
        """Return the nested state with every sharded value replaced by the loaded value.

        Args:
            objects: loaded objects by path.
            common: loaded common values by path.
            dropped: paths that were not loaded; they are left out of dicts.

        Returns:
            A new nested state; its tensors share the memory of the state's sharded tensors.
        """

        def loaded(path: Path, value: Any) -> Any:
            if path in dropped or (path in self.built and any(is_below(d, [path]) for d in dropped)):
                return ABSENT
            if path in common:
                return common[path]
            if isinstance(value, ShardedTensor):
                tensor = self.tensors[path]
                source = tensor.source
                return tensor.data if source is None or tensor.data is not source.local else source.read()
            if isinstance(value, ShardedTensorFactory):
                return value.merge(map_leaves(self.built[path], lambda _, piece: piece.data))
            if isinstance(value, ShardedObject):
                return objects[path]
            if path in self.empty:
                return {}
            return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value

        return map_leaves(self.state, loaded)


def flatten_state(state: ShardedStateDict, *, saves: bool = False) -> FlatState:
    """Flatten a state to save it, or to load it: build its factories, and determine the stored key of every value.

    Megatron-Core's own types become those of this package, in the result's `state`.

    A plain tensor or DTensor is stored as a tensor, under its path. In a `ScopedState`, the path of that part becomes
    part of the keys. Descriptions get the values that their tensors have now: writes to their `data`.

    Raises:
        CheckpointMismatchError: a tensor has another dtype, shape or place than was described.
        CheckpointingException: something sharded is in a tuple, a factory does not build, or a DTensor is not one
            block of its tensor.
    """
    check_tree(state)
    state = from_megatron(state)
    flat = FlatState(state=state, tensors={}, objects={}, common={}, built={}, empty={}, plain={}, relative={})
    scoped: dict[Path, ScopedState] = dict(scopes(state))
    for scope in scoped.values():
        scope.check(saves)
    for path, value in leaves(state):
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            read_source_(value)
        if isinstance(value, ShardedTensorFactory):
            flat.built[path] = value.build()
            for inner, piece in _built_tensors(flat.built[path], value, path):
                flat.tensors[path + inner] = _with_stored_key(flat, path + inner, piece, scoped)
        elif isinstance(value, ShardedTensor):
            problem = "" if value.marks is None else value.marks.problem()
            if problem and has_other_ranks():  # it is a part of something larger, and the part is unknown
                raise CheckpointValueError(problem)
            flat.tensors[path] = _with_stored_key(flat, path, value, scoped)
        elif isinstance(value, ShardedObject):
            flat.objects[path] = _with_stored_key(flat, path, value, scoped)
        elif isinstance(value, Tensor):
            flat.tensors[path] = sharded_like(path_text(path), value)
            flat.plain[path] = value
        elif isinstance(value, dict):
            flat.empty[path] = value
        elif not isinstance(value, LocalNonpersistentObject):
            flat.common[path] = value
    return flat


def _built_tensors(
    built: ShardedStateDict, factory: ShardedTensorFactory, at: Path
) -> Iterator[tuple[Path, ShardedTensor]]:
    """The tensors that a factory built, by their path in the result. Raises CheckpointValueError for other leaves."""
    for inner, piece in leaves(built):
        if not isinstance(piece, ShardedTensor):
            raise CheckpointValueError(
                f"the factory at {path_text(at)} built a {type(piece).__name__} where only ShardedTensors may be"
            )
        piece.has_mains = factory.has_mains
        piece.optional = factory.optional
        yield inner, piece


def _with_stored_key(flat: FlatState, path: Path, value: S, scoped: Mapping[Path, ScopedState]) -> S:
    """The value with its stored key: the value itself, or a shallow copy if its key is relative."""
    outer = (path[:n] for n in range(len(path), -1, -1))
    at = next((place for place in outer if place in scoped), None)
    if at is None:
        return value
    flat.relative[path] = Relative(at, value.key)
    named = copy.copy(value)
    named.key = scoped[at].key_at(at, value.key)
    return named
