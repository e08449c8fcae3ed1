"""Host time of a step over 2,000 small parameters, compared with torch's fused AdamW and `clip_grad_norm_`.

    python packages/opt-distributed/benchmarks/bench_step.py [--params 2000] [--rounds 40] [--numel 16]

Prints the median processor time of both, measured alternately, and their ratio. Ratios measured on a 2-core x86 machine
with torch 2.13: 0.53, 0.52 and 0.73 for 16, 64 and 1,024 elements; without a C++ compiler
(OPT_KERNELS_CPP=0), 0.97, 1.03 and 1.40.
Needs opt_stack, which builds the step; nothing here is imported by the package.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from opt_config import OptimizerConfig
from opt_stack import get_optimizer


def model_of(params: int, numel: int) -> nn.ParameterList:
    """Small parameters with gradients: half of them vectors, half of them matrices."""
    shapes = [(numel,), (2, numel // 2)]
    model = nn.ParameterList(nn.Parameter(torch.randn(shapes[i % 2])) for i in range(params))
    for param in model:
        param.grad = torch.randn_like(param)
    return model


def seconds(call: Callable[[], object]) -> float:
    """Processor time of one call, which excludes the time of other processes."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def overhead(params: int, numel: int, rounds: int) -> None:
    """Print the medians of both steps on the same list of parameters, and their ratio."""
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0)
    ours = model_of(params, numel)
    theirs = model_of(params, numel)
    optimizer = get_optimizer(config, [ours], {})
    fused = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

    def torch_step() -> None:
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        fused.step()

    for _ in range(3):
        optimizer.step()
        torch_step()
    pairs = [(seconds(optimizer.step), seconds(torch_step)) for _ in range(rounds)]
    mine, peers = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{params} parameters of {numel} elements, torch {torch.__version__}, {torch.get_num_threads()} thread")
    print(f"  opt-distributed step                     {mine:7.2f} ms")
    print(f"  clip_grad_norm_ and AdamW(fused=True)    {peers:7.2f} ms")
    print(f"  ratio                                    {ratio:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=2000)
    parser.add_argument("--numel", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    overhead(options.params, options.numel, options.rounds)


if __name__ == "__main__":
    main()
