"""Parameters in fp8 on a device that runs its work later: the codes of a CPU, in every legal order of the work.

More orders at night.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from fake_accelerator import DeferredComm, DeferredRank, run_deferred
from fp8_training import Stored, build, fp8_params, stored
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


class Trained(NamedTuple):
    stored: Stored
    histories: list[Tensor]
    results: list[tuple[Any, ...]]

    def equals(self, other: "Trained") -> bool:
        same = all(map(torch.equal, self.histories, other.histories))
        return same and self.stored.equals(other.stored) and repr(self.results) == repr(other.results)


def backward(model: nn.Module, step: int, rank: int) -> None:
    """Gradients of 64ths that cancel in part; one is infinite."""
    numbers = torch.Generator().manual_seed(50 + step)
    for param in model.parameters():
        grad = (2 * torch.randint(-16, 16, param.shape, generator=numbers) + 1 + 4 * (-1) ** rank) / 64
        if step == BAD_STEP and rank == 1:
            grad.view(-1)[0] = torch.inf
        (param * grad.to(param.dtype)).sum().backward()


def train(comm: Comm, recipe: str, place: str) -> Trained:
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
    histories = [tensor.clone() for param in fp8_params(model) for tensor in param.extra().values()]
    return Trained(stored(model), histories, [tuple(result) for result in results])


def on_device(one: DeferredRank, recipe: str, place: str) -> Trained:
    return train(one.comm, recipe, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_order_gives_the_codes_of_a_cpu(recipe: str, place: str) -> None:
    """One of the steps overflows."""
    expected = run_threads(RANKS, partial(train, recipe=recipe, place=place))
    assert [result[0] for result in expected[0].results] == [step != BAD_STEP for step in range(STEPS)]
    for seed in range(NUM_ORDERS):
        found = run_deferred(RANKS, partial(on_device, recipe=recipe, place=place), seed=seed)
        assert all(one.equals(other) for one, other in zip(found, expected, strict=True)), f"seed {seed}"
