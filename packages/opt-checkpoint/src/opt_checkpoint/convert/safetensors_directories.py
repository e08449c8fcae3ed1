"""Converts checkpoints to folders of safetensors files and back, in one process, through memory-mapped files."""

from __future__ import annotations

import fnmatch
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from opt_checkpoint.convert.compare import read_whole
from opt_checkpoint.convert.file_backed import array_in, mapped_apart, mapped_file, scratch_folder
from opt_checkpoint.convert.name_boxes import Described, Mapped, Piece, to_theirs
from opt_checkpoint.convert.name_rules import SAME_NAMES, NameRule
from opt_checkpoint.convert.safetensors_import import load_safetensors, safetensors_index
from opt_checkpoint.convert.safetensors_layout import DEFAULT_SHARD_BYTES, FOLDER, INDEX, Layout, layout_of
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.detect import read_index
from opt_checkpoint.disk.files import LocalFiles, write_file
from opt_checkpoint.disk.index import COPIES, CheckpointIndex
from opt_checkpoint.disk.new_directory import NewDirectory
from opt_checkpoint.disk.safetensors_header import Header
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.errors import CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.objects.path import AnyPath, local_path
from opt_checkpoint.run.save_load import PathLike, load, save
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.sharded import ShardedTensor


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
    """Export tensors of a checkpoint of any format; values are read directly into memory-mapped files.

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
    index, target, files = read_index(path), local_path(folder, FOLDER), LocalFiles()
    keys = [key for key in index.tensors if fnmatch.fnmatchcase(key, select) and key.startswith(prefix)]
    if not keys:
        raise CheckpointValueError(f"{path} holds no tensor that matches {select!r} and begins with {prefix!r}")
    stored = {key.removeprefix(prefix): index.tensors[key] for key in keys}
    mapped = to_theirs(names, {key: Described(t.shape, t.dtype) for key, t in stored.items()})
    layout = layout_of(mapped.theirs, dtype=dtype, shard_bytes=shard_bytes)
    directory = NewDirectory(target, uuid.uuid4().hex, files)
    directory.make()
    try:
        arrays = {}
        for file, header in layout.headers.items():
            arrays.update(_mapped_arrays(directory.temporary / file, header))
            _fill(index, mapped, {n: arrays[n] for n in header.arrays}, prefix)
        _check_tied(index, mapped, arrays, prefix)
        del arrays
        _finish(directory, layout, files)
    except BaseException:
        directory.abandon()
        raise
    every = [*layout.headers, *([INDEX] if len(layout.headers) > 1 else [])]
    return [Path(folder) / file for file in every]


def _mapped_arrays(file: Path, header: Header) -> dict[str, Tensor]:
    """The arrays of a new file, whose memory is the file."""
    file.write_bytes(header.raw)
    end = len(header.raw) + sum(array.nbytes for array in header.arrays.values())
    memory = mapped_file(file, end)
    return {name: array_in(memory, a.start, a.dtype, a.shape) for name, a in header.arrays.items()}


def _fill(index: CheckpointIndex, mapped: Mapped, arrays: Mapping[str, Tensor], prefix: str) -> None:
    """Load the boxes of stored tensors into these arrays. Writes only to `arrays`."""
    state = {}
    for key, pieces in mapped.pieces.items():
        for number, piece in enumerate(pieces):
            if piece.theirs in arrays:
                state[f"{key}/{number}"] = _shard(prefix + key, mapped.ours[key], piece, arrays[piece.theirs])
    load(state, index.path, dtype="cast")  # a tensor that is not converted keeps its dtype


def _shard(key: str, described: Described, piece: Piece, array: Tensor) -> ShardedTensor:
    view = piece.within.of_array(array, piece.box.sizes)
    return ShardedTensor(key, view, view.dtype, piece.box.sizes, described.shape, piece.box.offsets, None)


def _check_tied(index: CheckpointIndex, mapped: Mapped, arrays: Mapping[str, Tensor], prefix: str) -> None:
    for key, pieces in mapped.tied.items():
        whole = read_whole(index, prefix + key)
        for piece in pieces:
            array = arrays[piece.theirs]
            own = whole
            for axis, (offset, size) in enumerate(zip(piece.box.offsets, piece.box.sizes)):
                own = own.narrow(axis, offset, size)
            written = piece.within.of_array(array, piece.box.sizes)
            if bytes_view(contiguous(own.to(array.dtype))) != bytes_view(contiguous(written)):
                raise CheckpointMismatchError(
                    f"{prefix + key} is tied to {piece.theirs} but its values differ; add a separate rule for it"
                )


def _finish(directory: NewDirectory, layout: Layout, files: LocalFiles) -> None:
    """Sync the files, write the index, and commit."""
    for file in layout.headers:
        fd = files.reopen(directory.temporary / file)
        try:
            files.fsync(fd)
        finally:
            files.close(fd)
    content = layout.encode_index()
    if content is not None:
        write_file(files, directory.temporary / INDEX, content)
    directory.commit()
