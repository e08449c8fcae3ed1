"""A small model with weights in fp8, and ranks as threads that train it on gradients known to the bit."""

from typing import Any, NamedTuple

import torch
from parity import roles_over
from recording_comm import Call, RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm
from opt_kernels.quantized import QuantizedTensor, quantize_linears_, quantized
from opt_stack import Optimizer, get_optimizer

STEPS = 4
SHAPES = ((192, 160), (64, 192), (5, 64))  # squares of 128 that do not fill, more columns than rows, few rows


def make_model(recipe: str | None, *, seed: int = 0) -> nn.Sequential:
    """Linear layers in bf16. With a recipe, weights are in fp8 and biases in bf16."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(cols, rows, dtype=torch.bfloat16) for rows, cols in SHAPES])
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 8)
    if recipe is not None:
        quantize_linears_(model, recipe)
    return model


def fp8_params(model: nn.Module) -> list[QuantizedTensor]:
    return [param for param in model.parameters() if isinstance(param, QuantizedTensor)]


def set_grads(model: nn.Module, step: int) -> None:
    """Equal on all ranks: 64ths, whose sums and means are exact."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in model.parameters():
        grad = (torch.randint(-32, 32, param.shape, generator=generator) / 64).to(param.dtype)
        if getattr(param, "main_grad", None) is not None:
            param.main_grad.copy_(grad)  # type: ignore[attr-defined]
        else:
            param.grad = grad


def stored(model: nn.Module) -> list[Tensor]:
    """Copies of codes, scales and other parameters."""
    fp8 = [tensor.clone() for param in fp8_params(model) for tensor in (param.codes, param.scales)]
    return [*fp8, *(param.detach().clone() for param in model.parameters() if quantized(param) is None)]


def everything(model: nn.Module) -> list[Tensor]:
    """Histories, too."""
    histories = [tensor.clone() for param in fp8_params(model) for tensor in param.extra().values()]
    return [*histories, *stored(model)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


class Run(NamedTuple):
    """One rank's run."""

    model: nn.Module
    optimizer: Optimizer
    calls: list[Call]  # of the last step
    stored: list[Tensor]


def build(
    comm: Comm, recipe: str | None, *, wraps: bool = False, wrapping: dict[str, Any] | None = None, **fields: Any
) -> tuple[nn.Module, nn.Module, Optimizer]:
    """The model, the module given to the optimizer, and the optimizer."""
    model = make_model(recipe)
    roles = roles_over(comm)
    config = OptimizerConfig(**{"lr": 1e-2, "bf16": True, "clip_grad": 0.0, "fp8_recipe": recipe, **fields})
    chunk: nn.Module = model
    if wraps:
        sharded = config.use_distributed_optimizer or config.use_layer_wise_distributed_optimizer
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            fp8_param_gather=sharded and recipe is not None,
            overlap_param_gather=config.overlap_param_gather,
            **{"grad_reduce_in_fp32": True, **(wrapping or {})},
        )
        chunk = DistributedDataParallel(ddp_config, model, groups=roles, optimizer_config=config)
    return model, chunk, get_optimizer(config, [chunk], pg_collection=roles)


def train(ranks: int, recipe: str | None, *, steps: int = STEPS, **options: Any) -> list[Run]:
    """Every rank's run."""

    def rank_main(comm: Comm) -> Run:
        recording = RecordingComm(comm)
        model, chunk, optimizer = build(recording, recipe, **options)
        for step in range(steps):
            set_grads(model, step)
            recording.calls.clear()
            assert optimizer.step().success
            optimizer.zero_grad()
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_param_sync()
        return Run(model, optimizer, list(recording.calls), stored(model))

    return run_threads(ranks, rank_main)
