"""Attention layers that record their largest logits, for tests of QK-Clip."""

from typing import Any

import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer
from opt_stack.qk_clip import Attention, fused_qkv, latent_attention, separate_qk

IN, HEADS, GROUPS, DIM, VALUE = 5, 4, 2, 3, 2
NOPE, ROPE = 3, 2
LOGITS = torch.tensor([400.0, 25.0, 99.0, 250.0])
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5, "weight_decay": 0.0, "clip_grad": 0.0}


class Model(nn.Module):
    """Weights of attention layers of every kind, and a matrix that is none."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        fused = GROUPS * (HEADS // GROUPS * DIM + DIM + VALUE)
        shapes = {
            "qkv": (fused, IN),
            "qkv_bias": (fused,),
            "query": (HEADS * DIM, IN),
            "key": (GROUPS * DIM, IN),
            "key_bias": (GROUPS * DIM,),
            "query_up": (HEADS * (NOPE + ROPE), IN),
            "key_value_up": (HEADS * (NOPE + VALUE), IN),
            "mlp": (7, IN),
        }
        numbers = torch.Generator().manual_seed(5)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=numbers)
            self.register_parameter(name, nn.Parameter(value.to(dtype)))

    def forward(self, scale: float) -> Tensor:
        numbers = torch.Generator().manual_seed(6)
        parts = [(p * (torch.randn(p.shape, generator=numbers) * scale).to(p)).sum() for p in self.parameters()]
        return torch.stack(parts).sum().float()


def layers_of(model: Any) -> list[Attention]:
    return [
        fused_qkv(model.qkv, model.qkv_bias, num_heads=HEADS, num_query_groups=GROUPS, head_dim=DIM, value_dim=VALUE),
        separate_qk(
            model.query, model.key, key_bias=model.key_bias, num_heads=HEADS, num_query_groups=GROUPS, head_dim=DIM
        ),
        latent_attention(
            model.query_up, model.key_value_up, num_heads=HEADS, nope_dim=NOPE, rope_dim=ROPE, value_dim=VALUE
        ),
    ]


def roles_of(dp: Comm, tp: Comm | None = None, everyone: Comm | None = None) -> Roles:
    axes = Axes(dp=dp, tp=tp or Alone())
    return Roles(dense=axes, expert=axes, everyone=everyone or dp)


def build(
    model: nn.Module, roles: Roles, wrapper: dict[str, Any] | None = None, **fields: Any
) -> tuple[nn.Module, Optimizer]:
    chunk: nn.Module = model
    if wrapper is not None:
        chunk = DistributedDataParallel(DistributedDataParallelConfig(**wrapper), model, groups=roles)
    return chunk, get_optimizer(OptimizerConfig(**{**SGD, **fields}), [chunk], {}, pg_collection=roles)
