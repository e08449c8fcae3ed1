"""States of pieces as sharded values, which load on any layout.

Keys are `optimizer.state.<state name>.<parameter key>`, and global shapes are those of the parameter, as if one process
had saved an optimizer that was never sharded. Block-scaled state is saved decoded, in fp32, so that it loads into any
other format. `saving` has the same states by name, and loads both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from opt_checkpoint import (
    LayoutBound,
    LikeParam,
    PerMatrix,
    PerParam,
    Reduced,
    Segment,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    make_sharded_state,
)
from opt_checkpoint import StateSpec as SavedSpec
from opt_checkpoint.state import SPLIT_MARK
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.piece import OwnedPiece
from opt_distributed.saving import MAIN, STEP, decoded, is_by_part, kept_states
from opt_distributed.step.unit import Unit
from opt_kernels.works import StateKind, StateSpec

__all__ = ["Rows", "rows_of_part", "sharded_piece"]

ShardedParam = ShardedTensor | ShardedTensorFactory
Rows = Mapping[int, tuple[Segment, ...]]
"""The rows of a fused matrix that parts of it have, as these are saved, by the first row of a part in the matrix."""


def rows_of_part(piece: OwnedPiece, param: ShardedParam) -> Rows:
    """The rows of a piece that is a part of a matrix, if it is saved in several runs of rows."""
    if piece.stage is None or not isinstance(param, ShardedTensorFactory) or piece.param.dim() != 2:
        return {}
    segments = param.declared().segments
    return {piece.stage.part(piece.id).offset[0]: segments} if segments else {}


def sharded_piece(
    unit: Unit, piece: OwnedPiece, param: ShardedParam, rows: Rows, *, always_main: bool = False
) -> dict[str, ShardedBase]:
    """Describe the tensors of a piece, which share the live memory if possible, under the key of `param`.

    `rows` are those of all parts of its matrix. With `always_main`, main values are described even if they are the
    parameter itself.
    """
    if piece.replica is not None:  # by convention (pipeline, tensor, data); a shard has no replicas in its instance
        id = param.replica_id
        at = piece.replica
        param = replace(param, replica_id=(*id[:-1], at) if isinstance(id, tuple) else at)
    whole = None if piece.stage is None else _whole(param, unit, piece, piece.stage, rows)
    part = param
    if not piece.is_whole:
        if isinstance(param, ShardedTensor):
            part = param.flat(None, piece.of_param.start, piece.of_param.stop)
        else:
            part = replace(param, data=None, flattened_range=piece.of_param)
    described = {STEP: make_sharded_state(part, piece.step, STEP, PerParam())}
    for spec in (*kept_states(unit, piece), *unit.averages.specs):
        key = spec.name
        if is_by_part(spec, piece):
            key += SPLIT_MARK + piece.matrix.split_name
        of = part
        saved_spec = _saved_spec(spec, piece)
        if spec.whole and piece.stage is not None:
            if whole is not None:
                of = whole
            else:  # can only be loaded if the same number of parts makes up the matrix
                saved_spec = LayoutBound(fingerprint=f"parts{piece.stage.layout.num_ranks}")
        described[spec.name] = make_sharded_state(of, decoded(unit, piece, spec), key, saved_spec)
    if always_main or piece.main.kept:
        described[MAIN] = make_sharded_state(part, piece.main.value(), MAIN, LikeParam())
    # Tensors of an fp8 parameter itself: once for what this rank stores of it. Each tensor-parallel rank scales its
    # own part, so that scales are meaningless for a part of another size.
    of_part = LayoutBound(fingerprint=f"fp8tp{piece.part.rpartition('of')[2]}") if piece.part else PerParam()
    stored = param if piece.of_param.start == 0 else replace(param, replica_id=1)
    for name, tensor in piece.main.extra().items():
        # A copy, because loading the parameter itself quantises it, which writes this memory.
        described[name] = make_sharded_state(stored, tensor.clone(), name, of_part)
    for name in (*unit.averages.names, *piece.main.extra()):  # checkpoints of runs without averages or fp8 parameters
        may_lack = described[name]
        assert isinstance(may_lack, ShardedParam)
        may_lack.optional = True
    return described


def _whole(param: ShardedParam, unit: Unit, piece: OwnedPiece, stage: ComputeStage, rows: Rows) -> ShardedParam | None:
    """The description of the block that is one matrix to the rule and contains the piece.

    None if the parts do not make up the parameter as it is saved.
    """
    block = stage.whole(piece.id)
    if isinstance(param, ShardedTensorFactory):
        start = block.offset[0]
        segments = []
        for first, of_part in sorted(rows.items()):
            shift = first - start
            for segment in of_part if 0 <= shift < block.shape[0] else ():
                offset = (*segment.global_offset[:-1], block.offset[-1])
                start_here = segment.row_start + shift
                stop_here = segment.row_stop + shift
                segments.append(replace(segment, row_start=start_here, row_stop=stop_here, global_offset=offset))
        # SOAP's moments are in bases of the matrix with the rows in this order, so that no other order may load them.
        has_bases = any(spec.kind in (StateKind.MATRIX, StateKind.SHAPED) for spec in unit.rule.state_specs)
        if not segments or (has_bases and not _are_in_order(segments, len(block.shape))):
            return None
        replica_id = param.replica_id if stage.computes(piece.id) else 1
        shape = block.shape
        return ShardedTensorFactory(param.key, None, segments=tuple(segments), local_shape=shape, replica_id=replica_id)
    prepended = param.prepend_axis_num
    if param.global_shape[prepended:] != stage.matrices[piece.id].shape:
        return None
    offset = (*param.global_offset[:prepended], *block.offset)
    whole = replace(param, data=None, local_shape=block.shape, global_offset=offset, axis_fragmentations=None)
    if not stage.computes(piece.id):
        whole = replace(whole, replica_id=1, may_repeat=False)
    return whole


def _are_in_order(segments: Sequence[Segment], dim: int) -> bool:
    """Whether the segments are one tensor of `dim` axes, with its rows in order."""
    axis = len(segments[0].global_shape) - dim
    starts = {segment.global_offset[axis] - segment.row_start for segment in segments}
    return len(starts) == 1 and not any(segment.suffix for segment in segments)


def _saved_spec(spec: StateSpec, piece: OwnedPiece) -> SavedSpec:
    """How the checkpoint relates a state to the parameter."""
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
