"""FSDP2 with Muon: matrices that no rank holds whole are updated as whole matrices."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from opt_stack import OptimizerConfig, get_optimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
for layer in (model[0], model[2], model[4]):
    fully_shard(layer)
fully_shard(model)

config = OptimizerConfig(
    optimizer="muon", lr=1e-2, muon_scale_mode="match_rms_adamw", muon_nesterov=True, clip_grad=1.0
)
optimizer = get_optimizer(config, [model])

data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(10):
    x = torch.randn(16, 32, generator=data)
    loss = (model(x) - x[:, :8]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(optimizer.plan)
dist.destroy_process_group()
