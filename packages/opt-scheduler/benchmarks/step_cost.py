"""What a step over 200 groups costs, as a ratio to the same loop written by hand, and what the import costs.

python packages/opt-scheduler/benchmarks/step_cost.py
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from opt_scheduler import OptimizerParamScheduler

GROUPS = 200
ROUNDS = 2_000


class Case(NamedTuple):
    """Both ways of doing the same, on groups of their own."""

    name: str
    ours: Callable[[], None]
    by_hand: Callable[[], None]


def groups(overridden: bool) -> list[dict[str, Any]]:
    """200 groups as an optimizer has them, all alike or each with bounds of its own."""
    plain = [{"params": [], "lr": 0.0, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8} for _ in range(GROUPS)]
    own = ({"max_lr": 1e-3 + i * 1e-6, "min_lr": 1e-4, "wd_mult": i % 2} if overridden else {} for i in range(GROUPS))
    return [group | bounds for group, bounds in zip(plain, own, strict=True)]


def by_hand(param_groups: list[dict[str, Any]]) -> Callable[[], None]:
    """Cosine and a linear ramp of the weight decay with the same five group keys, as one writes it: nothing checked."""
    max_lr = 1e-3
    min_lr = 1e-4
    warmup = 100
    decay = 10_000_000
    start_wd = 0.01
    end_wd = 0.1
    n = 200

    def step() -> None:
        nonlocal n
        n += 1
        for group in param_groups:
            high = group.get("max_lr", max_lr)
            low = group.get("min_lr", min_lr)
            r = (n - warmup) / (decay - warmup)
            group["lr"] = low + 0.5 * (math.cos(math.pi * r) + 1.0) * (high - low)
            start = group.get("start_wd", start_wd)
            end = group.get("end_wd", end_wd)
            group["weight_decay"] = (start + n / decay * (end - start)) * group.get("wd_mult", 1.0)

    return step


def ours(param_groups: list[dict[str, Any]]) -> Callable[[], None]:
    optimizer = SimpleNamespace(param_groups=param_groups)
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-3, 1e-4, 100, 10_000_000, "cosine", 0.01, 0.1, 10_000_000, "linear"
    )
    scheduler.step(200)
    return scheduler.step


def microseconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e6


def measure(case: Case) -> None:
    """Both ways in turn, so that a busy machine slows them alike; medians, and the best of each."""
    pairs = [(microseconds(case.ours), microseconds(case.by_hand)) for _ in range(ROUNDS)]
    package, hand = (sorted(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(
        f"{case.name:<28} ours {statistics.median(package):6.1f} us (best {package[0]:.1f})   "
        f"by hand {statistics.median(hand):6.1f} us (best {hand[0]:.1f})   ratio {ratio:.2f}"
    )


def import_milliseconds() -> float:
    """Processor time, the best of several fresh interpreters with compiled modules; their own start does not count."""
    code = "import time; t = time.process_time(); import opt_scheduler; print((time.process_time() - t) * 1e3)"
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-c", code]
        runs = [subprocess.check_output(command, text=True, env=environment) for _ in range(16)]
    return min(map(float, runs))


def main() -> None:
    for name, overridden in (("200 groups alike", False), ("200 groups with own bounds", True)):
        measure(Case(name, ours(groups(overridden)), by_hand(groups(overridden))))
    print(f"import opt_scheduler         {import_milliseconds():.1f} ms of processor time")


if __name__ == "__main__":
    main()
