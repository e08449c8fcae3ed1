"""Megatron-Core's names, from `opt_stack.megatron`: a configuration, an optimizer and a schedule."""

import torch

from opt_stack.megatron import OptimizerConfig, OptimizerParamScheduler, get_megatron_optimizer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)).bfloat16()
config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.1, bf16=True, clip_grad=1.0)
optimizer = get_megatron_optimizer(config, [model])
scheduler = OptimizerParamScheduler(
    optimizer,
    init_lr=0.0,
    max_lr=config.lr,
    min_lr=config.min_lr,
    lr_warmup_steps=2,
    lr_decay_steps=20,
    lr_decay_style="cosine",
    start_wd=0.1,
    end_wd=0.1,
    wd_incr_steps=20,
    wd_incr_style="constant",
)
for _ in range(20):
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    optimizer.scale_loss(model(x).float().square().mean()).backward()
    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()
    optimizer.zero_grad()
    if update_successful:
        scheduler.step(increment=1)
print(f"{scheduler.num_steps} steps, learning rate {optimizer.param_groups[0]['lr']:g}")
