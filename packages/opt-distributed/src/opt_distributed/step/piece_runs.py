"""Runs of pieces that are updated with the same hyper-parameters and gradient scale, stored by columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from opt_distributed.pieces.coded_main import CodedMain
from opt_distributed.pieces.counts import StepCount
from opt_distributed.pieces.piece import OwnedPiece
from opt_distributed.pieces.quantized import QuantizedMain
from opt_distributed.pieces.sources import Source
from opt_kernels.rules import Rule
from opt_kernels.works import Works

DECODED_NUMEL = 1 << 25
"""Elements of coded mains (128 MiB decoded) after which the piece that exceeds them ends a call of the rule."""


class RunKey(NamedTuple):
    """Pieces with equal keys share a row of hyper-parameters and the scale of their gradients."""

    source: Source
    norm_slot: int
    group: int
    step: int | StepCount  # updates made so far, or the count itself if only the device knows the number
    call: int = 0  # number of the call in which coded mains are decoded


@dataclass(slots=True, kw_only=True)
class PieceRun:
    """Pieces with one key, in order. Stored by columns, so that a step creates no object for each piece."""

    key: RunKey
    indices: Sequence[int]  # among the pieces that were ready
    pieces: Sequence[OwnedPiece]
    rule: Rule  # that updates them
    count: StepCount = field(init=False)  # shared by its pieces from now on
    opened: Sequence[CodedMain | QuantizedMain] = ()  # mains that must be stored after an update
    columns: Works = field(init=False)  # without gradients

    def __post_init__(self) -> None:
        self.count = self.pieces[0].count.copy()
        for piece in self.pieces:
            piece.count = self.count
        mains = [piece.moved for piece in self.pieces]
        self.opened = [main for main in mains if isinstance(main, CodedMain | QuantizedMain)]
        self.columns = Works(
            (),
            mains=_column([main.main for main in mains]),
            states=[piece.state for piece in self.pieces],
            outs=_column([main.out for main in mains]),
            remainders=_column([main.remainder for main in mains]),
            matrices=[piece.matrix for piece in self.pieces],
        )

    def works(self, grads: Sequence[Tensor]) -> Works:
        """The works of the run, given the gradients of all ready pieces. Opens mains until `close_`."""
        of = self.columns
        return Works(
            [grads[index] for index in self.indices],
            mains=[main.open_() for main in self.opened] if self.opened else of.mains,
            states=of.states,
            outs=of.outs,
            remainders=of.remainders,
            matrices=of.matrices,
        )

    def close_(self, *, skip: Tensor | None) -> None:
        """Store the mains that `works` opened."""
        for main in self.opened:
            main.close_(skip=skip)

    @property
    def is_decoded(self) -> bool:
        """Whether its mains use additional memory while they are open."""
        return any(isinstance(main, CodedMain) for main in self.opened)


def _column(values: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The values, or None if all are None. Pieces of one source and rule have the same kind of main values."""
    found = [value for value in values if value is not None]
    assert len(found) in (0, len(values))
    return found or None


def runs_of(pieces: Sequence[OwnedPiece], rule: Rule) -> list[PieceRun]:
    """Group pieces by key, in order: the same groups on every rank with the same pieces."""
    found: dict[RunKey, list[int]] = {}
    num_decoded = 0
    for index, piece in enumerate(pieces):
        step = piece.count if piece.count.known is None else piece.count.known
        num_decoded += piece.main.shape.numel() if isinstance(piece.moved, CodedMain) else 0
        call = num_decoded // DECODED_NUMEL
        found.setdefault(RunKey(piece.source, piece.norm_slot, piece.group, step, call), []).append(index)
    return [
        PieceRun(key=key, indices=at, pieces=[pieces[index] for index in at], rule=rule) for key, at in found.items()
    ]
