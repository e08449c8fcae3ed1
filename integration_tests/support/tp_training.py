"""Train a model under TP 2 x DP 2, and the same model whole."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from parity import Held
from torch import Tensor, nn
from tp_model import Grid, cut

from opt_config import OptimizerConfig
from opt_distributed.comm import Comm
from opt_kernels.hooks import GivenHooks
from opt_stack import get_optimizer

TP, DP = 2, 2

# name: whole shape, the dim that tensor parallelism cuts; None: every rank has all of it
SHAPES: Mapping[str, tuple[tuple[int, ...], int | None]] = {
    "column": ((24, 16), 0),
    "row": ((16, 40), 1),
    "qkv": ((48, 16), 0),
    "vocab": ((26, 16), 0),
    "vector": ((30,), 0),
    "norm": ((65,), None),
}
QKV = (6, 3, 3)  # four query groups: two on each tensor-parallel rank


class Net(nn.Module):
    """This rank's part of the model; `forward` takes its gradients."""

    def __init__(self, tp: Comm):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, (shape, dim) in SHAPES.items():
            held = Held(shape, torch.float32, generator)
            held.weight = nn.Parameter(cut(held.weight.detach(), tp.rank, tp.size, dim=dim))
            if dim is not None and tp.size > 1:
                held.weight.tensor_model_parallel, held.weight.partition_dim = True, dim
            self.add_module(name, held)
        self.vocab.weight.is_embedding_or_output_parameter = True
        self.qkv.weight.qkv_split_shapes = QKV

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([module(grads[name]) for name, module in self.named_children()]).sum()


def whole_grads(step: int, dp: int) -> dict[str, Tensor]:
    """Of data-parallel rank `dp`; even 64ths that cancel over two ranks make the mean the same for any number."""
    generator = torch.Generator().manual_seed(step)
    found = {}
    for name, (shape, _) in SHAPES.items():
        mean = 2 * torch.randint(-32, 32, shape, generator=generator) + 1
        found[name] = (mean + (2 - 4 * dp) * torch.randint(0, 8, shape, generator=generator)) / 64
    return found


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    num_zeros: list[int | None]


def train(config: OptimizerConfig, grid: Grid, *, steps: int = 3, hooks: GivenHooks = ()) -> Trained:
    net = Net(grid.tp)
    optimizer = get_optimizer(config, [net], {}, pg_collection=grid.roles, hooks=hooks)
    norms, zeros = [], []
    for step in range(steps):
        grads = whole_grads(step, grid.dp.rank if grid.dp.size > 1 else 0)
        if grid.dp.size == 1:
            grads = {name: (grad + whole_grads(step, 1)[name]) / 2 for name, grad in grads.items()}
        net(
            {name: cut(grad, grid.tp.rank, grid.tp.size, dim=SHAPES[name][1]) for name, grad in grads.items()}
        ).backward()
        result = optimizer.step()
        norms.append(result.grad_norm)
        zeros.append(result.num_zeros_in_grad)
        optimizer.zero_grad()
    return Trained({name: held.weight.detach().clone() for name, held in net.named_children()}, norms, zeros)


def joined(ranks: list[Trained], *, tp: int = TP) -> dict[str, Tensor]:
    """The whole weights, from the tensor-parallel ranks of the first replica."""
    found = {}
    for name, (_, dim) in SHAPES.items():
        parts = [rank.weights[name] for rank in ranks[:tp]]
        found[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return found


def config(**changes: Any) -> OptimizerConfig:
    base = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 3.0, "muon_fp32_matmul_prec": "highest"}
    return OptimizerConfig(**{**base, **changes})
