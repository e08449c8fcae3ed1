"""Rows: parameters that are updated together, stored as columns, with a common step count."""

from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.dtensor import Span
from opt_kernels.optim.mains import REMAINDER
from opt_kernels.optim.state import STEP
from opt_kernels.rules.base import Rule
from opt_kernels.works import MatrixSpec, Works


class Sweep(NamedTuple):
    """The rule and device of one call of a rule."""

    rule: Rule
    device: torch.device


class Member(NamedTuple):
    """One parameter that has a gradient."""

    position: int  # among all parameters
    group: int
    param: Tensor
    state: dict[str, Tensor]
    rule: Rule
    matrix: MatrixSpec
    first: int  # number of its first element among those of all parameters
    spans: tuple[Span, ...]  # of the local elements, by their numbers in the parameter


class Steps:
    """The `step` states of parameters that are updated together, as elements of one tensor."""

    def __init__(self, step: float, count: int, device: torch.device | None) -> None:
        # float32 as in torch.optim; on the host unless a device is given
        self._all = torch.full((count,), step, device=device)
        self._on_host: float | None = step if device is None else None
        self.elements = self._all.unbind()
        self._version = self._all._version

    def are_as_counted(self) -> bool:
        """Whether no other code has changed any of them since they were counted. Also compares values on the host:
        collectives, `.data` and NumPy write without increasing the version counter."""
        is_written = self._all._version != self._version
        return not is_written and (self._on_host is None or bool((self._all == self._on_host).all()))

    def count(self, made: Tensor | None = None) -> float | Tensor:
        """Count a step, unless `made` (0-d, on the device) is zero. Returns the number of the attempted step, without
        synchronizing."""
        if self._on_host is not None:
            self._on_host += 1
            self._all.fill_(self._on_host)
            self._version = self._all._version
            return self._on_host
        before = None if made is None else self._all[0] + 1
        self._all.add_(1 if made is None else made)
        self._version = self._all._version
        return self._all[0] if before is None else before


class Row(NamedTuple):
    """Parameters of one sweep, group, step count and kind of mains, as columns."""

    sweep: Sweep
    group: int
    kind: str | None  # MAIN, REMAINDER, or None
    positions: tuple[int, ...]  # among all parameters
    params: list[Tensor]
    states: list[dict[str, Tensor]]
    matrices: list[MatrixSpec]
    firsts: tuple[int, ...]  # numbers of the first elements: of the parameters with `spans`, else of the local elements
    spans: list[tuple[Span, ...]] | None  # None: every parameter is one span
    steps: Steps

    def holds(self, grad: Tensor | None) -> bool:
        """Whether all have the same step count, and are on the device of their first gradient."""
        return self.steps.are_as_counted() and grad is not None and grad.device == self.sweep.device

    def works(self, params: list[Tensor], grads: list[Tensor]) -> Works:
        """The works of these tensors, which are the local shards of DTensors."""
        if self.spans is not None:
            return self._works_by_span(params, grads, self.spans)
        kept = params if self.kind is None else [state[self.kind] for state in self.states]
        return Works(
            grads,
            mains=None if self.kind == REMAINDER else kept,
            states=self.states,
            outs=None if self.kind is None else params,
            remainders=kept if self.kind == REMAINDER else None,
            matrices=self.matrices,
            firsts=self.firsts,
        )

    def _works_by_span(self, params: list[Tensor], grads: list[Tensor], spans: list[tuple[Span, ...]]) -> Works:
        """One work per span, for the numbering of stochastic rounding. The parameters are their own mains."""
        cuts = [(index, span) for index, of_param in enumerate(spans) for span in of_param]

        def cut(tensor: Tensor, span: Span) -> Tensor:
            return tensor.view(-1)[span.begin : span.begin + span.numel]

        grads = [grad.contiguous() for grad in grads]
        return Works(
            [cut(grads[index], span) for index, span in cuts],
            mains=[cut(params[index], span) for index, span in cuts],
            states=[
                {name: cut(state, span) for name, state in self.states[index].items() if name != STEP}
                for index, span in cuts
            ],
            firsts=tuple(self.firsts[index] + span.first for index, span in cuts),
        )
