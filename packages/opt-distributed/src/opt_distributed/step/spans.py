"""Named spans of the step, for profilers and for Megatron-Core's timers."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

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
