"""Saves sharded models as safetensors files, as Hugging Face stores them, and loads such files into shards.

Nothing is gathered. On export, every rank writes the boxes that it holds to their final positions in files that all
ranks share; one rename is the commit. On import, an index under our names describes the files, and its chunks are boxes
of their arrays: a load plans and checks them as it does a checkpoint, and each rank reads only the bytes of its shards.
"""

from __future__ import annotations

import fnmatch
import itertools
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.boxes import Box, position_of, row_major_strides, split_rows, view_of
from opt_checkpoint.convert.name_maps import Described, Piece, Pieces, Tensors, to_ours, to_theirs
from opt_checkpoint.convert.name_rules import SAME_NAMES, NamePattern, NameRule, fingerprint, names_of
from opt_checkpoint.convert.reading import read_mapped, scratch_folder
from opt_checkpoint.convert.safetensors_files import DEFAULT_SHARD_BYTES, Array, find_arrays, layout_of
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.names import StrictHandling
from opt_checkpoint.dcp.saving import Assigned, Held, Taken
from opt_checkpoint.disk.archives import contiguous
from opt_checkpoint.disk.averages import warn_of_look_ahead, with_averages
from opt_checkpoint.disk.checkpoint import Opened, read_common, read_index
from opt_checkpoint.disk.data_file import bytes_view
from opt_checkpoint.disk.index import (
    COMMON_KEY,
    COPIES,
    PADDED,
    ByteRange,
    CheckpointIndex,
    Kind,
    StoredChunk,
    StoredFile,
    StoredTensor,
)
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.run.ranks import from_rank_0, ranks_of, same_everywhere, through_rank_0
from opt_checkpoint.run.save_load import LoadReport, PathLike, carry_out_load, carry_out_save, save
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import LocalNonpersistentObject, ShardedStateDict, ShardedTensor, path_text
from opt_checkpoint.state.tensors import dtype_from_name, sharded_like
from opt_checkpoint.state.tree import leaves
from opt_checkpoint.store import AnyPath
from opt_checkpoint.store.directory import Directory
from opt_checkpoint.store.paths import local_path

_SAVED = (Tensor, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject, dict)
_FOLDER = "a folder of safetensors files"  # in messages
_COPY_BYTES = 64 << 20  # of a tensor that is converted, transposed, or on a device, at a time


def save_safetensors(
    state: ShardedStateDict,
    folder: PathLike,
    *,
    names: Sequence[NameRule] = SAME_NAMES,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Export a sharded model as safetensors files; all ranks call this together.

    Every element is written once, by a rank that holds it, to its position in a file that all ranks share. Names,
    shapes and coverage are checked on all ranks before anything is written. The folder appears by one rename, or not at
    all.

    Args:
        state: tensors only, as `sharded_model(model)`, or sharded tensors whose keys are the names on our side.
        folder: the target, which must not exist, on a file system that all ranks share. The same on all ranks. A single
            file is named `model.safetensors`; several are numbered, with a `model.safetensors.index.json`.
        names: rules that map our names to those of the files; equal names by default. The same on all ranks.
        dtype: what floating-point tensors are converted to; None to keep each tensor's dtype.
        shard_bytes: maximum size of a file, unless one tensor is larger.
        process_group: the ranks that hold the model.

    Raises:
        CheckpointExistsError: something is at `folder`.
        CheckpointKeyError: a tensor has no rule or several, or two would become one.
        CheckpointMismatchError: shapes do not fit a rule, or a tied tensor has other values than its partner.
        CheckpointingException: the state holds more than tensors, or shards with holes or overlaps; or ranks were given
            different arguments.
        CheckpointFailedError: a rank failed for another reason.
    """
    ranks = ranks_of(process_group)
    what = f"exporting to {folder}"

    def new_writer() -> _Writer:
        if others := [path_text(path) for path, value in leaves(state) if not isinstance(value, _SAVED)]:
            raise CheckpointValueError(f"safetensors files hold tensors only; leave out {', '.join(others[:8])}")
        return _Writer(local_path(folder, _FOLDER), names, dtype, shard_bytes)

    def finish(writer: _Writer, held: Held) -> None:
        through_rank_0(ranks, lambda: writer.check_tied(held), lambda _: writer.commit(), what)

    arguments = {"names": fingerprint(names), "dtype": dtype, "shard_bytes": shard_bytes}
    carry_out_save(ranks, state, new_writer, what, arguments, then=finish)


class _WriteTo(NamedTuple):
    """The message of rank 0 to a rank.

    Args:
        folder: the temporary directory, in the parent of the target.
        pieces: where the tensors that the rank writes go, by our key.
        tied: the same for all tied tensors, which are compared rather than written.
        arrays: the arrays of these pieces, by their name in the files.
    """

    folder: str
    pieces: Pieces
    tied: Pieces
    arrays: dict[str, Array]


@dataclass
class _Writer:
    """Writes one export. Methods are those of `Writer`, arguments those of `save_safetensors`."""

    path: Path
    names: Sequence[NameRule]
    dtype: torch.dtype | None
    shard_bytes: int

    def __post_init__(self) -> None:
        self._store = Directory(self.path.parent)
        self._folder = self._store.folder(self.path.name, uuid.uuid4().hex)  # rank 0's counts

    def begin(self, assigned: Assigned) -> list[_WriteTo]:
        """Assign every array to a file, and create the files with their headers; on rank 0."""
        tensors = assigned.plan.tensors
        parts = assigned.plan.parts
        described: Tensors = {}
        for key, first in zip(tensors.keys, tensors.first_of_key.tolist(), strict=True):
            dtype = dtype_from_name(tensors.dtype_names[tensors.dtype[first]])
            described[key] = Described(tensors.shape_of(first), dtype)
        mapped = to_theirs(self.names, described)
        self._layout = layout_of(mapped.theirs, dtype=self.dtype, shard_bytes=self.shard_bytes)
        self._store.begin(self.path.name, self._folder)
        self._store.write_small(self._folder, self._layout.headers)
        keys_by_rank: list[dict[str, None]] = [{} for _ in range(tensors.ranks)]
        for rank, key in zip(parts.rank.tolist(), tensors.box_key[parts.box].tolist(), strict=True):
            keys_by_rank[rank][tensors.keys[key]] = None
        messages = []
        for keys in keys_by_rank:
            pieces = {key: mapped.pieces[key] for key in keys if key in mapped.pieces}
            wanted = {piece.theirs for group in (*pieces.values(), *mapped.tied.values()) for piece in group}
            arrays = {name: self._layout.arrays[name] for name in wanted}
            messages.append(_WriteTo(self._folder, pieces, mapped.tied, arrays))
        return messages

    def write(self, to: _WriteTo, taken: Taken) -> int:
        """Write this rank's boxes of all arrays and sync them; returns the number of bytes."""
        self._to = to
        by_file: dict[str, list[tuple[Tensor, Box, Piece]]] = defaultdict(list)
        for key, box, values in taken.parts():
            for piece in to.pieces.get(key, ()):
                if piece.box.overlap(box) is not None:
                    by_file[to.arrays[piece.theirs].file].append((values, box, piece))
        nbytes = 0
        for file, boxes in by_file.items():
            with self._store.shared_file(f"{to.folder}/{file}") as write:
                for values, box, piece in boxes:
                    for position, raw in _runs(values, box, piece, to.arrays[piece.theirs]):
                        write(raw, position)
                        nbytes += len(raw)
        return nbytes

    def finish(self, assigned: Assigned, written: Sequence[int]) -> None:
        """Write the index after all arrays, on rank 0."""
        if sum(written) != self._layout.nbytes:
            raise CheckpointValueError(f"{sum(written)} bytes were written, {self._layout.nbytes} were planned")
        self._store.write_small(self._folder, self._layout.encode_index())

    def check_tied(self, held: Held) -> None:
        """Compare this rank's tied tensors with the written values of the tensors that they are tied to.

        Raises:
            CheckpointMismatchError: the values differ.
        """
        for shard, boxes in held.shards:
            for piece, flat_box in itertools.product(self._to.tied.get(shard.key, ()), boxes):
                array = self._to.arrays[piece.theirs]
                for position, raw in _runs(view_of(shard, flat_box, flat_box.box), flat_box.box, piece, array):
                    stored = memoryview(bytearray(len(raw)))
                    self._store.read_into(f"{self._to.folder}/{array.file}", position, stored)
                    if stored != raw:
                        raise CheckpointMismatchError(
                            f"{shard.key} is tied to {piece.theirs} but its values differ; add a separate rule for it"
                        )

    def commit(self) -> None:
        """Rename the folder to its final name, on rank 0, after all ranks have finished."""
        self._store.commit(self.path.name, self._folder)

    def abandon(self) -> None:
        self._store.abandon(self._folder)


def _runs(values: Tensor, box: Box, piece: Piece, array: Array) -> Iterator[tuple[int, memoryview]]:
    """Contiguous runs of bytes of an array, each with its position in the file; a few megabytes are converted at once.

    Args:
        values: those of `box`, which may overlap the piece.
        box: the box of our tensor.
        piece: which part of our tensor is in the array, and where.
        array: the array.
    """
    shared = piece.box.overlap(box)
    if shared is None:
        return
    for part in split_rows(shared, -(-shared.numel * values.element_size() // _COPY_BYTES)):
        converted = box.part_of(values, part).to(array.dtype)
        region = piece.within.region(part.within(piece.box), part.sizes)
        raw = bytes_view(contiguous(piece.within.as_stored(converted)))
        strides = tuple(n * array.dtype.itemsize for n in row_major_strides(region.chunk))
        # The region is complete along all axes after `axis`, so its part at one index of the axes before is one run.
        cut = (d for d, (size, whole) in enumerate(zip(region.sizes, region.chunk)) if size != whole)
        axis = max(cut, default=0)
        first = array.start + position_of(region.offsets, strides)
        indices = list(itertools.product(*map(range, region.sizes[:axis])))
        nbytes = len(raw) // len(indices)
        for number, index in enumerate(indices):
            yield first + position_of(index, strides), raw[number * nbytes :][:nbytes]


def load_safetensors(
    state: ShardedStateDict,
    folder: PathLike,
    *,
    names: Sequence[NameRule] = SAME_NAMES,
    process_group: dist.ProcessGroup | None = None,
    strict: str | StrictHandling = StrictHandling.RAISE_ALL,
    dtype: Literal["exact", "cast"] = "exact",
    threads: int = 4,
) -> LoadReport:
    """Load the tensors of a folder of safetensors files into a state; all ranks call this together.

    Each rank reads the bytes of its own shards, and no others. Names, shapes, dtypes and coverage are checked on all
    ranks before any memory is written. The files have no checksums.

    Args:
        state: what to load, as for `opt_checkpoint.load`: `sharded_model(model)`, or sharded tensors whose keys are
            the names on our side of `names`.
        folder: a folder with `model.safetensors.index.json` and its files, or with one safetensors file; files may be
            symbolic links. The same on all ranks.
        names: rules that map our names to those of the files; equal names by default. The same on all ranks.
        process_group: the ranks that load.
        strict: what to do about tensors on one side only, as for `opt_checkpoint.load`; all are an error by default.
        dtype: whether a conversion that rounds is an error or allowed, as for `opt_checkpoint.load`.
        threads: number of concurrent reads of a rank.

    Returns:
        The loaded tensors, and those that were not loaded, by our names.

    Raises:
        CheckpointNotFoundError: the folder has no safetensors files.
        CheckpointCorruptError: a file is damaged, or its header claims what cannot be.
        CheckpointKeyError: tensors are on one side only, have no rule, or several.
        CheckpointMismatchError: shapes or dtypes do not fit.
        CheckpointingException: ranks were given different arguments.
    """
    ranks = ranks_of(process_group)
    given = Path(str(folder)).absolute()
    same_everywhere(ranks, "loading", folder=given, names=fingerprint(names), strict=strict, dtype=dtype)
    source = local_path(folder, _FOLDER)
    index = from_rank_0(ranks, lambda: _index_of(source, names), f"loading {source}")
    planner = ShardedLoadPlanner(state, Opened(index=index, common={}), strict=strict, dtype=dtype)
    return carry_out_load(ranks, planner, threads=threads, verify="none")


def _index_of(folder: Path, names: Sequence[NameRule]) -> CheckpointIndex:
    """The index of a folder of safetensors files, under our names; raises like `load_safetensors`."""
    found = find_arrays(folder)
    mapped = to_ours(names, {name: Described(array.shape, array.dtype) for name, array in found.items()})
    tensors = {}
    for key, described in mapped.ours.items():
        chunks = []
        pieces = mapped.tied if key in mapped.tied else mapped.pieces
        for piece in pieces[key]:
            array = found[piece.theirs]
            place = ByteRange(file=array.file, start=array.start, nbytes=array.nbytes)
            chunks.append(StoredChunk(box=piece.box, place=place, within=piece.within))
        tensors[key] = StoredTensor(shape=described.shape, dtype=described.dtype, chunks=tuple(chunks))
    files = {file: StoredFile(size=(folder / file).stat().st_size) for file in {array.file for array in found.values()}}
    padded = [NamePattern(name) for rule in names if rule.rows is not None for name in names_of(rule.ours)]
    is_padded = lambda key: any(pattern.match(key) is not None for pattern in padded)
    copies = {COPIES: frozenset(mapped.tied), PADDED: frozenset(filter(is_padded, tensors))}
    return CheckpointIndex(path=folder, kind=Kind.SAFETENSORS, tensors=tensors, objects={}, files=files, details=copies)


def safetensors_to_checkpoint(
    folder: PathLike, path: AnyPath, *, names: Sequence[NameRule] = SAME_NAMES, prefix: str = ""
) -> None:
    """Convert a folder of safetensors files to a checkpoint, in one process, through memory-mapped files.

    Args:
        folder: as for `load_safetensors`.
        path: the checkpoint to write: a directory, or a place in an object store.
        names: rules that map our names to those of the files.
        prefix: prepended to our names, for example `model.` for `load({"model": sharded_model(model)}, path)`.

    Raises:
        CheckpointingException: as `load_safetensors` and `save`.
    """
    index = _index_of(local_path(folder, _FOLDER), names)
    with scratch_folder(path) as scratch:
        wanted = {key: stored for key, stored in index.tensors.items() if key not in index.details[COPIES]}
        tensors = read_mapped(index, wanted, scratch)
        save({"tensors": [sharded_like(prefix + key, tensor) for key, tensor in tensors.items()]}, path)


def checkpoint_to_safetensors(
    path: AnyPath,
    folder: PathLike,
    *,
    names: Sequence[NameRule] = SAME_NAMES,
    select: str = "*",
    prefix: str = "",
    dtype: torch.dtype | None = None,
    weights: str | None = None,
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
        weights: the state of an optimizer, one of `WEIGHT_STATES`, that replaces each weight of which one was saved:
            fp32 unless `dtype` is given. Only the model of these weights is exported then.
        shard_bytes: maximum size of a file, unless one tensor is larger.

    Returns:
        The files.

    Raises:
        CheckpointingException: as `save_safetensors` and `load`, and `with_averages`.
    """
    index = read_index(path)
    if weights is not None:
        index = with_averages(index, weights, prefix)
    else:
        warn_of_look_ahead(index)
    target = local_path(folder, _FOLDER)
    stored = {k: t for k, t in index.tensors.items() if fnmatch.fnmatchcase(k, select) and k.startswith(prefix)}
    if not stored:
        raise CheckpointValueError(f"{path} holds no tensor that matches {select!r} and begins with {prefix!r}")
    to_theirs(names, {key.removeprefix(prefix): Described(t.shape, t.dtype) for key, t in stored.items()})  # may raise
    with scratch_folder(target) as scratch:
        tensors = read_mapped(index, stored, scratch)
        state = {key: sharded_like(key.removeprefix(prefix), tensor) for key, tensor in tensors.items()}
        save_safetensors(state, target, names=names, dtype=dtype, shard_bytes=shard_bytes)
    return sorted(target.iterdir())


def left_out(path: AnyPath, *, select: str, prefix: str) -> list[str]:
    """Return what `checkpoint_to_safetensors` with these arguments leaves out because it is not a tensor: the paths of
    plain values, and the keys of objects.

    A list of tensors is not reported. If the plain values cannot be loaded, the key they are stored under is.
    """
    index = read_index(path)
    names = set(index.objects)
    with suppress(CheckpointCorruptError):
        for leaf in leaves(read_common(index)):
            # A list of tensors, which are stored under their own keys, has None in their places.
            if leaf.path and not (isinstance(leaf.value, list) and {*map(type, leaf.value)} == {type(None)}):
                names.add(path_text(leaf.path))
        names.discard(COMMON_KEY)
    return sorted(name for name in names if fnmatch.fnmatchcase(name, select) and name.startswith(prefix))
