"""How long the host is busy with a step of 290 tensors on a GPU, but for the launches: `--json` writes the figures.

No GPU is needed: the tensors are small ones in CPU memory, the Triton versions are asked for by name, and kernels are
replaced by nothing. What is left is what stands between `step()` and the launches: finding gradients and states again,
their addresses, the hyper-parameters. A step has two launches (three more with statistics), which Triton's own launcher
adds. Ratios are to the 150 us that a whole step may take.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: without it Triton looks for a GPU

import torch

from opt_kernels.backends.triton import grad_stats as stats_kernels
from opt_kernels.backends.triton import update as update_kernels
from opt_kernels.backends.triton.kernels import kernels_of
from opt_kernels.formulas.adam import ADAM
from opt_kernels.optim import AdamW
from opt_kernels.rules.adam import Adam
from opt_kernels.works import Batch, Hyper, Work, Works

NUM_TENSORS, NUMEL = 290, 4096
BUDGET_MS = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One comparison: the median over steps."""

    name: str
    goal: float  # the ratio asked for, at most
    ratio: float  # ours / budget
    ours_ms: float
    peer_ms: float
    num_pairs: int  # steps


class Unlaunched:
    """A kernel that is not launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


def unlaunch() -> None:
    """Replaces every kernel of a step of Adam by nothing."""
    kernels: list[tuple[Any, str]] = [
        (stats_kernels, "stats_sweep"),
        (stats_kernels, "stats_total"),
    ]
    for module, name in kernels:
        setattr(module, name, Unlaunched())
    nothing = kernels_of(ADAM)._replace(fill=Unlaunched(), sweep=Unlaunched())
    vars(update_kernels)["kernels_of"] = lambda formula: nothing


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters without gradients."""
    return [torch.nn.Parameter(torch.zeros(NUMEL, dtype=dtype)) for _ in range(NUM_TENSORS)]


def drop_in(**options: Any) -> Callable[[], None]:
    """A step of the drop-in optimizer."""
    params = parameters(torch.bfloat16 if "mains" in options else torch.float32)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = AdamW(params, backend="triton", **options)
    return lambda: optimizer.step()


def rule(*, by_column: bool) -> Callable[[], None]:
    """A step of the rule, over works or over the same in columns."""
    adam = Adam(backend="triton")
    mains = [torch.zeros(NUMEL) for _ in range(NUM_TENSORS)]
    grads = [torch.zeros(NUMEL) for _ in range(NUM_TENSORS)]
    states = [adam.init_state(main) for main in mains]
    works = [Work(grad=g, main=m, state=s) for g, m, s in zip(grads, mains, states)]
    steps = count(1)

    def step() -> None:
        given = Works(grads, mains=mains, states=states) if by_column else works
        adam.update_([Batch(Hyper(lr=1e-3, step=next(steps)), given)])

    return step


def statistics_sweep() -> Callable[[], None]:
    """The statistics of the gradients."""
    grads = [torch.zeros(NUMEL) for _ in range(NUM_TENSORS)]
    return lambda: stats_kernels.grad_stats(grads) and None


STEPS: dict[str, Callable[[], Callable[[], None]]] = {
    "host, fp32 AdamW": lambda: drop_in(),
    "host, bf16 AdamW with remainders": lambda: drop_in(mains="remainder"),
    "host, fp32 Adam rule, columns": lambda: rule(by_column=True),
    "host, fp32 Adam rule, works": lambda: rule(by_column=False),
    "host, statistics": statistics_sweep,
}


def figure(name: str, step: Callable[[], None], num_steps: int) -> Figure:
    """The median time of `step`."""
    times = []
    for _ in range(num_steps + num_steps // 10 + 3):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    ours = statistics.median(times[-num_steps:]) * 1e3
    return Figure(
        name=f"{name}, {NUM_TENSORS} tensors / 150 us", goal=1.0, ratio=ours / BUDGET_MS, ours_ms=ours,
        peer_ms=BUDGET_MS, num_pairs=num_steps,
    )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", default="", help="only the figures whose name contains this")
    parser.add_argument("--pairs", type=int, default=301, help="steps per figure")
    arguments = parser.parse_args()
    unlaunch()
    figures = []
    for name, made in STEPS.items():
        if arguments.only in name:
            found = figure(name, made(), arguments.pairs)
            print(
                f"{found.ratio:8.3f} (goal {found.goal:.2f})  {found.ours_ms * 1e3:7.0f} us  {found.name}", flush=True
            )
            figures.append(asdict(found))
    if arguments.json is not None:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps(machine | {"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
