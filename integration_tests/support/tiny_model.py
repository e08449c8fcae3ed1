"""A small transformer that one process or the ranks of a world train, and its batches."""

import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

DIM, CONTEXT, VOCAB = 16, 12, 31
_SEEDED = threading.Lock()  # ranks that are threads share torch's generator


class Tiny(nn.Module):
    """A transformer of one layer: matrices, biases, norms, an embedding, a head. `forward` gives the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        # No biases inside: a key's bias has no effect on the loss, so its gradient is rounding noise, and Adam turns
        # noise into full-size steps that differ between any two orders of summation.
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, 0.0, batch_first=True, norm_first=True, bias=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, codes: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embedding(codes[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), codes[:, 1:].flatten())


def make_model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tiny:
    """The same weights for the same seed, on every rank and in every dtype (rounded)."""
    with _SEEDED:
        torch.manual_seed(seed)
        return Tiny().to(dtype)


def joined_batch(step: int, *, size: int = 8) -> Tensor:
    """The joined batch of all ranks in a step."""
    return torch.randint(VOCAB, (size, CONTEXT + 1), generator=torch.Generator().manual_seed(100 + step))


def my_batch(step: int) -> Tensor:
    """This rank's equal part of the joined batch."""
    return joined_batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]


def train_here(
    config: OptimizerConfig, *, steps: int, dtype: torch.dtype = torch.float32, overrides: Any = None
) -> Trained:
    """One process on the joined batch."""
    model = make_model(dtype)
    optimizer = get_optimizer(config, [model], overrides)
    norms = []
    for step in range(steps):
        optimizer.scale_loss(model(joined_batch(step))).backward()
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    return Trained(weights(model), norms)
