"""A nested state flattened by kind and path, and assembled again after loading."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.errors import CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from opt_checkpoint.state.tensors import local_tensor, sharded_like
from opt_checkpoint.state.tree import (
    ABSENT,
    Path,
    ScopedState,
    leaves,
    map_leaves,
    path_text,
    scopes,
    without_tensors,
)

S = TypeVar("S", ShardedTensor, ShardedObject)


class Relative(NamedTuple):
    """The key of a value within its scoped part, and the path of that part."""

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
        relative: the relative key of every tensor and object in a scoped part.
    """

    state: ShardedStateDict
    tensors: dict[Path, ShardedTensor]
    objects: dict[Path, ShardedObject]
    common: dict[Path, Any]
    built: dict[Path, Any]
    empty: dict[Path, Any]
    plain: dict[Path, Tensor]
    relative: dict[Path, Relative]

    def assembled(self, objects: Mapping[Path, Any], common: Mapping[Path, Any], dropped: frozenset[Path]) -> Any:
        """The nested state with every sharded value replaced by the loaded value.

        Args:
            objects: loaded objects by path.
            common: loaded common values by path.
            dropped: paths that were not loaded; they are left out of dicts.

        Returns:
            A new nested state; its tensors share the memory of the state's sharded tensors.
        """

        def loaded(path: Path, value: Any) -> Any:
            if path in dropped or (path in self.built and any(d[: len(path)] == path for d in dropped)):
                return ABSENT
            if path in common:
                return common[path]
            if isinstance(value, ShardedTensor):
                tensor = self.tensors[path]
                is_in_place = tensor.source is not None and tensor.data is local_tensor(tensor.source)
                return tensor.source if is_in_place else tensor.data
            if isinstance(value, ShardedTensorFactory):
                return value.merge(map_leaves(self.built[path], lambda _, piece: piece.data))
            if isinstance(value, ShardedObject):
                return objects[path]
            if path in self.empty:
                return {}
            return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value

        return _without_absent(map_leaves(self.state, loaded))


def check_stages(tensors: Iterable[ShardedTensor], stored: Collection[str], where: str) -> None:
    """Refuse a list of layers that was not placed, if more layers are stored than it has: it may be a pipeline stage.

    Raises:
        CheckpointMismatchError: naming the list.
    """
    unplaced = [(own, own.marks) for own in tensors if own.marks is not None and own.marks.list_name is not None]
    if not unplaced or not _has_other_ranks():
        return
    lists = {
        f"{own.key.removesuffix(marks.name)}{marks.list_name}{marks.list_name and '.'}": marks.list_len
        for own, marks in unplaced
    }
    for key in stored:
        for prefix, length in lists.items():
            number = key.removeprefix(prefix).partition(".")[0] if key.startswith(prefix) else ""
            if number.isdigit() and int(number) >= length:
                raise CheckpointMismatchError(
                    f"{prefix[:-1] or 'the model'} has {length} layers, and {where} holds more ({key}): if this is a "
                    f"pipeline stage, which layers it has is unknown without process groups. Pass sharded_model(model, "
                    f"groups=opt_stack.ProcessGroups(dp=..., pp=..., ...)); if every rank loads the same first layers, "
                    f"groups=opt_stack.ProcessGroups(dp=torch.distributed.group.WORLD)"
                )


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _without_absent(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _without_absent(v) for k, v in state.items() if v is not ABSENT}
    if isinstance(state, list) and any(v is ABSENT for v in state):
        return [None if v is ABSENT else v for v in state]
    return state


def flatten_state(state: ShardedStateDict) -> FlatState:
    """Flatten a state: build its factories, and determine the stored key of every value.

    A plain tensor or DTensor is stored as a tensor, under its path. In a `ScopedState`, the path of that part becomes
    part of the keys.

    Raises:
        CheckpointingException: something sharded is in a tuple, a factory does not build, or a DTensor is not one
            block of its tensor.
    """
    flat = FlatState(state=state, tensors={}, objects={}, common={}, built={}, empty={}, plain={}, relative={})
    parts: dict[Path, ScopedState] = dict(scopes(state))
    for path, value in leaves(state):
        if isinstance(value, ShardedTensorFactory):
            flat.built[path] = value.build()
            for inner, piece in leaves(flat.built[path]):
                if not isinstance(piece, ShardedTensor):
                    raise CheckpointValueError(
                        f"the factory at {path_text(path)} built a {type(piece).__name__} where only ShardedTensors "
                        f"may be"
                    )
                piece.has_mains = value.has_mains
                flat.tensors[path + inner] = _with_stored_key(flat, path + inner, piece, parts)
        elif isinstance(value, ShardedTensor):
            problem = value.marks.problem() if value.marks is not None and _has_other_ranks() else ""
            if problem:  # it is a part of something larger, and the part is unknown
                raise CheckpointValueError(problem)
            flat.tensors[path] = _with_stored_key(flat, path, value, parts)
        elif isinstance(value, ShardedObject):
            flat.objects[path] = _with_stored_key(flat, path, value, parts)
        elif isinstance(value, Tensor):
            flat.tensors[path] = sharded_like(path_text(path), value)
            flat.plain[path] = value
        elif isinstance(value, dict):
            flat.empty[path] = value
        elif not isinstance(value, LocalNonpersistentObject):
            flat.common[path] = value
    return flat


def separate_tensors_(flat: FlatState) -> None:
    """Move the tensors in lists and tuples of common values to the plain tensors, under the keys of stock DCP.

    Lists of a `ScopedState`, such as parameter groups, stay values. Writes to `flat`.
    """
    parts = [path for path, _ in scopes(flat.state)]
    for path, value in flat.common.items():
        if type(value) in (list, tuple) and not any(path[: len(part)] == part for part in parts):
            flat.common[path], tensors = without_tensors(path, value)
            for inner, tensor in tensors.items():
                flat.tensors[path + inner] = sharded_like(path_text(path + inner), tensor)
                flat.plain[path + inner] = tensor


def _with_stored_key(flat: FlatState, path: Path, value: S, parts: Mapping[Path, ScopedState]) -> S:
    """The value with its stored key: the value itself, or a shallow copy if its key is relative."""
    scope = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in parts), None) if parts else None
    if scope is None:
        return value
    flat.relative[path] = Relative(scope, value.key)
    named = copy.copy(value)
    named.key = parts[scope].key_at(scope, value.key)
    return named
