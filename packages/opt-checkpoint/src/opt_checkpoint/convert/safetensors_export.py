"""Exports a sharded model as safetensors files. Every rank writes its part of every tensor to its final position.

Nothing is gathered: the shards of a rank are boxes of the exported arrays, which it writes to files that all ranks
share.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch
import torch.distributed as dist

from opt_checkpoint.convert.name_rules import SAME_NAMES, NameRule, fingerprint
from opt_checkpoint.convert.safetensors_files import DEFAULT_SHARD_BYTES, FOLDER
from opt_checkpoint.convert.safetensors_writer import Export, SafetensorsWriter
from opt_checkpoint.dcp.plan import Offer
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.ranks import ranks_of, through_first
from opt_checkpoint.run.save_load import PathLike, carry_out_save
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.state.tree import path_text
from opt_checkpoint.store.paths import local_path


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
    ranks, what = ranks_of(process_group), f"exporting to {folder}"
    export = Export(tuple(names), dtype, shard_bytes)
    planner = _TensorPlanner(state)

    def new_writer() -> SafetensorsWriter:
        target = local_path(folder, FOLDER)
        return SafetensorsWriter(target, export, save_id=uuid.uuid4().hex)

    def finish(writer: SafetensorsWriter) -> None:
        through_first(ranks, lambda: writer.check_tied(planner.flat), lambda _: writer.commit(), what)

    arguments = {"names": fingerprint(names), "dtype": dtype, "shard_bytes": shard_bytes}
    carry_out_save(ranks, planner, new_writer, what, arguments, then=finish)


class _TensorPlanner(ShardedSavePlanner):
    """Plans the save of a state that holds tensors only."""

    def describe(self, rank: int, arguments: dict[str, str]) -> Offer:
        offer = super().describe(rank, arguments)
        others = [path_text(path) for path in (*self.flat.objects, *self.flat.common)]
        if others:
            raise CheckpointValueError(
                f"safetensors files hold tensors only; leave {', '.join(others[:8])} out of the state"
            )
        return offer
