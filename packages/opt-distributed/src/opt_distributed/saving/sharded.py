"""State of a piece as sharded values under its parameter's name, which load on any layout: the entries of a checkpoint.

Keys are `optimizer.state.<state name>.<parameter key>`, and global shapes are those of the parameter, as if one process
had saved an optimizer that was never sharded. Block-scaled state is saved decoded, in fp32, so that it loads into any
other format.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint import (
    LayoutBound,
    LikeParam,
    PerMatrix,
    PerParam,
    Reduced,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    StateSpec,
    make_sharded_state,
)
from opt_checkpoint.state import SPLIT_MARK
from opt_distributed.pieces.mains import Numbers
from opt_distributed.pieces.piece import OwnedPiece
from opt_distributed.saving.piece_state import MAIN, STEP, StateError, decoded, is_by_part, kept_states, set_piece_
from opt_distributed.step.unit import Unit
from opt_kernels.works import StateKind
from opt_kernels.works import StateSpec as Declared

ShardedParam = ShardedTensor | ShardedTensorFactory


class _Saved(NamedTuple):
    """A tensor of a piece, and its relation to the parameter."""

    tensor: Tensor  # live memory if possible, else a decoded copy
    spec: StateSpec
    key: str  # the state's name in the checkpoint, which may say how rows are split
    is_whole: bool = False  # it belongs to a whole matrix that contains the piece


class SavedPiece(NamedTuple):
    """The tensors of one piece that a checkpoint reads or writes."""

    unit: Unit
    piece: OwnedPiece
    tensors: Mapping[str, _Saved]

    def sharded(self, param: ShardedParam) -> dict[str, ShardedBase]:
        """Describe each tensor by its spec, under the parameter's key."""
        piece, stage = self.piece, self.piece.stage
        param = replace(param, replica_id=_replica_of(param.replica_id, piece))
        part, whole = _narrowed(param, piece), _whole(param, piece)
        described: dict[str, ShardedBase] = {}
        for name, (tensor, spec, key, is_whole) in self.tensors.items():
            if name in piece.main.extra():  # of the fp8 parameter itself: one for all that this rank stores of it
                stored = replace(param, replica_id=param.replica_id if piece.of_param.start == 0 else 1)
                extra = make_sharded_state(stored, tensor, key, spec)
                assert isinstance(extra, ShardedTensor)
                extra.optional = True  # checkpoints of runs without fp8 parameters lack it
                described[name] = extra
            elif is_whole and whole is None:  # can only be loaded if the same number of parts makes up the matrix
                assert stage is not None
                bound = LayoutBound(fingerprint=f"parts{stage.layout.num_ranks}")
                described[name] = make_sharded_state(part, tensor, key, bound)
            else:
                described[name] = make_sharded_state(whole if is_whole and whole else part, tensor, key, spec)
        return described

    def take_(self, loaded: Mapping[str, Tensor]) -> None:
        """Set the piece from loaded tensors, by the names of `sharded`.

        Main values that were not saved are read from the parameter. If a state was not saved, all state and the count
        of steps are as before the first step.
        """
        piece, names = self.piece, [spec.name for spec in kept_states(self.unit, self.piece)]
        set_piece_(
            self.unit,
            piece,
            loaded[MAIN].view(piece.main.shape) if MAIN in loaded else None,
            {name: loaded[name] for name in names if name in loaded},
            {name: loaded[name] for name in piece.main.extra() if name in loaded},
            step=int(loaded[STEP]) if all(name in loaded for name in (*names, STEP)) else None,
            is_decoded=True,
        )


def check_loaded(unit: Unit, piece: OwnedPiece, loaded: Collection[str]) -> None:
    """Raise StateError if only a part of a piece's state is among the names `loaded`."""
    wanted = [STEP, *(spec.name for spec in kept_states(unit, piece))]
    lacking = [name for name in wanted if name not in loaded]
    only_steps = lacking == wanted[1:]  # saved by another rule, which counts steps too
    if lacking and lacking != wanted and not only_steps:
        present = ", ".join(name for name in wanted if name in loaded)
        raise StateError(
            f"state of {piece.id.name!r}: {present} was loaded and {', '.join(lacking)} was not; load all of it, with "
            "aliases for other names, or none"
        )


def read_piece(unit: Unit, piece: OwnedPiece) -> SavedPiece:
    """Collect the tensors of a piece that are saved, and their relation to the parameter."""
    tensors = {STEP: _Saved(torch.tensor(piece.step, dtype=torch.int64), PerParam(), STEP)}
    for spec in kept_states(unit, piece):
        key = spec.name + (SPLIT_MARK + piece.matrix.split_name if is_by_part(spec, piece) else "")
        is_whole = spec.whole and piece.stage is not None
        tensors[spec.name] = _Saved(decoded(unit, piece, spec), _spec(spec, piece), key, is_whole)
    if piece.main.numbers is not Numbers.DIRECT:
        tensors[MAIN] = _Saved(piece.main.value(), LikeParam(), MAIN)
    for name, tensor in piece.main.extra().items():
        # Each tensor-parallel rank scales its own part, so that scales are meaningless for a part of another size.
        of_part = LayoutBound(fingerprint=f"fp8tp{piece.part.rpartition('of')[2]}") if piece.part else PerParam()
        # A copy, because loading the parameter itself quantises it, which writes this memory.
        tensors[name] = _Saved(tensor.clone(), of_part, name)
    return SavedPiece(unit, piece, tensors)


def _narrowed(param: ShardedParam, piece: OwnedPiece) -> ShardedParam:
    """The description of the parameter, narrowed to the piece."""
    if piece.is_whole:
        return param
    if isinstance(param, ShardedTensor):
        return param.flat(None, piece.of_param.start, piece.of_param.stop)
    return replace(param, data=None, flattened_range=piece.of_param)


def _whole(param: ShardedParam, piece: OwnedPiece) -> ShardedTensor | None:
    """The description of the block that is one matrix to the rule and contains the piece.

    None if the parts do not make up the parameter as it is saved: rows of fused parameters may be saved in another
    order.
    """
    stage = piece.stage
    if stage is None or not isinstance(param, ShardedTensor):
        return None
    prepended = param.prepend_axis_num
    if param.global_shape[prepended:] != stage.shape(piece.id):
        return None
    block = stage.whole(piece.id)
    return replace(
        param,
        data=None,
        local_shape=block.shape,
        global_offset=(*param.global_offset[:prepended], *block.offset),
        axis_fragmentations=None,
        replica_id=param.replica_id if stage.counts(piece.id) else 1,
        may_repeat=param.may_repeat and stage.counts(piece.id),
    )


def _replica_of(replica_id: Any, piece: OwnedPiece) -> Any:
    """The replica id of the piece, by convention (pipeline, tensor, data).

    A shard has no data-parallel replicas in its own optimizer instance.
    """
    if piece.replica is None:
        return replica_id
    return (*replica_id[:-1], piece.replica) if isinstance(replica_id, tuple) else piece.replica


def _spec(spec: Declared, piece: OwnedPiece) -> StateSpec:
    group = piece.matrix.tensor_parallel
    match spec.kind:
        case StateKind.LIKE_PARAM:
            return LikeParam()
        case StateKind.MATRIX | StateKind.SHAPED if group is not None:
            # Factors of this rank's block are meaningless for a block of another size.
            return LayoutBound(fingerprint=f"tp{group.size}")
        case StateKind.REDUCED if not is_by_part(spec, piece):
            return Reduced(dims=spec.dims)
        case StateKind.MATRIX | StateKind.SHAPED | StateKind.REDUCED:
            return PerMatrix()
        case _:
            return PerParam()
