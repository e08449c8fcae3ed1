"""A nested state taken apart by kind and path, and put together again after loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opt_checkpoint.errors import CheckpointingException
from opt_checkpoint.state.dtensor import is_dtensor
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import LocalNonpersistentObject, ShardedObject, ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import ABSENT, Path, leaves, map_leaves, merged_factory, path_text


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state by kind and path.

    Args:
        state: the nest it was made from.
        tensors: sharded tensors; those of a factory under its path and theirs.
        objects: sharded objects.
        common: values that are stored once for all ranks.
        built: what each factory built.
        empty: paths of empty dicts, which ask for nothing and may be full on another rank.
    """

    state: ShardedStateDict
    tensors: dict[Path, ShardedTensor]
    objects: dict[Path, ShardedObject]
    common: dict[Path, Any]
    built: dict[Path, Any]
    empty: dict[Path, Any]

    def assembled(self, objects: Mapping[Path, Any], common: Mapping[Path, Any], dropped: frozenset[Path]) -> Any:
        """The nest with every sharded value replaced by what was loaded for it.

        Args:
            objects: loaded objects by path.
            common: loaded common values by path.
            dropped: paths that were not loaded; they are left out of dicts.

        Returns:
            A new nest; tensors are the very memory of the state's sharded tensors.
        """

        def loaded(path: Path, value: Any) -> Any:
            if path in dropped or (path in self.built and any(d[: len(path)] == path for d in dropped)):
                return ABSENT
            if isinstance(value, ShardedTensor):
                return value.data
            if isinstance(value, ShardedTensorFactory):
                return merged_factory(value, self.built[path])
            if isinstance(value, ShardedObject):
                return objects[path]
            if path in self.empty:
                return {}
            return value.unwrap() if isinstance(value, LocalNonpersistentObject) else common[path]

        return _without_absent(map_leaves(self.state, loaded))


def _without_absent(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _without_absent(v) for k, v in state.items() if v is not ABSENT}
    if isinstance(state, list) and any(v is ABSENT for v in state):
        return [None if v is ABSENT else v for v in state]
    return state


def flatten_state(state: ShardedStateDict) -> FlatState:
    """Take a state apart, building its factories.

    Raises:
        CheckpointingException: a DTensor where a sharded tensor should be, something sharded in a tuple, or a factory
            that does not build.
    """
    flat = FlatState(state=state, tensors={}, objects={}, common={}, built={}, empty={})
    for path, value in leaves(state):
        if isinstance(value, ShardedTensorFactory):
            flat.built[path] = value.build()
            _take_built(flat, path, has_mains=value.has_mains)
        elif isinstance(value, ShardedTensor):
            flat.tensors[path] = value
        elif isinstance(value, ShardedObject):
            flat.objects[path] = value
        elif isinstance(value, dict):
            flat.empty[path] = value
        elif not isinstance(value, LocalNonpersistentObject):
            flat.common[path] = _plain(path, value)
    return flat


def _take_built(flat: FlatState, path: Path, *, has_mains: bool) -> None:
    for inner, piece in leaves(flat.built[path]):
        if not isinstance(piece, ShardedTensor):
            raise CheckpointingException(
                f"the factory at {path_text(path)} built a {type(piece).__name__} where only ShardedTensors may be"
            )
        piece.has_mains = has_mains
        flat.tensors[path + inner] = piece


def _plain(path: Path, value: Any) -> Any:
    """Common values are stored by one rank: a DTensor would lose all others' parts."""
    if isinstance(value, Tensor) and is_dtensor(value):
        raise CheckpointingException(
            f"{path_text(path)} is a DTensor; wrap it: sharded_like({path_text(path)!r}, tensor), or it is lost in part"
        )
    return value
