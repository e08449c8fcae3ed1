"""`OwnedPiece`: the part of one parameter that a rank updates, with its main values, state and count of updates.

Main values are those of `opt_kernels.params`; those in host memory are in `offload`, of fp8 parameters in `quantized`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from opt_distributed.comm.device import HostCopy
from opt_distributed.pieces.dtensor import local
from opt_distributed.pieces.exchange import ComputeStage
from opt_distributed.pieces.sources import Source
from opt_kernels.params import Count, Main
from opt_kernels.rules import Rule
from opt_kernels.rules import init_state as state_of_rule
from opt_kernels.works import MatrixSpec
from opt_paramgroups import ParamId

Group = Mapping[str, Any]
Groups = Sequence[Group]
"""`param_groups`."""


@dataclass(slots=True, kw_only=True)
class OwnedPiece:
    """The part of one parameter that this rank owns: gradient source, main values and state."""

    id: ParamId
    param: nn.Parameter
    of_param: slice  # flat elements of the (local) parameter
    group: int  # index in `param_groups`
    source: Source  # of its gradient
    main: Main
    state: dict[str, Tensor]  # of its rule, and averages of its weights
    following: set[str] = field(default_factory=set)  # averages that take the weights until a step is applied
    norm_slot: int = 0  # the gradient norm of the step to which it contributes
    counted: bool = True  # False if another rank counts these elements in norms and zeros
    inspected: bool = True  # whether this rank checks the gradient for infinities and NaNs; true if it counts
    matrix: MatrixSpec = field(default_factory=MatrixSpec)
    replica: int | None = None  # its replica number, if data-parallel ranks do not hold the same parts
    part: str = ""  # names this rank's part of a plain parameter that is cut over tensor-parallel ranks
    stage: ComputeStage | None = None  # gathers it with the other ranks' parts of the same matrix
    bucket: int = 0  # of its source, if the step sends matrices bucket by bucket; others are updated in one sweep
    count: Count = field(default_factory=Count)  # of updates; shared with pieces that are updated with it

    @property
    def step(self) -> int:
        """The number of updates made so far. On an accelerator the host waits for it."""
        return int(self.count)

    @step.setter
    def step(self, value: int) -> None:
        self.count = Count(value)

    @property
    def is_whole(self) -> bool:
        """Whether it is everything that this rank stores of the parameter."""
        return self.of_param == slice(0, local(self.param).numel())

    def follow_(self) -> None:
        """Write the present memory of a DTensor's local part from now on, and none of the memory that it has left."""
        self.main.target = local(self.param)
        self.count = self.count.copy()  # so that the unit makes its runs again


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
    on_host: HostCopy | None = None  # of `skip` and the scales, for units in host memory; queued once a step
    is_skipped: bool = False  # whether the host knows that nothing is written or counted


def init_state(
    rule: Rule, main: Tensor, *, id: ParamId, matrix: MatrixSpec, stage: ComputeStage | None
) -> dict[str, Tensor]:
    """Create the state that this rank keeps of a parameter of which it stores `main`, before the first step."""
    whole = {spec.name for spec in rule.state_specs if spec.whole} if stage is not None else set()
    if stage is None or not whole:
        return state_of_rule(rule, main, matrix, of=repr(id.name))
    state = {}
    if len(whole) < len(rule.state_specs):
        state = {name: value for name, value in rule.init_state(main).items() if name not in whole}
    if stage.computes(id):
        block = main.new_empty(stage.whole(id).shape)
        made = state_of_rule(rule, block, stage.of_whole[id], of=repr(id.name))
        state |= {name: value for name, value in made.items() if name in whole}
    return state
