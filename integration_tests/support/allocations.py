"""Count the bytes that torch's allocator hands out on the CPU during a call."""

from collections.abc import Callable

from torch.autograd.profiler import profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak bytes allocated during `call`, relative to before it."""
    with profile(use_cpu=True, profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
