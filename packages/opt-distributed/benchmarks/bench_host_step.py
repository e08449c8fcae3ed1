"""Host time of one step of the whole stack on a device, without the launches of kernels.

    python packages/opt-distributed/benchmarks/bench_host_step.py [--params 290] [--steps 2000] [--calls]

bf16 parameters with fp32 mains, AdamW, clipping at 1.0, one process. No GPU is needed: the tensors are small ones in
CPU memory, the step takes the path of an accelerator, where the host reads nothing, and Triton kernels are replaced by
nothing. torch's own small operations on the device run on the CPU and are included. Prints the minimum and
the median time of a step. Needs opt_stack, which builds the step; nothing here is imported by the package.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: without it Triton looks for a GPU

import torch
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed.comm import device as devices
from opt_distributed.comm.device import Device
from opt_distributed.step import verdict
from opt_kernels.backends.triton import grad_stats as stats_kernels
from opt_kernels.backends.triton import update as update_kernels
from opt_kernels.backends.triton.update import kernels_of
from opt_kernels.formulas.adam import ADAM
from opt_stack import get_optimizer


class Unlaunched:
    """A kernel that is not launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


class Zeros(Unlaunched):
    """The total of the statistics, which writes zeros: a step with infinite values in its memory would be skipped."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(sums: Tensor, counts: Tensor, power: Tensor, totals: Tensor, *args: Any, **options: Any) -> None:
            power.zero_()
            totals.zero_()

        return launch


class Asynchronous(Device):
    """A CPU that is treated as an accelerator."""

    is_asynchronous = True


def take_for_an_accelerator() -> None:
    """Make every step take the path of an accelerator, with kernels that do nothing."""
    queues = Asynchronous()
    vars(devices)["device_of"] = lambda device: queues
    nothing = kernels_of(ADAM)._replace(fill=Unlaunched(), sweep=Unlaunched())
    vars(update_kernels)["kernels_of"] = lambda formula: nothing
    vars(stats_kernels).update(stats_sweep=Unlaunched(), stats_total=Zeros())
    vars(verdict)["grad_stats"] = stats_kernels.grad_stats


def step_of(num_params: int, numel: int) -> Callable[[], object]:
    """A step of the stack's optimizer on parameters with gradients."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for _ in range(num_params))
    for param in model:
        param.grad = torch.zeros_like(param)
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_optimizer(config, [model])
    for unit in optimizer.stepper.units:
        rule: Any = unit.rule
        unit.rule = replace(rule, backend="triton")
    return optimizer.step


def num_calls(step: Callable[[], object]) -> int:
    """The number of functions that a step calls, after the first ones."""
    for _ in range(3):
        step()
    profile = cProfile.Profile()
    profile.runcall(step)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=290)
    parser.add_argument("--numel", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--calls", action="store_true", help="count calls of functions instead of time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    take_for_an_accelerator()
    step = step_of(options.params, options.numel)
    if options.calls:
        print(f"{options.params} parameters: {num_calls(step)} calls in a step")
        return
    times = []
    for _ in range(options.steps + 3):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e6)
    times = times[3:]
    print(f"{options.params} parameters: {min(times):.0f} us at least, {statistics.median(times):.0f} us at the median")


if __name__ == "__main__":
    main()
