"""A model with experts on a grid of ranks, whose gradients have known norms and zeros; `tp_model` runs it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from parity import Held
from torch import Tensor, nn
from tp_model import Place, cut

from opt_distributed.comm import Comm


class Shape(NamedTuple):
    size: tuple[int, ...]
    cut: int | None  # the dim that tensor parallelism cuts; None: every tensor-parallel rank has all of it


DENSE: Mapping[str, Shape] = {"column": Shape((8, 6), 0), "row": Shape((6, 8), 1), "norm": Shape((5,), None)}
EXPERT: Mapping[str, Shape] = {"up": Shape((8, 4), 0), "bias": Shape((7,), None)}


class Net(nn.Module):
    """This rank's part of the model; `forward` takes the gradients by name."""

    def __init__(
        self,
        place: Place,
        *,
        dense: Mapping[str, Shape] = DENSE,
        expert: Mapping[str, Shape] = EXPERT,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        for name, shape in dense.items():
            self.add_module(name, _held(shape, place.tp, dtype))
        for number in place.experts:
            for name, shape in expert.items():
                held = _held(shape, place.expert_tp, dtype)
                held.weight.allreduce = False
                self.add_module(f"{name}{number}", held)

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([module(grads[name]) for name, module in self.named_children()]).sum()


def _held(shape: Shape, tp: Comm, dtype: torch.dtype) -> Held:
    held = Held(shape.size, dtype, torch.Generator().manual_seed(1))
    held.weight = nn.Parameter(cut(held.weight.detach(), tp.rank, tp.size, dim=shape.cut))
    if shape.cut is not None and tp.size > 1:
        held.weight.tensor_model_parallel, held.weight.partition_dim = True, shape.cut
    return held


def gradients(shapes: Mapping[str, Shape], seed: int, suffix: str = "") -> dict[str, Tensor]:
    """Whole gradients in 64ths, a fifth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    return {f"{n}{suffix}": torch.randint(-2, 3, s.size, generator=generator) / 64 for n, s in shapes.items()}


def parts(
    place: Place,
    seed: int = 0,
    *,
    dense: Mapping[str, Shape] = DENSE,
    expert: Mapping[str, Shape] = EXPERT,
    replicas: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """This rank's local gradients, as the replicas of dense parameters and of experts given, by default its own."""
    of_dense, of_expert = replicas or (place.dp.rank, place.expert_dp.rank)
    found = {}
    for name, grad in gradients(dense, seed + of_dense).items():
        found[name] = cut(grad, place.tp.rank, place.tp.size, dim=dense[name].cut)
    for number in place.experts:
        for name, grad in gradients(expert, seed + 100 + 10 * number + of_expert, str(number)).items():
            dim = expert[name.rstrip("0123456789")].cut
            found[name] = cut(grad, place.expert_tp.rank, place.expert_tp.size, dim=dim)
    return found


def mean_gradients(
    *,
    dp: int,
    ep: int,
    expert_dp: int,
    seed: int = 0,
    dense: Mapping[str, Shape] = DENSE,
    expert: Mapping[str, Shape] = EXPERT,
) -> dict[str, Tensor]:
    """Of the whole model, in float64. An expert receives tokens of all dense replicas, so its gradient is a sum."""
    means = {name: sum(gradients(dense, seed + rank)[name].double() for rank in range(dp)) / dp for name in dense}
    for number in range(ep):
        for name in expert:
            seeds = range(seed + 100 + 10 * number, seed + 100 + 10 * number + expert_dp)
            means[f"{name}{number}"] = sum(gradients(expert, one)[name].double() for one in seeds) / dp
    return means


GRIDS = {
    "tp 4": {"tp": 4, "ep": 1, "etp": 4},
    "ep 4": {"tp": 1, "ep": 4, "etp": 1},
    "tp 4, ep 4": {"tp": 4, "ep": 4, "etp": 1},
    "tp 2, ep 2, etp 2": {"tp": 2, "ep": 2, "etp": 2},
    "tp 2, ep 2": {"tp": 2, "ep": 2, "etp": 1},
    "tp 4, ep 2, etp 2": {"tp": 4, "ep": 2, "etp": 2},
}
KINDS = {"replicated": {}, "flat": {"use_distributed_optimizer": True}}
