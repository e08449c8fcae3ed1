"""Parameters in fp8 on a device that runs its work later: the codes of a CPU, in every legal order of the work.

More orders at night.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from fake_accelerator import DeferredComm, DeferredRank, run_deferred
from fp8_training import Stored, fp8_params, stored
from on_device import NUM_ORDERS, LaunchedRule, launched
from parity import roles_over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm, Op
from opt_distributed.pieces import QuantizedMain, QuantizedSource
from opt_kernels.quantized import RECIPES, quantize_linears_
from opt_stack import get_optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)
RANKS, STEPS, BAD_STEP = 2, 3, 1
SHAPES = ((8, 32), (4, 32))
ZERO = {"use_distributed_optimizer": True}
PLACES: dict[str, tuple[dict[str, Any], bool]] = {
    "replicated": ({}, False),
    "flat": (ZERO, False),
    "wrapped": (ZERO, True),
    "overlapped": ({**ZERO, "overlap_param_gather": True}, True),
}


class Trained(NamedTuple):
    stored: Stored
    histories: list[Tensor]
    results: list[tuple[Any, ...]]

    def equals(self, other: "Trained") -> bool:
        same = all(map(torch.equal, self.histories, other.histories))
        return same and self.stored.equals(other.stored) and repr(self.results) == repr(other.results)


def make_model(recipe: str) -> nn.Sequential:
    numbers = torch.Generator().manual_seed(4)
    model = nn.Sequential(*[nn.Linear(cols, rows, dtype=torch.bfloat16) for rows, cols in SHAPES])
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=numbers) / 8)
    quantize_linears_(model, recipe)
    return model


def backward(model: nn.Module, step: int, rank: int) -> None:
    """Gradients of 64ths that cancel in part; one is infinite."""
    numbers = torch.Generator().manual_seed(50 + step)
    for param in model.parameters():
        grad = (2 * torch.randint(-16, 16, param.shape, generator=numbers) + 1 + 4 * (-1) ** rank) / 64
        if step == BAD_STEP and rank == 1:
            grad.view(-1)[0] = torch.inf
        (param * grad.to(param.dtype)).sum().backward()


def train(comm: Comm, recipe: str, place: str) -> Trained:
    fields, wraps = PLACES[place]
    model, roles = make_model(recipe), roles_over(comm)
    chunk: nn.Module = model
    if wraps:
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            fp8_param_gather=True,
            overlap_grad_reduce=True,
            overlap_param_gather=fields.get("overlap_param_gather", False),
            bucket_size=150,
        )
        chunk = DistributedDataParallel(config, model, groups=roles)
    config_of_step = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=1.0, fp8_recipe=recipe, **fields)
    optimizer = get_optimizer(config_of_step, [chunk], pg_collection=roles)
    for unit in optimizer.stepper.units if isinstance(comm, DeferredComm) else ():
        unit.rule = LaunchedRule(unit.rule)
    results = []
    for step in range(STEPS):
        backward(model, step, comm.rank)
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_grad_sync()
        results.append(optimizer.step())
        if isinstance(chunk, DistributedDataParallel):
            chunk.zero_grad_buffer()
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


Patch = pytest.MonkeyPatch


def codes_are_gathered_before_they_are_written(patch: Patch) -> None:
    def publish(source: QuantizedSource) -> None:
        source.inner.publish_()
        source.quantize_()

    patch.setattr(QuantizedSource, "publish_", publish)


def nobody_waits_for_the_largest_magnitudes(patch: Patch) -> None:
    patch.setattr(QuantizedSource, "_reduce_", lambda source, values, what: reduced_later(source, values))


def reduced_later(source: QuantizedSource, values: Tensor) -> None:
    source.comm.all_reduce_(values, op=Op.MAX, async_op=True)


def a_skipped_update_is_quantised(patch: Patch) -> None:
    patch.setattr(QuantizedMain, "close_", lambda main, *, skip=None: setattr(main, "is_updated", True))


@pytest.mark.parametrize(
    ("plant", "recipe"),
    [
        (codes_are_gathered_before_they_are_written, "tensorwise"),
        (nobody_waits_for_the_largest_magnitudes, "tensorwise"),
        (a_skipped_update_is_quantised, "delayed"),  # its history would have moved
    ],
)
def test_a_fault_in_the_order_of_quantising_is_noticed(plant: Any, recipe: str, monkeypatch: Patch) -> None:
    expected = run_threads(RANKS, partial(train, recipe=recipe, place="flat"))
    plant(monkeypatch)

    def is_noticed(seed: int) -> bool:
        found = run_deferred(RANKS, partial(on_device, recipe=recipe, place="flat"), seed=seed)
        return not all(one.equals(other) for one, other in zip(found, expected, strict=True))

    assert any(map(is_noticed, range(20)))
