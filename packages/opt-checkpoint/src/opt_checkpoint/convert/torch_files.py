"""Converts optimizers from and to files of torch: full `torch.optim` state dicts, and directories for stock `dcp.load`.

For `dcp.load`, tensors are not copied: the new directory has hard links to the data files, and its own `.metadata`, in
which the optimizer's states have the keys of `torch.distributed.checkpoint.state_dict`
(`optim.state.<parameter>.<state>`).
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from opt_checkpoint.convert.reading import load_torch_file, read_mapped, scratch_folder
from opt_checkpoint.disk.archives import archive_of
from opt_checkpoint.disk.checkpoint import open_checkpoint
from opt_checkpoint.disk.foreign import METADATA, read_dcp_index
from opt_checkpoint.disk.index import COMMON_KEY, ByteRange, CheckpointIndex, Kind, StoredTensor
from opt_checkpoint.errors import CheckpointExistsError, CheckpointKeyError, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike, save
from opt_checkpoint.run.saved_optimizer import PREFIX, ByParam, SavedOptimizer, find_optimizer
from opt_checkpoint.run.torch_optimizer import OPTIMIZER
from opt_checkpoint.state.groups import groups_to_saved
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.state.tensors import sharded_like
from opt_checkpoint.state.tree import ABSENT, ScopedState, lookup
from opt_checkpoint.store import AnyPath, store_at
from opt_checkpoint.store.paths import local_path

_GROUPS_FILE = "optimizer.data"


def torch_state_to_sharded(state_dict: Mapping[str, Any], names: Sequence[str] | None) -> ShardedStateDict:
    """Convert a full `optimizer.state_dict()` to the form of `sharded_optimizer`, so that any sharding can load it.

    Args:
        state_dict: torch's form: `state` by index, `param_groups` with indices.
        names: names of the parameters by index; None to take `param_names` from the groups (there when the optimizer
            was built from named parameters).

    Raises:
        CheckpointingException: names are missing or duplicated.
    """
    groups = state_dict["param_groups"]
    name_of: dict[int, str] = {}
    for group in groups:
        if names is not None:
            beyond = [index for index in group["params"] if not 0 <= index < len(names)]
            if beyond:
                raise CheckpointValueError(
                    f"{len(names)} names are given, but the file has parameter {beyond[0]}; pass a name for each "
                    f"parameter"
                )
            own = [names[index] for index in group["params"]]
        elif "param_names" in group:
            own = group["param_names"]
        else:
            raise CheckpointValueError(
                "the state dict names no parameters; pass their names in the optimizer's order (names=...), or build "
                "the optimizer from model.named_parameters()"
            )
        name_of.update(zip(group["params"], own, strict=True))
    twice = [name for name, count in Counter(name_of.values()).items() if count > 1]
    if twice:
        raise CheckpointValueError(f"{twice[0]} names several parameters; each needs its own name")
    if names is not None and len(names) != len(name_of):
        raise CheckpointValueError(f"{len(names)} names are given for {len(name_of)} parameters")
    tensors: ByParam[Any] = defaultdict(dict)
    plain: ByParam[Any] = defaultdict(dict)
    shapes: dict[str, list[int]] = {}
    for index, states in state_dict["state"].items():
        if index not in name_of:
            raise CheckpointValueError(f"the state dict has state of parameter {index}, which is in no group")
        name = name_of[index]
        for state, value in states.items():
            if isinstance(value, Tensor):
                tensors[name][state] = sharded_like(f"{PREFIX}{state}.{name}", value)
            else:
                plain[name][state] = value
        found = {tuple(value.shape) for value in states.values() if isinstance(value, Tensor) and value.dim()}
        if len(found) == 1:  # else they differ from the parameter's, as Adafactor's do
            shapes[name] = list(found.pop())
    state_names = {name: sorted(state_dict["state"].get(index, {})) for index, name in name_of.items()}
    saved = groups_to_saved(groups, [[name_of[index] for index in group["params"]] for group in groups])
    parts = {"state": dict(tensors), "plain_state": dict(plain), "state_names": state_names}
    return ScopedState({**parts, "param_shapes": shapes, **saved}, replaces=OPTIMIZER)


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


def checkpoint_to_torch_file(
    path: AnyPath, file: PathLike, *, at: tuple[str, ...] = ("optimizer",), force: bool = False
) -> None:
    """Write the optimizer of a checkpoint as one full state dict that `torch.load(weights_only=True)` can load.

    The tensors are assembled in scratch files next to the output, so they need not fit into memory.

    Args:
        path: the checkpoint.
        file: the `.pt` file to write.
        at: the keys under which the optimizer is stored.
        force: whether an existing file is replaced, once the new one is complete.

    Raises:
        CheckpointExistsError: something is at `file`, and `force` is false; or a directory is.
        CheckpointKeyError: no optimizer of `sharded_optimizer` or opt-stack's `Optimizer` is stored there, or several
            of its parameters are stacked under one key.
    """
    opened = open_checkpoint(path)
    target = local_path(file, "the .pt file")
    if os.path.lexists(target) and (target.is_dir() or not force):
        kind = "a directory" if target.is_dir() else "not replaced without --force (force=True)"
        raise CheckpointExistsError(f"{target} exists and is {kind}; choose another file")
    has_groups = lookup(opened.common, (*at, "groups")) is not ABSENT
    if not has_groups or lookup(opened.common, (*at, "groups", "names")) == []:  # the order of parameters is unknown
        raise CheckpointKeyError(f"{path} holds no optimizer of sharded_optimizer or of opt-stack at {'.'.join(at)}")
    saved = find_optimizer(opened, at)
    stored = {key: opened.index.tensors[key] for keys in saved.keys.values() for key in keys.values()}
    index = {name: number for number, name in enumerate(name for own in saved.names for name in own)}
    with scratch_folder(target) as scratch:
        tensors = read_mapped(opened.index, stored, scratch)
        states = {name: {s: tensors[key] for s, key in saved.keys.get(name, {}).items()} for name in index}
        for name, plain in saved.plain_state.items():
            states[name].update(plain)
        groups = []
        for group, own in zip(saved.groups, saved.names, strict=True):
            groups.append({**group, "params": [index[name] for name in own], "param_names": list(own)})
        state = {index[name]: dict(sorted(own.items())) for name, own in states.items() if own}
        torch.save({"state": state, "param_groups": groups}, scratch / "whole.pt")
        os.replace(scratch / "whole.pt", target)


def checkpoint_to_dcp(
    path: PathLike, folder: PathLike, *, at: tuple[str, ...] = ("optimizer",), name: str = ""
) -> None:
    """Write a directory for stock `dcp.load` with `{"model": model_state, "optim": optimizer_state}` of
    `get_state_dict`.

    Groups are stored both by number and flattened by parameter, for both forms of the optimizer's state dict.

    Args:
        path: a checkpoint of opt-checkpoint with `sharded_optimizer(...)` in its state.
        folder: the directory to write; on the file system of `path`, files are linked, else copied.
        at: the keys under which the optimizer is.
        name: the key of the optimizer in `folder`; "" for the same as in `path`.

    Raises:
        CheckpointExistsError: something is at `folder`.
        CheckpointKeyError: the checkpoint has no optimizer.
        CheckpointingException: `path` was not written by opt-checkpoint, or is in an object store.
    """
    source = local_path(path, "a checkpoint whose files are to be linked")
    opened = open_checkpoint(source)
    target = local_path(folder, "a directory for dcp.load")
    if opened.index.kind is not Kind.OURS:
        raise CheckpointValueError(f"{path} was written by {opened.index.kind.value}, not by opt-checkpoint")
    saved = find_optimizer(opened, at)
    archives = read_dcp_index(source, store_at(source).sizes())
    name = name or ".".join(at)
    keys: dict[str, str] = {}
    for param, states in saved.keys.items():
        keys.update((key, f"{name}.state.{param}.{state}") for state, key in states.items())
    tensors = {keys.get(key, key): tensor for key, tensor in archives.tensors.items()}
    objects = {key: place for key, place in archives.objects.items() if key != COMMON_KEY}
    write_linked(archives, target, tensors, objects, lambda out: _write_values(out / _GROUPS_FILE, saved, name))


def write_linked(
    archives: CheckpointIndex,
    target: Path,
    tensors: Mapping[str, StoredTensor],
    objects: Mapping[str, ByteRange],
    write_more: Callable[[Path], Mapping[str, ByteRange] | None],
) -> None:
    """Write a stock directory with links to the data files of a checkpoint, or copies on another file system.

    Args:
        archives: the checkpoint as stock readers find it.
        target: the directory, which must not exist.
        tensors: its tensors by their new keys.
        objects: its objects.
        write_more: writes other files to the folder, and returns the places of objects in them.

    Raises:
        CheckpointExistsError: something is at `target`.
    """
    if os.path.lexists(target):
        raise CheckpointExistsError(f"{target} exists; choose another folder")
    source = local_path(archives.path, "a checkpoint whose files are to be linked")
    files = {file: f"{number}.data" for number, file in enumerate(sorted(archives.files))}
    stored: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}

    def info(place: ByteRange) -> _StorageInfo:
        return _StorageInfo(files.get(place.file, place.file), place.start, place.nbytes)

    for key, tensor in tensors.items():
        chunks = [dcp.ChunkStorageMetadata(Size(c.box.offsets), Size(c.box.sizes)) for c in tensor.chunks]
        properties = dcp.TensorProperties(tensor.dtype)
        stored[key] = dcp.TensorStorageMetadata(properties, Size(tensor.shape), chunks)
        for chunk in tensor.chunks:
            storage[dcp.MetadataIndex(key, Size(chunk.box.offsets))] = info(chunk.place)
    with scratch_folder(target) as scratch:
        out = scratch / "whole"
        out.mkdir()
        for file, link in files.items():
            try:
                os.link(source / file, out / link)
            except OSError:  # another file system, or one without links
                shutil.copyfile(source / file, out / link)
        values = {**objects, **(write_more(out) or {})}
        stored |= {key: dcp.BytesStorageMetadata() for key in values}
        storage |= {dcp.MetadataIndex(key): info(place) for key, place in values.items()}
        metadata = dcp.Metadata(stored, planner_data={key: (key,) for key in stored}, storage_data=storage)
        (out / METADATA).write_bytes(pickle.dumps(metadata))
        out.rename(target)


def _write_values(file: Path, saved: SavedOptimizer, name: str) -> dict[str, ByteRange]:
    """Write every field of every group by number and by parameter, and the states that are no tensors, each as an
    archive of `torch.save`; equal values are written once. Returns their places by key."""
    values: dict[str, Any] = {}
    for param, own in saved.plain_state.items():
        values.update((f"{name}.state.{param}.{state}", value) for state, value in own.items())
    for number, (group, members) in enumerate(zip(saved.groups, saved.names, strict=True)):
        for field, value in group.items():
            values |= {f"{name}.param_groups.{of}.{field}": value for of in (number, *members)}
        values[f"{name}.param_groups.{number}.params"] = list(members)
    places: dict[str, ByteRange] = {}
    first: dict[bytes, ByteRange] = {}
    with file.open("wb") as out:
        for key, value in values.items():
            raw = archive_of(value)
            if raw not in first:
                first[raw] = ByteRange(file=file.name, start=out.tell(), nbytes=len(raw), archive=True)
                out.write(raw)
            places[key] = first[raw]
    return places
