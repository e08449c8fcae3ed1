"""Matrices, and steps of matrix rules with their gradients."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opt_kernels.rules import init_state
from opt_kernels.works import NOT_SPLIT, Batch, Hyper, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.9, 0.95), eps=1e-8)


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grads_of(*shape: int, steps: int = 3) -> list[Tensor]:
    """Gradients with a part that stays, as in training: factors have eigenvalues that are apart."""
    signal = tensor(*shape) * torch.logspace(0.5, -0.5, shape[-1])
    return [signal + 0.3 * tensor(*shape, seed=seed) for seed in range(1, steps + 1)]


def stepped(
    rule: Any, grads: list[Tensor], *works: Work, grad_scale: Any = 1.0, first: int = 1, hyper: Hyper = HYPER
) -> None:
    for step, grad in enumerate(grads, start=first):
        batch = Batch(replace(hyper, step=step), [replace(work, grad=grad) for work in works])
        rule.update_([batch], grad_scale=grad_scale)


def work_of(rule: Any, main: Tensor, **work: Any) -> Work:
    return Work(grad=main, main=main, state=init_state(rule, main, work.get("matrix", NOT_SPLIT)), **work)


def moved(rule: Any, main: Tensor, *grads: Tensor, grad_scale: Any = 1.0, hyper: Hyper = HYPER, **work: Any) -> Tensor:
    main = main.clone()
    stepped(rule, list(grads), work_of(rule, main, **work), grad_scale=grad_scale, hyper=hyper)
    return main
