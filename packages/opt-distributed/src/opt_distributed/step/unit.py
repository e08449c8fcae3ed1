"""A unit: one rule over the pieces of parameters that this rank owns."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.step.compute import ComputeStage, init_state, update_
from opt_distributed.step.dtensor import local_numel
from opt_distributed.step.hyper import read_hyper
from opt_distributed.step.mains import Main
from opt_distributed.step.sources import ReadGrad, Source
from opt_kernels.rules.base import Batch, MatrixSpec, Rule, Work
from opt_paramgroups import ParamId


@dataclass(slots=True, kw_only=True)
class OwnedPiece:
    """What this rank owns of one parameter, in all the places where it lives."""

    id: ParamId
    param: nn.Parameter
    of_param: slice  # flat elements of the (local) parameter
    group: int  # index in `param_groups`
    source: Source  # where its gradient comes from
    main: Main
    state: dict[str, Tensor]
    norm_slot: int = 0  # which of the step's gradient norms it belongs to
    counted: bool = True  # False where another rank counts these elements in norms and zeros
    matrix: MatrixSpec = field(default_factory=MatrixSpec)
    stage: ComputeStage | None = None  # brings it together with the other ranks' parts of the same matrix
    step: int = 0  # updates made so far; the only state a step keeps on the host
    read_grad: ReadGrad = field(init=False)
    _main: Tensor | None = field(init=False)  # these two are asked for at every step, and never change
    _out: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.read_grad = self.source.reader(self.id, self.of_param)
        self._main, self._out = self.main.main, self.main.out

    @property
    def is_whole(self) -> bool:
        """Whether it is all that this rank stores of the parameter."""
        return self.of_param == slice(0, local_numel(self.param))

    def work(self, grad: Tensor) -> Work:
        """What the rule has to do."""
        return Work(
            grad=grad,
            main=self._main,
            state=self.state,
            out=self._out,
            remainder=self.main.remainder,
            matrix=self.matrix,
        )


class Ready(NamedTuple):
    """The pieces of a unit whose gradients are there, and these; matched by position. Two lists, no pairs: a step over
    thousands of small parameters spends its time making objects."""

    pieces: Sequence[OwnedPiece]
    grads: Sequence[Tensor]

    def without(self, unused: Collection[ParamId]) -> "Ready":
        """Only what is not of these parameters."""
        kept = [(p, g) for p, g in zip(self.pieces, self.grads, strict=True) if p.id not in unused]
        return Ready([p for p, _ in kept], [g for _, g in kept])


@dataclass(slots=True, kw_only=True)
class Unit:
    """One rule, the pieces it moves here, and the state it keeps of them. A rank that owns nothing has no pieces."""

    name: str
    rule: Rule
    pieces: Sequence[OwnedPiece]
    completes: Sequence[Source] = ()  # sources that no later unit of the step writes to, on any rank
    stages: Sequence[ComputeStage] = ()  # of the pieces that are parts of matrices; in one order on all ranks

    def ready(self) -> Ready:
        """The pieces that have a gradient this step, before it is known whether any rank used the parameter."""
        found = [piece.read_grad() for piece in self.pieces]
        grads = [grad for grad in found if grad is not None]
        if len(grads) == len(found):
            return Ready(self.pieces, grads)
        return Ready([piece for piece, grad in zip(self.pieces, found, strict=True) if grad is not None], grads)

    @torch.no_grad()
    def update_(self, ready: Ready, groups: Sequence[Mapping[str, Any]], *, scale_of_slot: Sequence[float]) -> None:
        """Moves the ready pieces by one step of the rule; `scale_of_slot` multiplies the gradients of a norm slot."""
        by_scale: dict[float, list[Batch]] = {}
        for row, works in _rows(ready).items():
            scale = scale_of_slot[row.norm_slot] * row.source.grad_scale
            batch = Batch(read_hyper(groups[row.group], step=row.step), works)
            by_scale.setdefault(scale, []).append(batch)
        for scale, batches in by_scale.items():
            update_(self.rule, batches, grad_scale=scale, stages=self.stages)
        for piece in ready.pieces:
            piece.step += 1

    def fresh_state(self, piece: OwnedPiece) -> dict[str, Tensor]:
        """The state of one of its pieces, as it is before the first step."""
        return init_state(self.rule, piece.main.value(), id=piece.id, stage=piece.stage)

    def state_bytes(self) -> int:
        """Bytes this rank keeps for the unit beside parameters and gradients."""
        return sum(tensor.numel() * tensor.element_size() for piece in self.pieces for tensor in _kept(piece))


class _Row(NamedTuple):
    """What works must share to share a row of the hyper table and what their gradients are multiplied by."""

    source: Source
    norm_slot: int
    group: int
    step: int  # that they are about to make


def _rows(ready: Ready) -> dict[_Row, list[Work]]:
    """The works of an update, row by row, in the order of the pieces: the same on every rank that has the same."""
    found: dict[tuple[Source, int, int, int], list[Work]] = {}  # plain tuples: named ones cost more than the rest
    for piece, grad in zip(ready.pieces, ready.grads, strict=True):
        key = (piece.source, piece.norm_slot, piece.group, piece.step + 1)
        works = found.get(key)
        if works is None:
            works = found[key] = []
        works.append(piece.work(grad))
    return {_Row(*key): works for key, works in found.items()}


def _kept(piece: OwnedPiece) -> Iterator[Tensor]:
    yield from piece.state.values()
    yield from (tensor for tensor in (piece.main.copy, piece.main.remainder) if tensor is not None)
