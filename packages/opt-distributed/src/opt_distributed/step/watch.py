"""Observers of a step: spans for profilers, and `Watch`, which reads gradients and weights around the update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from opt_distributed.pieces.piece import Groups, Ready
from opt_distributed.step.outcome import Outcome

_NO_SPAN = nullcontext()

Spans = Callable[[str], AbstractContextManager[Any]]
"""`with span("name"):` around each phase of a step."""


def profiler_spans(name: str) -> AbstractContextManager[Any]:
    """Spans that appear in traces of the torch profiler."""
    # `record_function` takes 8 us of the host, even without a profiler; creating a context of its own, 1 us.
    return torch.profiler.record_function(name) if torch._C._autograd._profiler_enabled() else _NO_SPAN


def timer_spans(timers: Callable[..., Any], *, barrier: bool) -> Spans:
    """Spans over Megatron-Core's timers: `timers(name, log_level=1).start(barrier=...)`, then `timers(name).stop()`."""

    @contextmanager
    def span(name: str) -> Iterator[None]:
        timers(name, log_level=1).start(barrier=barrier)
        try:
            yield
        finally:
            timers(name).stop()

    return span


class Watch(Protocol):
    """Sees every step of a `Stepper`, with the same calls on every rank. Reads gradients and weights, writes none.

    All calls may communicate.
    """

    def before(self, step: int, ready: Sequence[Ready], inverse: float | Tensor, *, skipped: bool) -> None:
        """Gradients are reduced, and nothing is updated yet. `step` counts from 1; `inverse` is 1 / loss scale;
        `skipped`: the host knows that no update follows."""

    def after(self, outcome: Outcome, groups: Groups, *, max_norm: float) -> None:
        """The step was made, or skipped. `max_norm` is the norm to which gradients are clipped."""

    def on_refusal(self, step: int, error: Exception, found: Sequence[str]) -> None:
        """A guard has refused the step, with `error`; `found` names the guards of this rank that did, with their
        errors. Not called on an accelerator, where no rank is named. The recorder of opt-stack
        (`diagnosis.recorder`) gathers the names here."""
