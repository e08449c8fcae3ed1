"""One step of a small model in each layout, with the mean gradient and its norm."""

import math
from typing import Any

import torch
from parity import LR, Net, grads_of, roles_over
from torch import Tensor

from opt_config import OptimizerConfig
from opt_distributed.comm import Comm
from opt_stack import Optimizer, get_optimizer

SPREADS = {
    "replicated": {},
    "flat": {"use_distributed_optimizer": True},
    "whole": {"use_layer_wise_distributed_optimizer": True},
}


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": LR, "clip_grad": 1.0, "muon_fp32_matmul_prec": "highest", **changes})


def step_once(
    config: OptimizerConfig, comm: Comm, *, overrides: Any = None, scale: float = 1.0, net: Net | None = None
) -> Optimizer:
    """An optimizer after one step; the gradients stay where they were."""
    net = net or Net(torch.float32)
    optimizer = get_optimizer(config, [net], overrides or {}, pg_collection=roles_over(comm))
    (net(grads_of(0, comm.rank, comm.size)) * scale).backward()
    optimizer.last = optimizer.step()
    return optimizer


def mean_grads() -> dict[str, Tensor]:
    return grads_of(0, 0, 1)


def norm_of(names: Any) -> float:
    return math.sqrt(sum(mean_grads()[name].double().square().sum().item() for name in names))
