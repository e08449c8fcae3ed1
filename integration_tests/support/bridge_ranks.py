"""Ranks that train in Megatron-Core's own wrapper, with the optimizer that Megatron-Bridge asks a configuration for."""

import io
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from opt_stack import Optimizer
from opt_stack.adapters.megatron_bridge import StackOptimizerConfig

STEPS, LR, WIDTH = 6, 1e-2, 8
SETTINGS: dict[str, Any] = {"lr": LR, "min_lr": LR / 10, "weight_decay": 0.1, "clip_grad": 0.5}


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    rates: list[float]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    numbers = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=numbers) / 2
    return model.to(dtype)


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def initialize() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # Megatron-Core's buffers ask for it
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def wrap(model: nn.Module, **fields: Any) -> nn.Module:
    transformer = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=20, **fields)
    return DistributedDataParallel(transformer, config, model)  # type: ignore[no-any-return]


def build(chunk: nn.Module, **settings: Any) -> tuple[Optimizer, Any]:
    """Do what `setup_optimizer` of Megatron-Bridge 0.6.2 does."""
    config = StackOptimizerConfig(**{**SETTINGS, **settings})
    optimizer = config.provide(
        model_chunks=[chunk],
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=2,
        lr_decay_steps=STEPS,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def iterate(chunk: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> tuple[list[float], list[float]]:
    """Do what `train_step` of Megatron-Bridge 0.6.2 does."""
    norms, rates = [], []
    for step in steps:
        chunk.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        rows = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = chunk(rows.to(next(chunk.parameters()).dtype)).float().square().mean()
        optimizer.scale_loss(loss).backward()
        chunk.finish_grad_sync()  # type: ignore[operator]  # as finalize_model_grads does
        update_successful, grad_norm, _ = optimizer.step()
        assert update_successful
        assert optimizer.get_loss_scale().item() == 1.0
        norms.append(grad_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return norms, rates


def trained(settings: dict[str, Any]) -> tuple[Trained, Trained]:
    """An unbroken run, and one that resumes from a state dict after half of the steps."""
    initialize()
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    model = make_model(dtype)
    chunk = wrap(model)
    optimizer, scheduler = build(chunk, **settings)
    norms, rates = iterate(chunk, optimizer, scheduler, range(STEPS // 2))
    saved = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, scheduler)], saved)
    after = iterate(chunk, optimizer, scheduler, range(STEPS // 2, STEPS))
    other = make_model(dtype)
    other_chunk = wrap(other)
    other_optimizer, other_scheduler = build(other_chunk, **settings)
    saved.seek(0)
    of_model, of_optimizer, of_scheduler = torch.load(saved, weights_only=False)
    other.load_state_dict(of_model)
    other_optimizer.load_state_dict(of_optimizer)
    other_scheduler.load_state_dict(of_scheduler)
    resumed = iterate(other_chunk, other_optimizer, other_scheduler, range(STEPS // 2, STEPS))
    return (Trained(model.state_dict(), norms + after[0], rates + after[1]), Trained(other.state_dict(), *resumed))
