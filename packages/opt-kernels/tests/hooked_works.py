"""Works for tests of hooks, and the formats of their values."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hook_oracle import BETAS, EPS, LR, MOMENTUM, WD
from torch import Tensor

from opt_kernels.codecs import split_
from opt_kernels.rules import Rule
from opt_kernels.works import Batch, Hyper, Work

HYPER = Hyper(lr=LR, weight_decay=WD, betas=BETAS, eps=EPS, momentum=MOMENTUM)
SHAPE = (24, 40)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """In which dtypes a parameter is kept."""

    main: torch.dtype | None = torch.float32
    out: torch.dtype | None = None
    grad: torch.dtype = torch.float32

    def work(self, rule: Rule, start: Tensor) -> Work:
        main = None if self.main is None else start.to(self.main, copy=True)
        out = None if self.out is None else start.to(self.out, copy=True)
        remainder = None
        if main is None:
            out, remainder = torch.empty_like(start, dtype=torch.bfloat16), torch.empty_like(start, dtype=torch.int16)
            split_(out, remainder, start.float())
        like = start.float() if main is None else main
        grad = torch.zeros_like(start, dtype=self.grad)
        return Work(grad=grad, main=main, out=out, remainder=remainder, state=rule.init_state(like))


def start_of(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    """Weights that bfloat16 has exactly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def run(rule: Rule, work: Work, grads: list[Tensor], *, scale: Any = 1.0, **options: Any) -> Work:
    for step, grad in enumerate(grads, start=1):
        work = replace(work, grad=grad.to(work.grad.dtype))
        rule.update_([Batch(replace(HYPER, step=step, **options), [work])], grad_scale=scale)
    return work
