"""Host time of a step over 290 tensors on a GPU, without the launches of kernels, and of a step over 2,000 small
parameters on a CPU: `--json` writes the figures.

No GPU is needed: the tensors are small ones in CPU memory, the Triton backend is selected by name, and kernels are
replaced by functions that do nothing. Matrices are stacked as on a GPU. What remains is the work between `step()` and
the launches: collecting gradients, states, addresses and hyper-parameters. A step has two launches (three more with
statistics), whose time in Triton's launcher is not included. Ratios are relative to torch's `clip_grad_norm_` and
fused AdamW over as many such tensors, in the same process; ratios are those of the least times.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import count, cycle
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: without it Triton looks for a GPU

import torch

from opt_kernels.backends.triton import grad_stats as stats_kernels
from opt_kernels.backends.triton import scalars
from opt_kernels.backends.triton import update as update_kernels
from opt_kernels.backends.triton.update import kernels_of
from opt_kernels.formulas.adam import ADAM
from opt_kernels.matrices.muon import triton as muon_kernels
from opt_kernels.matrices.orthogonalization import Orthogonalization
from opt_kernels.optim import AdamW, Muon
from opt_kernels.rules import Adam
from opt_kernels.works import Batch, Hyper, Work, Works

NUM_TENSORS = 290
NUMEL = 4096
NUM_SMALL = 2000
SMALL_NUMEL = 64
GOAL = 0.3
GOAL_SMALL = 0.4
GOAL_MUON = 0.6  # its step also stacks matrices
SMALL = "host, 2,000 small parameters on a CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One comparison: medians over steps, and the minimum, which other processes hardly affect."""

    name: str
    goal: float  # the largest acceptable ratio
    ratio: float  # of the least times: ours / torch
    ours_ms: float
    peer_ms: float
    least_ms: float
    num_pairs: int  # steps


class Unlaunched:
    """A kernel that is not launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


def unlaunch() -> None:
    """Replace every kernel of a step of Adam and of Muon, and all matrix products, by functions that do nothing."""
    kernels: list[tuple[Any, str]] = [
        (stats_kernels, "stats_sweep"),
        (stats_kernels, "stats_total"),
        (scalars, "fill_scalars"),
        *((muon_kernels, name) for name in ("momentum_sweep", "slot_totals", "normalise_sweep", "descent_sweep")),
    ]
    for module, name in kernels:
        setattr(module, name, Unlaunched())
    nothing = kernels_of(ADAM)._replace(fill=Unlaunched(), sweep=Unlaunched())
    vars(update_kernels)["kernels_of"] = lambda formula: nothing
    setattr(Orthogonalization, "__call__", lambda self, x, **options: x)  # noqa: B010
    stacks = import_module("opt_kernels.matrices.access")  # its package offers a function of this name
    vars(stacks)["STACK_NUMEL_ON_CPU"] = stacks.STACK_NUMEL_ELSEWHERE


def parameters(
    dtype: torch.dtype = torch.float32, num_tensors: int = NUM_TENSORS, numel: int = NUMEL
) -> list[torch.nn.Parameter]:
    """Parameters without gradients."""
    return [torch.nn.Parameter(torch.zeros(numel, dtype=dtype)) for _ in range(num_tensors)]


def torchs(num_tensors: int, numel: int) -> Callable[[], object]:
    """A step of torch's fused AdamW after `clip_grad_norm_`."""
    params = parameters(num_tensors=num_tensors, numel=numel)
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = torch.optim.AdamW(params, fused=True)
    return lambda: (torch.nn.utils.clip_grad_norm_(params, 1.0), optimizer.step())


def small() -> Callable[[], object]:
    """A step of the drop-in optimizer, with clipping, over many small parameters on a CPU. Nothing is left out."""
    params = parameters(num_tensors=NUM_SMALL, numel=SMALL_NUMEL)
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer = AdamW(params, max_norm=1.0, backend="cpp")
    return lambda: optimizer.step()


def drop_in(*, looked_at: bool = False, new_grads: bool = False, **options: Any) -> Callable[[], object]:
    """A step of the drop-in optimizer. `looked_at`: states are checked; `new_grads`: gradients alternate."""
    params = parameters(torch.bfloat16 if "mains" in options else torch.float32)
    turns = [[torch.zeros_like(param) for param in params] for _ in range(1 + new_grads)]
    optimizer = AdamW(params, backend="triton", **options)
    if looked_at:
        _ = optimizer.state
    for param, grad in zip(params, turns[0], strict=True):
        param.grad = grad
    if not new_grads:
        return lambda: optimizer.step()
    turn = cycle(turns)

    def step() -> float:
        for param, grad in zip(params, next(turn), strict=True):
            param.grad = grad
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    return step


def muon() -> Callable[[], object]:
    """A step of the drop-in Muon on square matrices, without the products of Newton-Schulz."""
    params = [torch.nn.Parameter(torch.zeros(64, NUMEL // 64)) for _ in range(NUM_TENSORS)]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer = Muon(params, backend="triton")
    return lambda: optimizer.step()


def rule(*, by_column: bool) -> Callable[[], object]:
    """A step of the rule, over a list of works or over the same works in columns."""
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


def statistics_sweep() -> Callable[[], object]:
    """A sweep that computes the statistics of the gradients."""
    grads = [torch.zeros(NUMEL) for _ in range(NUM_TENSORS)]
    return lambda: stats_kernels.grad_stats(grads) and None


STEPS: dict[str, Callable[[], Callable[[], object]]] = {
    "host, fp32 AdamW": lambda: drop_in(),
    "host, bf16 AdamW with remainders": lambda: drop_in(mains="remainder"),
    "host, fp32 AdamW, states looked at": lambda: drop_in(looked_at=True),
    "host, fp32 AdamW, gradients at two places": lambda: drop_in(new_grads=True),
    "host, Muon": muon,
    "host, fp32 Adam rule, columns": lambda: rule(by_column=True),
    "host, fp32 Adam rule, works": lambda: rule(by_column=False),
    "host, statistics": statistics_sweep,
}


def timed(step: Callable[[], object]) -> float:
    """Milliseconds of a step. One that includes work that is not measured returns its own time."""
    begin = time.perf_counter()
    own = step()
    return (own if isinstance(own, float) else time.perf_counter() - begin) * 1e3


def figure(name: str, step: Callable[[], object], peer: Callable[[], object], num_steps: int, goal: float) -> Figure:
    """The time of `step` relative to that of `peer`, in alternating steps."""
    pairs = [(timed(step), timed(peer)) for _ in range(num_steps + num_steps // 10 + 3)]
    ours, theirs = zip(*pairs[-num_steps:])
    return Figure(
        name=f"{name} / clip_grad_norm_ and torch.optim.AdamW(fused=True)", goal=goal, ratio=min(ours) / min(theirs),
        ours_ms=statistics.median(ours), peer_ms=statistics.median(theirs), least_ms=min(ours), num_pairs=num_steps,
    )  # fmt: skip


def main() -> None:
    """Parse the command line, and print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", default="", help="only the figures whose name contains this")
    parser.add_argument("--pairs", type=int, default=301, help="steps per figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    cases: list[tuple[str, Callable[[], Callable[[], object]], tuple[int, int], float]] = [
        (SMALL, small, (NUM_SMALL, SMALL_NUMEL), GOAL_SMALL),
    ]
    for name, made in STEPS.items():
        goal = GOAL_MUON if made is muon else GOAL
        cases.append((f"{name}, {NUM_TENSORS} tensors", made, (NUM_TENSORS, NUMEL), goal))
    for name, made, size, goal in cases:
        if name != SMALL:
            unlaunch()
        if arguments.only in name:
            found = figure(name, made(), torchs(*size), arguments.pairs, goal)
            print(
                f"{found.ratio:8.3f} (goal {found.goal:.2f})  {found.ours_ms * 1e3:7.0f} us "
                f"(least {found.least_ms * 1e3:.0f})  {found.name}",
                flush=True,
            )
            figures.append(asdict(found))
    if arguments.json is not None:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps(machine | {"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
