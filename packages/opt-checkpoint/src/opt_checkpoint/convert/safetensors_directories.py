"""Converts checkpoints to folders of safetensors files and back, in one process, through memory-mapped files."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from opt_checkpoint.convert.foreign_files import mapped_apart, read_into, scratch_folder
from opt_checkpoint.convert.name_boxes import Described, to_theirs
from opt_checkpoint.convert.name_rules import SAME_NAMES, NameRule
from opt_checkpoint.convert.safetensors_export import save_safetensors
from opt_checkpoint.convert.safetensors_files import DEFAULT_SHARD_BYTES, FOLDER
from opt_checkpoint.convert.safetensors_import import load_safetensors, safetensors_index
from opt_checkpoint.disk.detect import read_common, read_index
from opt_checkpoint.disk.index import COMMON_KEY, COPIES
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike, save
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.tree import leaves, path_text
from opt_checkpoint.store import AnyPath
from opt_checkpoint.store.paths import local_path


def safetensors_to_checkpoint(
    folder: PathLike, path: AnyPath, *, names: Sequence[NameRule] = SAME_NAMES, prefix: str = ""
) -> None:
    """Convert a folder of safetensors files to a checkpoint.

    Args:
        folder: as for `load_safetensors`.
        path: the checkpoint to write: a directory, or a place in an object store.
        names: rules that map our names to those of the files.
        prefix: prepended to our names, for example `model.` for `load({"model": sharded_model(model)}, path)`.

    Raises:
        CheckpointingException: as `load_safetensors` and `save`.
    """
    index = safetensors_index(local_path(folder, FOLDER), names)
    with scratch_folder(path) as scratch:
        wanted = {key: stored for key, stored in index.tensors.items() if key not in index.details[COPIES]}
        tensors = mapped_apart(Path(scratch), wanted)
        load_safetensors({key: whole_tensor(key, tensor) for key, tensor in tensors.items()}, folder, names=names)
        save({"tensors": [whole_tensor(prefix + key, tensor) for key, tensor in tensors.items()]}, path)


def checkpoint_to_safetensors(
    path: AnyPath,
    folder: PathLike,
    *,
    names: Sequence[NameRule] = SAME_NAMES,
    select: str = "*",
    prefix: str = "",
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[Path]:
    """Export tensors of a checkpoint of any format, in one process, with tensors in scratch files next to the target.

    Args:
        path: the checkpoint.
        folder: the target, which must not exist.
        names: rules that map our names to those of the files.
        select: only stored keys that match this pattern, with `*` for any text.
        prefix: prefix of stored keys that is removed to get our names in `names`; other keys are left out.
        dtype: what floating-point tensors are converted to; None to keep each tensor's dtype.
        shard_bytes: maximum size of a file, unless one tensor is larger.

    Returns:
        The files.

    Raises:
        CheckpointingException: as `save_safetensors` and `load`.
    """
    index, target = read_index(path), local_path(folder, FOLDER)
    keys = [key for key in index.tensors if fnmatch.fnmatchcase(key, select) and key.startswith(prefix)]
    if not keys:
        raise CheckpointValueError(f"{path} holds no tensor that matches {select!r} and begins with {prefix!r}")
    stored = {key: index.tensors[key] for key in keys}
    to_theirs(names, {key.removeprefix(prefix): Described(t.shape, t.dtype) for key, t in stored.items()})  # may raise
    with scratch_folder(target) as scratch:
        tensors = mapped_apart(Path(scratch), stored)
        read_into(index, tensors)
        state = {key: whole_tensor(key.removeprefix(prefix), tensor) for key, tensor in tensors.items()}
        save_safetensors(state, target, names=names, dtype=dtype, shard_bytes=shard_bytes)
    return [Path(folder) / file for file in sorted(os.listdir(target))]


def left_out(path: AnyPath, *, select: str = "*", prefix: str = "") -> list[str]:
    """What `checkpoint_to_safetensors` with these arguments leaves out as no tensor: plain values by path, and objects.

    A list of tensors is none of them. If the plain values cannot be loaded, their stored key is named.
    """
    index = read_index(path)
    names = set(index.objects)
    try:
        values = [leaf for leaf in leaves(read_common(index)) if leaf.path]
    except CheckpointCorruptError:
        values = []
    else:
        names.discard(COMMON_KEY)
    tensors_only = [isinstance(value, list) and {*map(type, value)} == {type(None)} for _, value in values]
    names |= {path_text(leaf.path) for leaf, is_tensors in zip(values, tensors_only, strict=True) if not is_tensors}
    return sorted(name for name in names if fnmatch.fnmatchcase(name, select) and name.startswith(prefix))
