"""Muon's rounds of the same tensors may differ in rule and split, and gradients may move."""

import pytest
import torch
from torch import Tensor

from opt_kernels.rules import MuonRule
from opt_kernels.works import Batch, Hyper, MatrixSpec, Work, Works

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.needs_extra

HYPER = Hyper(lr=0.1, momentum=0.9)
PLAIN = MuonRule(backend="triton", num_ns_steps=1)
SCALED = MuonRule(backend="triton", num_ns_steps=1, extra_scale_factor=3.0)
OF_HEADS = MatrixSpec(split_rows=(2,), by_group=True)


def works_of(split: MatrixSpec, tensors: list[list[Tensor]]) -> Works:
    grads, mains, momenta = tensors
    return Works(
        grads, mains=mains, states=[{"momentum_buffer": momentum} for momentum in momenta],
        matrices=[split] * len(mains),
    )  # fmt: skip


def tensors() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(4, 6, generator=generator) for _ in range(3)] for _ in range(3)]


def test_rounds_of_the_same_tensors_may_differ() -> None:
    """Two rules and two splits take turns on the same memory."""
    turns = [(PLAIN, MatrixSpec()), (SCALED, MatrixSpec()), (PLAIN, OF_HEADS), (SCALED, OF_HEADS)] * 2
    shared, fresh = tensors(), tensors()
    for rule, split in turns:
        rule.update_([Batch(HYPER, works_of(split, shared))])
        fresh = [[tensor.clone() for tensor in column] for column in fresh]
        works = [
            Work(grad=grad, main=main, state={"momentum_buffer": momentum}, matrix=split)
            for grad, main, momentum in zip(*fresh, strict=True)
        ]
        rule.update_([Batch(HYPER, works)])
    assert all(torch.equal(a, b) for one, other in zip(shared, fresh, strict=True) for a, b in zip(one, other))
