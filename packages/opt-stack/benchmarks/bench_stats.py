"""Time of a step that records the statistics of every parameter, over that of a step that does not.

    python packages/opt-stack/benchmarks/bench_stats.py [--layers 24] [--width 512] [--pairs 30] [--device cpu]

A stack of square layers, AdamW with fp32 parameters, clipping at 1.0, one process. Steps of both kinds alternate, in
alternating order; prints the median of the pairs' ratios and its quartiles, and the same for steps after `stats_every`
was given a number that is not due, which should be 1. Without gradients that are computed anew: a step only.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from opt_stack import Optimizer, OptimizerConfig, get_optimizer


def built(options: argparse.Namespace) -> Optimizer:
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    optimizer = get_optimizer(OptimizerConfig(lr=1e-4), [nn.Sequential(*layers).to(options.device)])
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.randn_like(param) / 100
    return optimizer


def seconds(optimizer: Optimizer, device: str) -> float:
    begun = time.perf_counter()
    optimizer.step()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 24), ("width", 512), ("pairs", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    plain, recording, waiting = (built(options) for _ in range(3))
    recording.stats_every(1)
    waiting.stats_every(10**9)
    waiting.step()  # the first step is due
    for name, other in (("recorded", recording), ("not due", waiting)):
        ratios = []
        for pair in range(options.pairs + 2):
            order = (plain, other) if pair % 2 else (other, plain)
            times = {optimizer: seconds(optimizer, options.device) for optimizer in order}
            ratios.append(times[other] / times[plain])
        low, middle, high = statistics.quantiles(ratios[2:], n=4)
        print(f"{name:10} {middle:.3f} of a step without statistics (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
