"""A unit: one rule over the pieces of parameters that this rank owns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.step.hyper import read_hyper
from opt_distributed.step.mains import Main
from opt_distributed.step.sources import Source
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
    step: int = 0  # updates made so far; the only state a step keeps on the host

    @property
    def is_whole(self) -> bool:
        return self.of_param == slice(0, self.param.numel())

    def grad(self) -> Tensor | None:
        """The reduced gradient of this piece, in the piece's shape; None where there is none."""
        return self.source.grad(self.id, self.of_param)


class ReadyPiece(NamedTuple):
    """A piece whose gradient is there."""

    piece: OwnedPiece
    grad: Tensor


@dataclass(slots=True, kw_only=True)
class Unit:
    """One rule, the pieces it moves here, and the state it keeps of them. A rank that owns nothing has no pieces."""

    name: str
    rule: Rule
    pieces: Sequence[OwnedPiece]

    def ready(self) -> list[ReadyPiece]:
        """The pieces that have a gradient this step, before it is known whether any rank used the parameter."""
        found = ((piece, piece.grad()) for piece in self.pieces)
        return [ReadyPiece(piece, grad) for piece, grad in found if grad is not None]

    @torch.no_grad()
    def update_(
        self, ready: Sequence[ReadyPiece], groups: Sequence[Mapping[str, Any]], *, scale_of_slot: Sequence[float]
    ) -> None:
        """Moves the ready pieces by one step of the rule; `scale_of_slot` multiplies the gradients of each norm slot."""
        for scale, rows in _by_scale(ready, scale_of_slot).items():
            batches = [Batch(read_hyper(groups[row.group], step=row.step), works) for row, works in rows.items()]
            self.rule.update_(batches, grad_scale=scale)
        for piece, _ in ready:
            piece.step += 1

    def state_bytes(self) -> int:
        """Bytes this rank keeps for the unit beside parameters and gradients."""
        return sum(tensor.numel() * tensor.element_size() for piece in self.pieces for tensor in _kept(piece))


class _Row(NamedTuple):
    """What works must share to share a row of the hyper table."""

    group: int
    step: int


def _by_scale(ready: Sequence[ReadyPiece], scale_of_slot: Sequence[float]) -> dict[float, dict[_Row, list[Work]]]:
    """The works of one update sweep: all that share what their gradients are multiplied by."""
    found: dict[float, dict[_Row, list[Work]]] = {}
    for piece, grad in ready:
        scale = scale_of_slot[piece.norm_slot] * piece.source.grad_scale
        found.setdefault(scale, {}).setdefault(_Row(piece.group, piece.step + 1), []).append(_work(piece, grad))
    return found


def _work(piece: OwnedPiece, grad: Tensor) -> Work:
    main = piece.main
    return Work(
        grad=grad, main=main.main, state=piece.state, out=main.out, remainder=main.remainder, matrix=piece.matrix
    )


def _kept(piece: OwnedPiece) -> Iterator[Tensor]:
    yield from piece.state.values()
    yield from (tensor for tensor in (piece.main.copy, piece.main.remainder) if tensor is not None)
