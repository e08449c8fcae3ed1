"""Describes an optimizer in a checkpoint: its groups by parameter name, and where each state is stored.

Three forms are read: that of `sharded_optimizer`; that of `torch.distributed.checkpoint.state_dict.get_state_dict`, as
torchtitan saves it, with the states `state.<parameter>.<state>` and groups by number or flattened by parameter; and the
same as saved by `opt_checkpoint.save`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opt_checkpoint.dcp.names import stored_value
from opt_checkpoint.disk.checkpoint import Opened, read_objects
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointKeyError
from opt_checkpoint.state.tree import lookup, path_text

PREFIX = "optimizer.state."


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """An optimizer in a checkpoint.

    Args:
        groups: hyper-parameters of each group.
        names: names of each group's parameters.
        state_names: names of each parameter's states; empty for one without.
        plain_state: states that are not tensors, by parameter.
        param_shapes: shapes of the parameters, where they were recorded.
        keys: the stored key of each tensor of state, by parameter and state.
    """

    groups: Sequence[Mapping[str, Any]]
    names: Sequence[Sequence[str]]
    state_names: Mapping[str, Sequence[str]]
    plain_state: Mapping[str, Mapping[str, Any]]
    param_shapes: Mapping[str, Sequence[int]]
    keys: Mapping[str, Mapping[str, str]]


def find_optimizer(opened: Opened, at: Sequence[str]) -> SavedOptimizer:
    """Find the optimizer under these keys of the saved state.

    Args:
        opened: the checkpoint.
        at: the keys, such as `("optimizer",)`.

    Raises:
        CheckpointKeyError: nothing at `at` is an optimizer, or a state of it is incomplete.
    """
    saved = lookup(opened.common, tuple(at))
    if isinstance(saved, dict) and "state_names" in saved:
        return _ours(opened.index, saved, at)
    found = _stock(opened, at)
    if found is None:
        prefixes = sorted({key.partition("state.")[0] for key in opened.index.tensors if ".state." in f".{key}"})
        places = [tuple(prefix.rstrip(".").split(".")) if prefix else () for prefix in prefixes[:4]]
        raise CheckpointKeyError(
            f"{opened.index.path} holds no optimizer at {path_text(tuple(at)) or 'its root'}; pass its place as "
            f"at=(...){'. There are states at ' if places else ''}{', '.join(map(str, places))}"
        )
    return found


def _ours(index: CheckpointIndex, saved: Mapping[str, Any], at: Sequence[str]) -> SavedOptimizer:
    own = f"{path_text(tuple(at))}.state." if at else PREFIX
    keys: dict[str, dict[str, str]] = defaultdict(dict)
    for name, state_names in saved["state_names"].items():
        plain = saved["plain_state"].get(name, {})
        for state in state_names:
            stored = (key for key in (f"{own}{state}.{name}", f"{PREFIX}{state}.{name}") if key in index.tensors)
            if state not in plain and (key := next(stored, None)) is not None:
                keys[name][state] = key
        lost = [state for state in state_names if state not in plain and state not in keys[name]]
        if lost:
            raise CheckpointKeyError(
                f"{index.path}: parameter {name} was saved with {state_names}, but {lost} are not stored"
            )
    return SavedOptimizer(
        groups=saved["groups"],
        names=saved["names"],
        state_names=saved["state_names"],
        plain_state=saved["plain_state"],
        param_shapes=saved.get("param_shapes", {}),  # older checkpoints lack it
        keys=keys,
    )


def _stock(opened: Opened, at: Sequence[str]) -> SavedOptimizer | None:
    prefix = "".join(f"{key}." for key in at)
    keys = _by_param(opened.index.tensors, f"{prefix}state.")
    plain_keys = _by_param(opened.index.objects, f"{prefix}state.")
    groups, names = _stock_groups(opened, at, prefix)
    if not keys and not groups:
        return None
    every = [key for own in plain_keys.values() for key in own.values()]
    values = read_objects(opened.index, every)
    plain = {name: {state: values[key] for state, key in own.items()} for name, own in plain_keys.items()}
    members = [name for own in names for name in own] or sorted(keys.keys() | plain.keys())
    return SavedOptimizer(
        groups=groups,
        names=names,
        state_names={name: sorted({*keys.get(name, {}), *plain.get(name, {})}) for name in members},
        plain_state=plain,
        param_shapes={},
        keys=keys,
    )


def _by_param(stored: Mapping[str, Any], prefix: str) -> dict[str, dict[str, str]]:
    """The keys of the form `<prefix><parameter>.<name>`, by parameter and name."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for key in sorted(stored):
        name, dot, last = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and dot:
            found[name][last] = key
    return found


def _stock_groups(opened: Opened, at: Sequence[str], prefix: str) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Groups and the names of their parameters, which are stored by number or flattened by parameter."""
    listed = stored_value((*at, "param_groups"), opened.common, opened.index)
    if isinstance(listed, list):
        rows = [dict(group) for group in listed]
    else:
        fields = _by_param(opened.index.objects, f"{prefix}param_groups.")
        values = read_objects(opened.index, [key for own in fields.values() for key in own.values()])
        read = {name: {field: values[key] for field, key in own.items()} for name, own in fields.items()}
        if all(name.isdigit() and "params" in own for name, own in read.items()):
            rows = [read[name] for name in sorted(read, key=int)]
        else:  # parameters with equal fields are a group
            groups: dict[str, dict[str, Any]] = {}
            for name, own in read.items():
                text = repr({k: v.tolist() if isinstance(v, Tensor) else v for k, v in sorted(own.items())})
                groups.setdefault(text, {**own, "params": []})["params"].append(name)
            rows = list(groups.values())
    rows = [group for group in rows if all(isinstance(name, str) for name in group.get("params", ()))]
    names = [list(group.get("params", ())) for group in rows]
    return [{field: value for field, value in group.items() if field != "params"} for group in rows], names
