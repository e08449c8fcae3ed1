"""Converts from and to full `torch.optim` state dicts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint.convert.foreign_files import load_torch_file, mapped_apart, read_into, scratch_folder, select
from opt_checkpoint.dcp.stored_names import stored_value
from opt_checkpoint.disk.detect import Opened, open_checkpoint
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointKeyError, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike, save
from opt_checkpoint.run.saved_optimizer import PREFIX
from opt_checkpoint.run.torch_optimizer import OPTIMIZER
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.groups import groups_to_saved
from opt_checkpoint.state.sharded import ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import ScopedState, lookup
from opt_checkpoint.store import AnyPath
from opt_checkpoint.store.paths import local_path


def torch_state_to_sharded(state_dict: Mapping[str, Any], names: Sequence[str] | None = None) -> ShardedStateDict:
    """Convert a full `optimizer.state_dict()` to the form of `sharded_optimizer`, so that any sharding can load it.

    Args:
        state_dict: torch's form: `state` by index, `param_groups` with indices.
        names: names of the parameters by index; None to take `param_names` from the groups (there when the optimizer
            was built from named parameters).

    Raises:
        CheckpointingException: names are missing or duplicated.
    """
    groups = state_dict["param_groups"]
    by_group = [_group_names(group, names) for group in groups]
    name_of = {index: n for group, own in zip(groups, by_group) for index, n in zip(group["params"], own, strict=True)}
    _check_names(state_dict, name_of, names)
    tensors: dict[str, dict[str, Any]] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, states in state_dict["state"].items():
        for state_name, value in states.items():
            held = tensors if isinstance(value, Tensor) else plain
            key = f"{PREFIX}{state_name}.{name_of[index]}"
            wrapped = whole_tensor(key, value) if isinstance(value, Tensor) else value
            held.setdefault(name_of[index], {})[state_name] = wrapped
    state_names = {n: sorted(state_dict["state"].get(index, {})) for index, n in name_of.items()}
    saved = groups_to_saved(groups, by_group)
    shapes = {name: shape for name, states in tensors.items() if (shape := _shape_of_all(states)) is not None}
    parts = {"state": tensors, "plain_state": plain, "state_names": state_names, "param_shapes": shapes, **saved}
    return ScopedState(parts, replaces=OPTIMIZER)


def _shape_of_all(states: Mapping[str, ShardedTensor]) -> list[int] | None:
    """Infer a parameter's shape from its non-scalar states; None if they differ (Adafactor)."""
    shapes = {state.global_shape for state in states.values() if state.global_shape}
    return list(shapes.pop()) if len(shapes) == 1 else None


def _group_names(group: Mapping[str, Any], names: Sequence[str] | None) -> list[str]:
    if names is None and "param_names" not in group:
        raise CheckpointValueError(
            "the state dict names no parameters; pass their names in the optimizer's order (names=...), or build the "
            "optimizer from model.named_parameters()"
        )
    if names is None:
        return list(group["param_names"])
    beyond = [index for index in group["params"] if not 0 <= index < len(names)]
    if beyond:
        raise CheckpointValueError(
            f"{len(names)} names are given, but the file has parameter {beyond[0]}; pass a name for each parameter"
        )
    return [names[index] for index in group["params"]]


def _check_names(state_dict: Mapping[str, Any], name_of: Mapping[int, str], names: Sequence[str] | None) -> None:
    """Raise unless names and parameters correspond one to one."""
    twice = [name for name, count in Counter(name_of.values()).items() if count > 1]
    if twice:
        raise CheckpointValueError(f"{twice[0]} names several parameters; each needs its own name")
    if names is not None and len(names) != len(name_of):
        raise CheckpointValueError(f"{len(names)} names are given for {len(name_of)} parameters")
    unknown = [index for index in state_dict["state"] if index not in name_of]
    if unknown:
        raise CheckpointValueError(f"the state dict has state of parameter {unknown[0]}, which is in no group")


def torch_file_to_checkpoint(file: PathLike, path: AnyPath, *, names: Sequence[str] | None = None) -> None:
    """Convert a `.pt` file that holds a full optimizer state dict; its tensors are mapped, not read into memory.

    Args:
        file: written by `torch.save`; alone or under the key `"optimizer"`. Loaded with `weights_only=True`.
        path: the checkpoint to write: a directory, or a place in an object store.
        names: as for `torch_state_to_sharded`.

    Raises:
        CheckpointingException: as `torch_state_to_sharded` and `save`.
    """
    content = load_torch_file(file)
    state_dict = content.get("optimizer", content) if isinstance(content, dict) else {}
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointValueError(f"{file} holds no optimizer state dict: it lacks 'state' and 'param_groups'")
    save({"optimizer": torch_state_to_sharded(state_dict, names)}, path)


def checkpoint_to_torch_file(path: AnyPath, file: PathLike, *, at: tuple[str, ...] = ("optimizer",)) -> None:
    """Write the optimizer of a checkpoint as one full state dict that `torch.load(weights_only=True)` can load.

    The tensors are assembled in scratch files next to the output, so they need not fit into memory.

    Args:
        path: the checkpoint.
        file: the `.pt` file to write.
        at: the keys under which the optimizer is stored.

    Raises:
        CheckpointKeyError: no optimizer of `sharded_optimizer` or opt-stack's `Optimizer` is stored there, or several
            of its parameters are stacked under one key.
    """
    opened, target = open_checkpoint(path), local_path(file, "the .pt file")
    prefix = f"{'.'.join(at)}.state."
    prefix = prefix if any(key.startswith(prefix) for key in opened.index.tensors) else PREFIX
    saved = _with_state_names(_saved_at(opened, at), opened.index, prefix)
    if saved is None:
        raise CheckpointKeyError(f"{path} holds no optimizer at {'.'.join(at)}")
    keys = [f"{prefix}{s}.{n}" for n, states in saved["state_names"].items() for s in states]
    stored = select(opened.index, [k for k in keys if k in opened.index.tensors])
    with scratch_folder(target) as scratch:
        tensors = mapped_apart(Path(scratch), stored)
        read_into(opened.index, tensors)
        torch.save(_torch_state(saved, tensors, prefix), Path(scratch) / "whole.pt")
        os.replace(Path(scratch) / "whole.pt", target)  # an existing file is replaced only by a complete new one


def _saved_at(opened: Opened, at: tuple[str, ...]) -> Any:
    saved = lookup(opened.common, at)
    if not isinstance(saved, dict) or "groups" not in saved:
        return saved
    return {**saved, "groups": stored_value((*at, "groups"), opened.common, opened.index)}


def _with_state_names(saved: Any, index: CheckpointIndex, prefix: str) -> Mapping[str, Any] | None:
    """The groups and state names that `sharded_optimizer` stores. opt-stack's optimizer stores only groups; for it the
    state names are taken from the keys.

    None if neither is stored.
    """
    if not isinstance(saved, dict) or "state_names" in saved:
        return saved if isinstance(saved, dict) else None
    groups = saved.get("groups")
    if not isinstance(groups, dict) or "names" not in groups:
        return None
    state_names: dict[str, list[str]] = {name: [] for own in groups["names"] for name in own}
    stacked = [name for name in state_names if "/" in name]
    if stacked:
        raise CheckpointKeyError(
            f"{stacked[0]} shares a stacked key with other layers; a torch state dict cannot represent that"
        )
    for key in sorted(index.tensors):
        state_name, _, name = key.removeprefix(prefix).partition(".")
        if key.startswith(prefix) and name in state_names:
            state_names[name].append(state_name)
    return {"plain_state": {}, "state_names": state_names, **groups}


def _torch_state(saved: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """The state dict in torch's form, with indices in the order of the stored names, group by group."""
    members: list[list[str]] = saved["names"]
    index = {name: i for i, name in enumerate(n for own in members for n in own)}
    state = {}
    for name, state_names in saved["state_names"].items():
        plain = saved["plain_state"].get(name, {})
        if state_names:
            state[index[name]] = {s: plain[s] if s in plain else tensors[f"{prefix}{s}.{name}"] for s in state_names}
    groups = [
        {**group, "params": [index[n] for n in own], "param_names": own} for group, own in zip(saved["groups"], members)
    ]
    return {"state": state, "param_groups": groups}
