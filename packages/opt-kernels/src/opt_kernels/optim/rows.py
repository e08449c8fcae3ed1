"""Rows: parameters that move together, column by column, and the steps that they count together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.dtensor import Span
from opt_kernels.optim.mains import REMAINDER
from opt_kernels.optim.state import STEP
from opt_kernels.rules.base import Rule
from opt_kernels.works import MatrixSpec, Works


class Sweep(NamedTuple):
    """What one call of a rule can take."""

    rule: Rule
    device: torch.device


class Member(NamedTuple):
    """What is known of one parameter that has a gradient."""

    place: int  # among all parameters
    group: int
    param: Tensor
    state: dict[str, Tensor]
    rule: Rule
    matrix: MatrixSpec
    first: int  # number of its first element among all
    spans: tuple[Span, ...]  # of the elements that are here, numbered within the parameter


class Steps:
    """The `step` states of parameters that move together, as elements of one tensor: one addition counts for all."""

    def __init__(self, step: float, count: int, device: torch.device | None) -> None:
        # float32 as in torch.optim; on the host unless a device is given
        self._all = torch.full((count,), step, device=device)
        self._on_host: float | None = step if device is None else None
        self._is_written = True
        self.elements = self._all.unbind()
        self._version = self._all._version

    def are_even(self) -> bool:
        """Whether nobody has set any of them since they were counted."""
        return self._all._version == self._version

    def count(self, made: Tensor | None = None, *, write: bool = True) -> float | Tensor:
        """One step more, of which `made`, 0-d, says on the device whether it is; returns the number of the step that is
        tried, which waits for nothing. Without `write` a count of the host is in the states after `write_`."""
        if self._on_host is not None:
            self._on_host += 1
            self._is_written = False
            if write:
                self.write_()
            return self._on_host
        before = None if made is None else self._all[0] + 1
        self._all.add_(1 if made is None else made)
        self._version = self._all._version
        return self._all[0] if before is None else before

    def write_(self) -> None:
        """Brings the states up to date."""
        if not self._is_written and self._on_host is not None:
            self._all.fill_(self._on_host)
            self._version = self._all._version
            self._is_written = True


class Row(NamedTuple):
    """Parameters of one sweep, one group, one step and one kind of mains, column by column."""

    sweep: Sweep
    group: int
    kind: str | None  # MAIN, REMAINDER, or None
    places: tuple[int, ...]  # among all parameters
    params: list[Tensor]
    states: list[dict[str, Tensor]]
    matrices: list[MatrixSpec]
    firsts: tuple[int, ...]  # of the parameters where there are `spans`, else of what is here
    spans: list[tuple[Span, ...]] | None  # None: every parameter is one span
    steps: Steps

    def holds(self, grad: Tensor | None) -> bool:
        """Whether all have made as many steps, and are still where their first gradient is."""
        return self.steps.are_even() and grad is not None and grad.device == self.sweep.device

    @property
    def is_launched(self) -> bool:
        """Whether kernels read addresses from a table, which is worth keeping."""
        return self.sweep.device.type == "cuda" or getattr(self.sweep.rule, "backend", None) == "triton"

    def works(self, params: list[Tensor], grads: list[Tensor]) -> Works:
        """What is to be done with these, the local shards of DTensors."""
        if self.spans is not None:
            return self._works_by_span(params, grads, self.spans)
        return self.columns(params).with_grads(grads, standing=None, grads_at=())

    def columns(self, params: Sequence[Tensor]) -> Works:
        """All columns but the gradients."""
        kept = params if self.kind is None else [state[self.kind] for state in self.states]
        return Works(
            (),
            mains=None if self.kind == REMAINDER else kept,
            states=self.states,
            outs=None if self.kind is None else params,
            remainders=kept if self.kind == REMAINDER else None,
            matrices=self.matrices,
            firsts=self.firsts,
        )

    def _works_by_span(self, params: list[Tensor], grads: list[Tensor], spans: list[tuple[Span, ...]]) -> Works:
        """A work for each span, as stochastic rounding must number them; the parameters are their own mains."""
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
