"""Parameters in fp8 on a device that runs its work later: the codes of a CPU, in every legal order of the work.

More orders at night.
"""

from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredComm, run_deferred
from fp8_training import build, everything, same
from on_device import NUM_ORDERS, launch_rules_, launched
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm
from opt_kernels.quantized import RECIPES

pytestmark = pytest.mark.usefixtures(launched.__name__)
RANKS, STEPS, BAD_STEP = 2, 3, 1
ZERO = {"use_distributed_optimizer": True}
WRAPPED = {**ZERO, "wraps": True, "wrapping": {"overlap_grad_reduce": True, "bucket_size": 12_000}}
PLACES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "flat": ZERO,
    "wrapped": WRAPPED,
    "overlapped": {**WRAPPED, "overlap_param_gather": True},
}


def backward(model: nn.Module, step: int, rank: int) -> None:
    """Gradients of 64ths that cancel in part; one is infinite."""
    numbers = torch.Generator().manual_seed(50 + step)
    for param in model.parameters():
        grad = (2 * torch.randint(-16, 16, param.shape, generator=numbers) + 1 + 4 * (-1) ** rank) / 64
        if step == BAD_STEP and rank == 1:
            grad.view(-1)[0] = torch.inf
        (param * grad.to(param.dtype)).sum().backward()


def train(comm: Comm, recipe: str, place: str) -> tuple[list[Tensor], list[Any]]:
    """What is stored at last, and the results. One of the steps overflows."""
    model, chunk, optimizer = build(comm, recipe, clip_grad=1.0, **PLACES[place])
    if isinstance(comm, DeferredComm):
        launch_rules_(optimizer)
    results = []
    for step in range(STEPS):
        backward(model, step, comm.rank)
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_grad_sync()
        results.append(optimizer.step())
        optimizer.zero_grad()
    if isinstance(chunk, DistributedDataParallel):
        chunk.finish_param_sync()
    assert [result.success for result in results] == [step != BAD_STEP for step in range(STEPS)]
    return everything(model), [tuple(result) for result in results]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_order_gives_the_codes_of_a_cpu(recipe: str, place: str) -> None:
    expected = run_threads(RANKS, partial(train, recipe=recipe, place=place))
    for seed in range(NUM_ORDERS):
        found = run_deferred(RANKS, lambda one: train(one.comm, recipe, place), seed=seed)
        for (tensors, results), (want, want_results) in zip(found, expected, strict=True):
            assert same(tensors, want), f"seed {seed}"
            assert repr(results) == repr(want_results)
