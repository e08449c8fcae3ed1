"""A small model whose gradients are known to the bit, and ranks as threads that train it in a layout and format."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from opt_checkpoint import sharded_model
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, get_optimizer

LR = 0.02
WEIGHT_DECAY = 0.1
MAX_NORM = 3.0
SCALE = 2.0**8


class Spread(Enum):
    REPLICATED = "replicated"
    FLAT = "flat"
    WHOLE = "whole"


class Numbers(Enum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    REMAINDER = "remainder"

    @property
    def dtype(self) -> torch.dtype:
        return {Numbers.FP32: torch.float32, Numbers.FP16: torch.float16}.get(self, torch.bfloat16)


class Wrapping(Enum):
    PLAIN = "plain"
    WRAPPED = "wrapped"
    OVERLAP = "overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the model is trained."""

    size: int  # ranks
    spread: Spread
    numbers: Numbers
    rule: str
    clips: bool
    wrapping: Wrapping

    def __str__(self) -> str:
        clip = "clip" if self.clips else "no-clip"
        return f"{self.rule}-{self.size}-{self.spread.value}-{self.numbers.value}-{clip}-{self.wrapping.value}"

    @property
    def config(self) -> OptimizerConfig:
        numbers: dict[str, Any] = {
            Numbers.FP32: {},
            Numbers.BF16: {"bf16": True},
            Numbers.FP16: {"fp16": True, "initial_loss_scale": SCALE},
            Numbers.REMAINDER: {"bf16": True, "use_precision_aware_optimizer": True},
        }[self.numbers]
        sharded = self.spread is not Spread.REPLICATED
        return OptimizerConfig(
            optimizer=self.rule,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            clip_grad=MAX_NORM if self.clips else 0.0,
            use_distributed_optimizer=self.spread is Spread.FLAT,
            use_layer_wise_distributed_optimizer=self.spread is Spread.WHOLE,
            overlap_param_gather=sharded and self.wrapping is Wrapping.OVERLAP,
            # Ranks stack other matrices: at lower precision products would round differently.
            muon_fp32_matmul_prec="highest",
            **numbers,
        )

    @property
    def ddp_config(self) -> DistributedDataParallelConfig:
        sharded = self.spread is not Spread.REPLICATED
        overlaps = self.wrapping is Wrapping.OVERLAP
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=sharded and overlaps,
            bucket_size=300 if overlaps else None,
        )

    @property
    def alone(self) -> "Case":
        """The same training in one process."""
        return replace(self, size=1, spread=Spread.REPLICATED, wrapping=Wrapping.PLAIN)


# --- the model --------------------------------------------------------------------------------------------------------

SHAPES: Mapping[str, tuple[int, ...]] = {  # awkward for 64-element starts, for 3 ranks, for buckets of 300
    "embedding": (13, 16),
    "first": (24, 16),
    "bias": (7,),
    "qkv": (36, 16),
    "second": (16, 40),
    "norm": (65,),
    "router": (5, 8),  # fp32 in every model, in one group with 16-bit ones
    "scale": (1,),
}


class Held(nn.Module):
    """One parameter. `forward(g)` has the gradient g."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator):
        super().__init__()
        self.weight = nn.Parameter((torch.rand(shape, generator=generator) - 0.5).to(dtype))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad.to(self.weight.dtype)).float().sum()


class Net(nn.Module):
    """Parameters of many shapes. `forward` takes their gradients, so that a test knows them to the bit."""

    def __init__(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]] = SHAPES):
        super().__init__()
        generator = torch.Generator().manual_seed(3)  # not torch's own, which all threads share
        for name, shape in shapes.items():
            self.add_module(name, Held(shape, torch.float32 if name == "router" else dtype, generator))
        self.embedding.weight.is_embedding_or_output_parameter = True
        self.qkv.weight.qkv_split_shapes = (6, 3, 3)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([module(grads[name]) for name, module in self.named_children()]).sum()


def grads_of(step: int, rank: int, size: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """This rank's gradients: odd multiples of 1/64 below 1, shifted by even multiples that cancel over the ranks.

    So sums are exact in every dtype, their mean is the same for any `size`, and no momentum cancels to zero, where Lion
    would take the sign of a rounding error.
    """
    generator = torch.Generator().manual_seed(step)
    found = {}
    for name, shape in shapes.items():
        mean = 2 * torch.randint(-32, 32, shape, generator=generator) + 1
        away = 2 * torch.randint(-8, 8, shape, generator=generator)
        sign = 0 if size % 2 and rank == size - 1 else (-1) ** rank
        found[name] = (mean + sign * away) / 64
    return found


def roles_over(dp: Comm | None = None, tp: Comm | None = None, everyone: Comm | None = None) -> Roles:
    """Data-parallel ranks, tensor-parallel ones, or, with `everyone` alone, pipeline stages; experts as the rest."""
    axes = Axes(dp=dp or Alone(), tp=tp or Alone())
    return Roles(dense=axes, expert=axes, everyone=everyone or dp or tp or Alone())


def norms_while_training(
    model: nn.Module, optimizer: Optimizer, steps: range, comm: Comm, shapes: Mapping[str, tuple[int, ...]]
) -> list[float]:
    """Train, and return the gradient norm of each step; every weight is there in the end."""
    norms = []
    for step in steps:
        optimizer.scale_loss(model(grads_of(step, comm.rank, comm.size, shapes))).backward()
        result = optimizer.step()
        assert result.success
        norms.append(result.grad_norm)
        if isinstance(model, DistributedDataParallel):
            model.zero_grad_buffer()
        optimizer.zero_grad()
    if isinstance(model, DistributedDataParallel):
        model.finish_param_sync()
    return norms


def sharded_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What `opt_checkpoint` saves, or loads into."""
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


# --- one step in each layout ------------------------------------------------------------------------------------------

SPREADS = {
    "replicated": {},
    "flat": {"use_distributed_optimizer": True},
    "whole": {"use_layer_wise_distributed_optimizer": True},
}


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": LR, "clip_grad": 1.0, "muon_fp32_matmul_prec": "highest", **changes})


def step_once(config: OptimizerConfig, comm: Comm, *, hooks: Any = ()) -> Optimizer:
    """An optimizer after one step; the gradients stay where they were."""
    net = Net(torch.float32)
    optimizer = get_optimizer(config, [net], {}, pg_collection=roles_over(comm), hooks=hooks)
    net(grads_of(0, comm.rank, comm.size)).backward()
    optimizer.last = optimizer.step()
    return optimizer
