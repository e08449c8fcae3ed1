"""Two small models that learn tokens, and the loop that trains them, with a place for each kind of damage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from parity import roles_over
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed.comm import Comm
from opt_stack import Optimizer, get_optimizer

VOCABULARY = 48
WIDTH = 24
LENGTH = 16


class Block(nn.Module):
    """Attention and an MLP, with pre-normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.ln_1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.out(F.gelu(self.up(self.ln_2(x))))


class Experts(nn.Module):
    """Four experts, of which each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(4))
        self.alive = [True] * 4

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln(x)
        scores = self.router(normed)
        chosen = scores.masked_fill(scores < scores.topk(2, -1).values[..., 1:], -torch.inf)
        shares = chosen.softmax(-1)
        for expert in range(4):
            if self.alive[expert]:
                x = x + shares[..., expert, None] * self.out[expert](F.relu(self.up[expert](normed)))
        return x


class Tokens(nn.Module):
    """Predicts the next token."""

    def __init__(self, blocks: Sequence[nn.Module], seed: int):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if param.dim() == 2:
                    scale = 0.1 if name[:2] in ("wt", "wp") else param.shape[1] ** -0.5
                    param.copy_(torch.randn(param.shape, generator=generator) * scale)
                elif name.endswith("bias"):
                    param.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": lambda seed: Tokens([Block() for _ in range(3)], seed),
    "experts": lambda seed: Tokens([Experts() for _ in range(2)], seed),
}


class Batch:
    """Tokens that follow one another by a fixed table, with noise."""

    def __init__(self, seed: int, size: int):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7))
        tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
        noise = torch.rand(size, LENGTH, generator=generator)
        for at in range(LENGTH):
            follows = noise[:, at] < 0.8
            tokens[:, at + 1] = torch.where(follows, table[tokens[:, at]], tokens[:, at + 1])
        self.inputs = tokens[:, :-1]
        self.labels = tokens[:, 1:]


@dataclass
class Trial:
    """A run that can be damaged: each of the callables gets the trial, whose `step` is the optimizer's."""

    model: nn.Module
    optimizer: Optimizer
    seed: int = 0
    size: int = 8
    num_micro: int = 1
    schedule: Callable[[int], float] | None = None  # of the rates, as a factor of the group's first
    rank: int = 0
    step: int = 0
    first_rates: list[float] = field(default_factory=list)

    def batch(self, step: int, micro: int = 0, rank: int | None = None) -> Batch:
        place = 1000 * self.seed + (self.rank if rank is None else rank)
        return Batch(10_000 * place + 10 * step + micro, self.size)

    def losses(self, batch: Batch) -> Tensor:
        logits = self.model(batch.inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="none")


def nothing(trial: Trial, *given: Any) -> None:
    return None


@dataclass(frozen=True)
class Damage:
    """What happens at the places of a step: callables of the trial."""

    before: Callable[[Trial], object] = nothing  # weights, state, rates
    batch: Callable[[Trial, Batch], object] = nothing
    loss: Callable[[Trial, Tensor], Tensor | None] = nothing  # of the losses of all tokens, (n,); None: their mean
    grads: Callable[[Trial], object] = nothing
    clears: Callable[[Trial], bool | None] = nothing  # whether `zero_grad` is called; None: yes


def begin(
    folder: Path | None,
    *,
    model: str = "gpt",
    seed: int = 0,
    every: int = 1,
    comm: Comm | None = None,
    overrides: Any = None,
    dtype: torch.dtype = torch.float32,
    trial: dict[str, Any] | None = None,
    **fields: Any,
) -> Trial:
    """Return a trial that records to `folder`."""
    net = MODELS[model](seed).to(dtype)
    config = OptimizerConfig(**{"lr": 3e-3, **fields})
    options = {} if comm is None else {"pg_collection": roles_over(comm)}
    optimizer = get_optimizer(config, [net], overrides, **options)
    if folder is not None:
        optimizer.stats_every(every, directory=folder)
    made = Trial(net, optimizer, seed, rank=0 if comm is None else comm.rank, **(trial or {}))
    made.first_rates = [group["lr"] for group in optimizer.param_groups]
    return made


def train(trial: Trial, last: int, damage: Damage = Damage()) -> None:
    """Train up to step `last`, with `damage`."""
    optimizer = trial.optimizer
    while trial.step < last:
        trial.step += 1
        if trial.schedule is not None:
            for group, rate in zip(optimizer.param_groups, trial.first_rates, strict=True):
                group["lr"] = rate * trial.schedule(trial.step)
        damage.before(trial)
        for micro in range(trial.num_micro):
            batch = trial.batch(trial.step, micro)
            damage.batch(trial, batch)
            losses = trial.losses(batch)
            loss = damage.loss(trial, losses)
            if loss is None:
                loss = losses.mean() / trial.num_micro
            optimizer.note_loss(loss.detach())
            optimizer.scale_loss(loss).backward()
        damage.grads(trial)
        optimizer.step()
        if damage.clears(trial) is not False:
            optimizer.zero_grad()
