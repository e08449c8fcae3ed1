"""The examples' model and data: a character-level GPT, on the source text of Python's standard library."""

import math
import os
import platform
import sysconfig
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 128  # ASCII; any other character becomes one stand-in
CONTEXT = 128  # characters a model sees


def stdlib_text(num_bytes: int = 6_000_000) -> Tensor:
    """The standard library's modules, in a fixed order, as character codes (n,) int64."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts
    )
    text = []
    size = 0
    for path in files:
        text.append(path.read_bytes())
        size += len(text[-1])
        if size >= num_bytes:
            break
    codes = torch.frombuffer(bytearray(b"".join(text)[:num_bytes]), dtype=torch.uint8).long()
    return codes.clamp(max=VOCAB - 1)


def measured_on() -> dict[str, str]:
    """The date and the machine, for files of results."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return {"date": datetime.now(UTC).date().isoformat(), "machine": f"{model}, {os.cpu_count()} cores"}


def bigram_bits(train: Tensor, held_out: Tensor) -> float:
    """Bits per character of held-out text for a bigram model: character frequencies given the previous one in
    `train`."""
    counts = torch.ones(VOCAB, VOCAB, dtype=torch.float64)
    counts.view(-1).index_add_(0, train[:-1] * VOCAB + train[1:], torch.ones(len(train) - 1, dtype=torch.float64))
    probability = counts / counts.sum(1, keepdim=True)
    return -probability[held_out[:-1], held_out[1:]].log2().mean().item()


def compute_dtype() -> torch.dtype:
    """The dtype for products with bf16 weights: CPUs without AVX-512 are up to 20 times slower in bf16."""
    return torch.bfloat16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else torch.float32


class Linear(nn.Linear):
    """A linear layer that computes in its input's dtype: casts the weight in forward, and its gradient in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """A layer norm that computes in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = LayerNorm(dim)
        self.norm_2 = LayerNorm(dim)
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)
        self.up = Linear(dim, 4 * dim)
        self.down = Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class CharGPT(nn.Module):
    """A GPT over characters; `forward` returns the mean loss in nats.

    `compute`: the dtype of activations and products; None: the dtype of the weights.
    """

    def __init__(self, *, dim: int = 144, depth: int = 4, num_heads: int = 4, compute: torch.dtype | None = None):
        super().__init__()
        self.compute = compute
        self.embedding = nn.Embedding(VOCAB, dim)
        self.position = nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(depth)))
        self.norm = LayerNorm(dim)
        self.head = Linear(dim, VOCAB, bias=False)
        self.apply(self._init)
        for (
            block
        ) in self.blocks:  # residual branches start small, so that depth does not change the scale of the output
            nn.init.normal_(block.proj.weight, std=0.02 / math.sqrt(2 * depth))
            nn.init.normal_(block.down.weight, std=0.02 / math.sqrt(2 * depth))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.5 if isinstance(module, nn.Embedding) else 0.02)

    def forward(self, codes: Tensor) -> Tensor:  # (batch, context + 1)
        inputs = codes[:, :-1]
        targets = codes[:, 1:]
        x = self.embedding(inputs) + self.position.weight[: inputs.size(1)]
        logits = self.head(self.norm(self.blocks(x.to(self.compute or x.dtype))))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch_at(step: int, text: Tensor, *, size: int, context: int) -> Tensor:
    """The global batch of a step (size, context + 1): a function of the step alone, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(1_000_003 * step + 17)
    starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
    return text[starts[:, None] + torch.arange(context + 1)]
