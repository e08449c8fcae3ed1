"""State as it is saved: block-scaled codes are decoded to fp32, and encoded again when loaded."""

from collections.abc import Iterator

import torch
from torch import Tensor

from opt_distributed.pieces.codes import encode_again_, values_of
from opt_distributed.pieces.dtensor import is_dtensor
from opt_distributed.pieces.piece import OwnedPiece
from opt_distributed.step.unit import Unit
from opt_kernels.backends import in_memory_order
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.works import StateKind
from opt_kernels.works import StateSpec as Declared


def kept_states(unit: Unit, piece: OwnedPiece) -> Iterator[Declared]:
    """The states that a rule keeps for a piece on this rank, except block scales: values are saved decoded."""
    for spec in unit.rule.state_specs:
        if spec.kind is not StateKind.BLOCK_SCALES and spec.name in piece.state:
            yield spec


def saves_values(piece: OwnedPiece) -> bool:
    """Whether a state_dict has decoded values instead of codes and scales: where another optimizer may have other
    blocks, because they are runs of a rank's part, or of memory that is not in the order of elements."""
    return is_dtensor(piece.param) or not all(state.is_contiguous() for state in piece.state.values())


def is_by_part(spec: Declared, piece: OwnedPiece) -> bool:
    """Whether a state depends on how the piece's rows are split, so that no other split may load it."""
    return spec.by_part and bool(piece.matrix.split_rows)


def _codec(unit: Unit, name: str) -> StateCodec | None:
    """The codec of a state that is stored in scaled blocks; None if its memory holds the values themselves."""
    found = unit.rule.codecs.get(name)
    return found if found is not None and found.block else None


def decoded(unit: Unit, piece: OwnedPiece, spec: Declared) -> Tensor:
    """The values of one state: its own memory, or a new fp32 tensor if it is stored as codes."""
    codec = _codec(unit, spec.name)
    codes = piece.state[spec.name]
    return codes if codec is None else values_of(codec, codes, piece.state[scale_name(spec.name)])


def store_(unit: Unit, piece: OwnedPiece, name: str, value: Tensor) -> None:
    """Write one state of `piece` from its values."""
    codec = _codec(unit, name)
    target = piece.state[name]
    if codec is None:
        target.copy_(value.view(target.shape))
    else:
        values = torch.empty_like(target, dtype=torch.float32).copy_(value.view(target.shape))
        encode_again_(codec, in_memory_order(target), piece.state[scale_name(name)], in_memory_order(values))
