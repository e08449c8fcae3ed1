"""CPU benchmarks of the elementwise optimizers against torch's own sequences; `--json` writes the figures.

Every figure is a ratio: our step and its peer are measured alternately in one process, and the median of the ratios of
pairs is printed. Load on the machine then adds noise to a figure but no bias. The tensors have the shapes of Llama
layers.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends import grad_stats
from opt_kernels.optim import AdamW, Lion

NUM_LAYERS = 32
WIDTH = 352
HIDDEN = 960
VOCABULARY = 6000
LR = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One comparison: medians over pairs of alternating measurements."""

    name: str
    goal: float  # the largest acceptable ratio
    ratio: float  # ours / peer
    ours_ms: float
    peer_ms: float
    num_pairs: int


class Pair(NamedTuple):
    """Two implementations of the same work."""

    ours: Callable[[], None]
    peer: Callable[[], None]


def shapes() -> list[tuple[int, ...]]:
    """290 tensors, 50 million elements."""
    layer = [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)] + [(WIDTH,)] * 2
    return [*layer * NUM_LAYERS, (VOCABULARY, WIDTH), (WIDTH,)]


def parameters(dtype: torch.dtype) -> list[Tensor]:
    """Parameters with gradients whose norm is well above the clipping threshold."""
    generator = torch.Generator().manual_seed(0)
    params: list[Tensor] = []
    for shape in shapes():
        param = torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))
        param.grad = (torch.randn(shape, generator=generator) * 0.01).to(dtype)
        params.append(param)
    return params


class ReferenceSequence:
    """The usual bf16 training step with torch's fused ops: cast gradients, norm, clip, AdamW on mains, copy back."""

    def __init__(self, params: Sequence[Tensor], *, keep_gradients: bool) -> None:
        self.params = params
        self.mains = [torch.nn.Parameter(param.detach().float()) for param in params]
        self.kept = [torch.empty_like(main) for main in self.mains] if keep_gradients else None
        self.adam = torch.optim.AdamW(self.mains, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self) -> None:
        """Run one step."""
        for index, (param, main) in enumerate(zip(self.params, self.mains)):
            assert param.grad is not None
            main.grad = param.grad.float() if self.kept is None else self.kept[index].copy_(param.grad)
        torch.nn.utils.clip_grad_norm_(self.mains, MAX_NORM)
        self.adam.step()
        with torch.no_grad():
            for param, main in zip(self.params, self.mains):
                param.copy_(main)
        if self.kept is None:
            self.adam.zero_grad(set_to_none=True)


def fp32_adamw() -> Pair:
    """AdamW in float32 with clipping active, against clip_grad_norm_ and AdamW(fused=True)."""
    ours = AdamW(parameters(torch.float32), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM)
    params = parameters(torch.float32)
    theirs = torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)

    def peer() -> None:
        # Clipping overwrites the gradients, so from the second step on it scales them by 1, at the same cost.
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        theirs.step()

    return Pair(ours.step, peer)


def bf16_adamw(keep_gradients: bool) -> Pair:
    """bf16 parameters and gradients, fp32 mains and moments."""
    ours = AdamW(
        parameters(torch.bfloat16),
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        max_norm=MAX_NORM,
        mains="float32",
    )
    return Pair(ours.step, ReferenceSequence(parameters(torch.bfloat16), keep_gradients=keep_gradients).step)


def remainder_adamw() -> Pair:
    """bf16 parameters, remainders and moments: 6 bytes of state per parameter instead of 12."""
    ours = AdamW(
        parameters(torch.bfloat16),
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        max_norm=MAX_NORM,
        mains="remainder",
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
    )
    return Pair(ours.step, ReferenceSequence(parameters(torch.bfloat16), keep_gradients=False).step)


def narrow_adamw(exp_avg: torch.dtype, exp_avg_sq: torch.dtype) -> Pair:
    """float32 parameters with moments in fewer bits, against AdamW(fused=True) with float32 moments."""
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    ours = AdamW(parameters(torch.float32), exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq, **options)
    return Pair(ours.step, torch.optim.AdamW(parameters(torch.float32), fused=True, **options).step)


def lion() -> Pair:
    """Lion in float32, against copying the parameters once."""
    params = parameters(torch.float32)
    ours = Lion(params, lr=LR, weight_decay=WEIGHT_DECAY)
    copies = [torch.empty_like(param) for param in params]

    def peer() -> None:
        with torch.no_grad():
            for copy, param in zip(copies, params):
                copy.copy_(param)

    return Pair(ours.step, peer)


def statistics_sweep(dtype: torch.dtype, count_zeros: bool) -> Pair:
    """The statistics sweep, against torch.nn.utils.get_total_norm's foreach norm."""
    grads = [param.grad for param in parameters(dtype) if param.grad is not None]

    def ours() -> None:
        grad_stats(grads, count_zeros=count_zeros)

    def peer() -> None:
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))

    return Pair(ours, peer)


# By figure: its goal, and the function that builds the two steps.
COMPARISONS: Mapping[str, tuple[float, Callable[[], Pair]]] = {
    "fp32 AdamW with clipping / clip_grad_norm_ + fused AdamW": (0.85, fp32_adamw),
    "bf16 AdamW, fp32 mains / reference sequence": (0.50, lambda: bf16_adamw(False)),
    "bf16 AdamW, fp32 mains / reference sequence, gradients kept": (0.60, lambda: bf16_adamw(True)),
    "bf16 AdamW, remainders, bf16 moments / reference sequence": (1.25, remainder_adamw),
    "fp32 AdamW, fp16 moments / fused AdamW": (1.0, lambda: narrow_adamw(torch.float16, torch.float16)),
    "fp32 AdamW, e4m3 moments / fused AdamW": (1.0, lambda: narrow_adamw(torch.float8_e4m3fn, torch.float8_e4m3fn)),
    "fp32 AdamW, e5m2 moments / fused AdamW": (1.0, lambda: narrow_adamw(torch.float8_e5m2, torch.float8_e5m2)),
    "fp32 AdamW, 8-bit moments / fused AdamW": (1.0, lambda: narrow_adamw(torch.int8, torch.uint8)),
    "fp32 Lion / one copy of the parameters": (2.0, lion),
    "fp32 statistics / foreach norm": (1.0, lambda: statistics_sweep(torch.float32, False)),
    "bf16 statistics / foreach norm": (1.0, lambda: statistics_sweep(torch.bfloat16, False)),
}


def milliseconds(step: Callable[[], None]) -> float:
    """Time of one call in milliseconds."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def compare(name: str, *, num_pairs: int) -> Figure:
    """Measure ours and the peer alternately, after two warm-ups of each."""
    goal, build = COMPARISONS[name]
    ours, peer = build()
    for step in (ours, peer, ours, peer):
        step()
    pairs = [(milliseconds(ours), milliseconds(peer)) for _ in range(num_pairs)]
    return Figure(
        name=name,
        goal=goal,
        ratio=statistics.median(a / b for a, b in pairs),
        ours_ms=statistics.median(a for a, _ in pairs),
        peer_ms=statistics.median(b for _, b in pairs),
        num_pairs=num_pairs,
    )


def main() -> None:
    """Print a line per figure, and write them as JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--pairs", type=int, default=21, help="pairs per figure (default: 21)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--only", default="", help="only the figures whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = [compare(name, num_pairs=arguments.pairs) for name in COMPARISONS if arguments.only in name]
    for f in figures:
        print(f"{f.ratio:6.3f}  (goal {f.goal:.2f})  {f.ours_ms:8.2f} ms / {f.peer_ms:8.2f} ms  {f.name}")
    if arguments.json:
        machine = {"processor": platform.processor(), "threads": arguments.threads, "torch": torch.__version__}
        record = {"machine": machine, "figures": [asdict(figure) for figure in figures]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
