"""`OwnedPiece`: the part of one parameter that a rank owns, with its main values and state; those that are `Ready`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from opt_distributed.pieces.coded_main import CodedMain
from opt_distributed.pieces.counts import StepCount
from opt_distributed.pieces.dtensor import local_numel
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.mains import Main
from opt_distributed.pieces.offload import HostMain
from opt_distributed.pieces.quantized import QuantizedMain
from opt_distributed.pieces.sources import Source
from opt_kernels.works import MatrixSpec
from opt_paramgroups import ParamId


@dataclass(slots=True, kw_only=True)
class OwnedPiece:
    """The part of one parameter that this rank owns: gradient source, main values and state."""

    id: ParamId
    param: nn.Parameter
    of_param: slice  # flat elements of the (local) parameter
    group: int  # index in `param_groups`
    source: Source  # of its gradient
    main: Main | CodedMain | HostMain | QuantizedMain
    state: dict[str, Tensor]
    norm_slot: int = 0  # the gradient norm of the step to which it contributes
    counted: bool = True  # False if another rank counts these elements in norms and zeros
    inspected: bool = True  # whether this rank checks the gradient for infinities and NaNs; true if it counts
    matrix: MatrixSpec = field(default_factory=MatrixSpec)
    replica: int | None = None  # its replica number, if data-parallel ranks do not hold the same parts
    part: str = ""  # names this rank's part of a plain parameter that is cut over tensor-parallel ranks
    stage: ComputeStage | None = None  # gathers it with the other ranks' parts of the same matrix
    count: StepCount = field(default_factory=StepCount)  # of updates; shared with pieces that are updated with it

    @property
    def moved(self) -> Main | CodedMain | QuantizedMain:
        """The main values that the rule updates: those in host memory if the unit is there."""
        return self.main.moved if isinstance(self.main, HostMain) else self.main

    @property
    def step(self) -> int:
        """The number of updates made so far. On an accelerator the host waits for it."""
        return int(self.count)

    @step.setter
    def step(self, value: int) -> None:
        self.count = StepCount(value)

    @property
    def is_whole(self) -> bool:
        """Whether it is everything that this rank stores of the parameter."""
        return self.of_param == slice(0, local_numel(self.param))


class Kind(NamedTuple):
    """What the statistics must know of a piece; see `OwnedPiece`."""

    source: Source
    norm_slot: int
    counted: bool
    inspected: bool


Kinds = Mapping[Kind, Sequence[int]]
"""Pieces by kind, as places among them."""


def kinds_of(pieces: Sequence[OwnedPiece]) -> Kinds:
    """The kinds of these pieces."""
    found: dict[Kind, list[int]] = {}
    for place, piece in enumerate(pieces):
        kind = Kind(piece.source, piece.norm_slot, piece.counted, piece.inspected)
        found.setdefault(kind, []).append(place)
    return found


class Ready(NamedTuple):
    """The pieces of a unit that have gradients, and these gradients, in the same order.

    Two lists instead of pairs: with thousands of small parameters, creating objects takes most of a step's time.
    """

    pieces: Sequence[OwnedPiece]
    grads: Sequence[Tensor]
    kinds: Kinds | None = None  # of the pieces, if they are known

    def without(self, unused: Collection[ParamId]) -> "Ready":
        """Drop the pieces of these parameters."""
        kept = [(p, g) for p, g in zip(self.pieces, self.grads, strict=True) if p.id not in unused]
        return Ready([p for p, _ in kept], [g for _, g in kept])
