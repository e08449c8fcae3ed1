"""Loads models from safetensors files, as Hugging Face stores them, into shards.

An index under our names describes the files; its chunks are boxes of their arrays. A load therefore plans and checks
them as it does a checkpoint, and each rank reads only the bytes of its shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from opt_checkpoint.convert.name_boxes import Described, to_ours
from opt_checkpoint.convert.name_rules import SAME_NAMES, NameRule, fingerprint
from opt_checkpoint.convert.safetensors_files import FOLDER, INDEX, SINGLE, PlacedArray, read_header
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.dcp.strictness import StrictHandling
from opt_checkpoint.disk.detect import Opened
from opt_checkpoint.disk.index import (
    COPIES,
    ByteRange,
    CheckpointIndex,
    Kind,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_file_name,
)
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointNotFoundError
from opt_checkpoint.run.ranks import from_first, ranks_of, same_everywhere
from opt_checkpoint.run.save_load import LoadReport, PathLike, carry_out_load
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.store import store_at
from opt_checkpoint.store.paths import local_path


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
    ranks, rules = ranks_of(process_group), fingerprint(names)
    given = Path(str(folder)).absolute()
    same_everywhere(ranks, "loading", folder=given, names=rules, strict=strict, dtype=dtype)
    source = local_path(folder, FOLDER)
    index = from_first(ranks, lambda: safetensors_index(source, names), f"loading {source}")
    opened = Opened(index=index, common={})
    planner = ShardedLoadPlanner(state, opened, strict=strict, dtype=dtype, aliases={})
    reader = CheckpointReader(index, threads=threads, check="never")
    return carry_out_load(ranks, planner, reader)


def safetensors_index(folder: Path, names: Sequence[NameRule] = SAME_NAMES) -> CheckpointIndex:
    """The index of a folder of safetensors files, under our names.

    Raises:
        CheckpointNotFoundError: the folder has no safetensors files.
        CheckpointCorruptError: one is damaged.
        CheckpointKeyError: a tensor has no rule, or several, or part of a tensor of ours is missing.
        CheckpointMismatchError: shapes or dtypes do not fit a rule.
    """
    found = find_arrays(folder)
    mapped = to_ours(names, {name: Described(own.array.shape, own.array.dtype) for name, own in found.items()})
    tensors = {}
    for key, described in mapped.ours.items():
        chunks = []
        for piece in (mapped.tied if key in mapped.tied else mapped.pieces)[key]:
            file, array = found[piece.theirs]
            place = ByteRange(file=file, start=array.start, nbytes=array.nbytes)
            chunks.append(StoredChunk(box=piece.box, place=place, within=piece.within))
        tensors[key] = StoredTensor(shape=described.shape, dtype=described.dtype, chunks=tuple(chunks))
    files = {file: StoredFile(size=(folder / file).stat().st_size) for file in {own.file for own in found.values()}}
    details = {COPIES: frozenset(mapped.tied)}
    return CheckpointIndex(
        path=folder, kind=Kind.SAFETENSORS, tensors=tensors, objects={}, files=files, details=details
    )


def find_arrays(folder: Path) -> dict[str, PlacedArray]:
    """The arrays of the files in a folder; raises like `safetensors_index`."""
    listed = _weight_map(folder) if (folder / INDEX).exists() else None
    files = sorted(set(listed.values())) if listed is not None else [_only_file(folder)]
    found: dict[str, PlacedArray] = {}
    for file in files:
        try:
            arrays = read_header(folder / file)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{folder / file} is missing; {INDEX} names it") from None
        for name, array in arrays.items():
            if name in found:
                raise CheckpointCorruptError(f"{name} is in {found[name].file} and in {file} of {folder}")
            found[name] = PlacedArray(file, array)
    if listed is not None:
        _check_listed(folder, listed, found)
    return found


def _check_listed(folder: Path, listed: Mapping[str, str], found: Mapping[str, PlacedArray]) -> None:
    for name in sorted(listed.keys() | found.keys()):
        here = found[name].file if name in found else "no file"
        if listed.get(name) != here:
            raise CheckpointCorruptError(
                f"{name} is in {here} of {folder}, and {INDEX} says in {listed.get(name, 'no file')}"
            )


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of every tensor, by the index."""
    try:
        content: Any = json.loads(store_at(folder).read(INDEX, follow=True))
        weight_map = content["weight_map"]
        names = [str(name) for name in {**weight_map}.values()]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointCorruptError(f"{folder / INDEX} is not an index of safetensors files: {error!r:.200}") from None
    for name in set(names):
        check_file_name(name)
    return dict(zip(weight_map, names))


def _only_file(folder: Path) -> str:
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} does not exist, or is not a directory")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in files or len(files) == 1:
        return SINGLE if SINGLE in files else files[0]
    several = f"{len(files)} safetensors files and no {INDEX}, which would say which belong together"
    raise CheckpointNotFoundError(f"{folder} has {several if files else 'no safetensors file'}")
