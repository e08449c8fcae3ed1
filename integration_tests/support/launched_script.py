"""A user's script as torchrun starts it: it makes no process group, and ranks draw different weights and samples."""

import os
import sys
from pathlib import Path

import torch

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

torch.set_num_threads(1)
torch.manual_seed(1 + int(os.environ["RANK"]))
config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, weight_decay=0.0, clip_grad=0.0)
model = torch.nn.Linear(3, 1, bias=False)
try:
    get_optimizer(config, [model])
    refusal = "none"
except ValueError as error:
    refusal = str(error)
optimizer = get_optimizer(config, [model], broadcast_params=True)
start = model.weight.detach().clone()
x = torch.randn(4, 3)
model(x).sum().backward()
norm = optimizer.step().grad_norm
found = {"refusal": refusal, "start": start, "x": x, "norm": norm, "weight": model.weight.detach()}
torch.save(found, Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")
