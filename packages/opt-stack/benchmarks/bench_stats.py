"""Time of a step that records the statistics of every parameter, over that of a step that does not.

    python packages/opt-stack/benchmarks/bench_stats.py [--layers 24] [--width 512] [--pairs 30] [--device cpu]

A stack of square layers, AdamW with fp32 parameters, clipping at 1.0, one process. Steps of both kinds alternate, in
alternating order; prints the median of the pairs' ratios and its quartiles, and the same for steps after `stats_every`
was given a number that is not due, which should be 1. Without gradients that are computed anew: a step only. Last,
the same of a forward pass of 512 rows whose modules are watched (`forward=model`).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from opt_stack import Optimizer, OptimizerConfig, get_optimizer
from opt_stack.diagnosis.forward import ForwardWatch


def stack(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    return nn.Sequential(*layers).to(options.device)


def built(options: argparse.Namespace) -> Optimizer:
    optimizer = get_optimizer(OptimizerConfig(lr=1e-4), [stack(options)])
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.randn_like(param) / 100
    return optimizer


def seconds(run: Callable[[], object], device: str) -> float:
    begun = time.perf_counter()
    run()
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
    model = stack(options)
    watched = stack(options)
    watch = ForwardWatch(watched, torch.device(options.device))
    batch = torch.randn(512, options.width, device=options.device)
    compared: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "a recorded step / a step": (recording.step, plain.step),
        "a step that is not due / a step": (waiting.step, plain.step),
        "a watched forward / a forward": (partial(watched, batch), partial(model, batch)),
    }
    for name, (run, usual) in compared.items():
        ratios = []
        for pair in range(options.pairs + 2):
            order = (usual, run) if pair % 2 else (run, usual)
            times = {each: seconds(each, options.device) for each in order}
            ratios.append(times[run] / times[usual])
        low, middle, high = statistics.quantiles(ratios[2:], n=4)
        print(f"{name}: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    assert not watch.first


if __name__ == "__main__":
    main()
