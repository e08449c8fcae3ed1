"""`OwnedPiece`: the part of one parameter that a rank updates, with its main values, state and count of updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.pieces.dtensor import local
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.mains import Main
from opt_distributed.pieces.sources import Source
from opt_kernels.works import MatrixSpec
from opt_paramgroups import ParamId

Groups = Sequence[Mapping[str, Any]]
"""`param_groups`."""


class StepCount:
    """The number of updates made so far to pieces that are always updated together.

    The host knows the number until a device first decides whether an update is made. From then on it is in a tensor on
    the device, always the same one, because only the device knows which steps were skipped: `int(count)` waits for it.
    """

    __slots__ = ("_next", "_stays", "known")

    def __init__(self, known: int | None = 0, on_device: Tensor | None = None):
        self.known = known  # None: only the device knows it
        self._next = on_device  # 0-d int64: the number of the next update
        self._stays = False  # whether others than `advance` count, too

    def __int__(self) -> int:
        if self.known is not None:
            return self.known
        assert self._next is not None
        number = int(self._next) - 1
        if not self._stays:  # a replay counts without the host, so the number must not be cached
            self.known = number
        return number

    def stay_on(self, device: torch.device) -> None:
        """Keep the number on `device` only, from now on. Replays of a graph may then count without the host."""
        if not self._stays:
            self._on(device)
            self.known, self._stays = None, True

    def copy(self) -> "StepCount":
        """Return a separate count with the same number, for pieces that are updated separately from now on."""
        with torch.inference_mode(False):
            return StepCount(self.known, None if self._next is None else self._next.clone())

    def next(self) -> int | Tensor:
        """The number of the next update, counted from 1. A tensor is always the same one, and `advance` writes it."""
        if self._next is not None:
            return self._next
        assert self.known is not None
        return self.known + 1

    def advance(self, skip: Tensor | None) -> None:
        """Count an update, unless `skip` (a 0-d bool on the device) is true; None stands for false."""
        if skip is not None:
            self._on(skip.device).add_(~skip)
            self.known = None
            return
        if self._next is not None:
            self._next.add_(1)
        if self.known is not None:
            self.known += 1

    def _on(self, device: torch.device) -> Tensor:
        """The tensor of the next number, created on `device` if there is none."""
        if self._next is None:
            assert self.known is not None
            with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
                self._next = torch.full((), self.known + 1, dtype=torch.int64, device=device)
        return self._next


@dataclass(slots=True, kw_only=True)
class OwnedPiece:
    """The part of one parameter that this rank owns: gradient source, main values and state."""

    id: ParamId
    param: nn.Parameter
    of_param: slice  # flat elements of the (local) parameter
    group: int  # index in `param_groups`
    source: Source  # of its gradient
    main: Main
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
    def step(self) -> int:
        """The number of updates made so far. On an accelerator the host waits for it."""
        return int(self.count)

    @step.setter
    def step(self, value: int) -> None:
        self.count = StepCount(value)

    @property
    def is_whole(self) -> bool:
        """Whether it is everything that this rank stores of the parameter."""
        return self.of_param == slice(0, local(self.param).numel())


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


class Update(NamedTuple):
    """What a unit is updated with."""

    ready: Ready
    groups: Groups
    scale_of_slot: Sequence[float | Tensor]  # by which the gradients of each norm slot are multiplied
    skip: Tensor | None = None  # 0-d bool on the device; if it is set, nothing is written or counted
