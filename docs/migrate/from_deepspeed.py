"""ZeRO-1 with fp16 and a dynamic loss scale, in a plain loop."""

import torch
from torch import nn

from opt_stack import OptimizerConfig, get_optimizer

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).half()
config = OptimizerConfig(
    optimizer="adam",
    lr=1e-3,
    weight_decay=0.01,
    fp16=True,
    initial_loss_scale=2.0**16,
    clip_grad=1.0,
    use_distributed_optimizer=True,
)
optimizer = get_optimizer(config, [model], broadcast_params=True)

losses = []
for _ in range(40):
    x = torch.randn(32, 16, dtype=torch.float16)
    loss = (model(x) - x).float().square().mean()
    optimizer.scale_loss(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(
    "loss fell" if losses[-1] < losses[0] else "loss did not fall",
    f", loss scale {optimizer.get_loss_scale().item():g}",
    sep="",
)
