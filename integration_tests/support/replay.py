"""How long the update of matrices takes at scale, by a clock: what the real `Stepper.step` launches and waits for on
every rank, replayed on the fake accelerator.

    PYTHONPATH=integration_tests/testing python integration_tests/support/replay.py

It is a model's figure, not a measurement. Its rates are assumptions: 600 TFLOP/s of 16-bit products, 50 GB/s for a rank
over InfiniBand, 40 us for a collective and 1 us for each peer. Counted are Newton-Schulz and the exchanges of matrices;
not counted are elementwise passes, the host, the reduction of gradients and congestion. Parameters are on the device
"meta": they have real shapes and no memory. Ranks that hold rows of all matrices, as under FSDP2, are marked as
tensor-parallel ranks here, since a mesh needs processes; their exchanges are the same.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from fake_accelerator import DeferredRank, run_deferred
from parity import roles_over
from torch import Tensor, nn

from opt_config import OptimizerConfig, ParamKey
from opt_kernels.matrices import CoefficientType, schedule
from opt_kernels.works import Task
from opt_stack import get_optimizer

ORTHOGONALIZATION = import_module("opt_kernels.matrices.orthogonalization")
FLOPS = 600e12
BYTES_PER_SECOND = 50e9
LATENCY = 40e-6
LATENCY_PER_PEER = 1e-6

Shape = tuple[int, ...]


def llama_70b() -> list[Shape]:
    """80 layers of q, k, v, o, gate, up and down."""
    wide = 8192
    layer = [(wide, wide), (1024, wide), (1024, wide), (wide, wide), (28672, wide), (28672, wide), (wide, 28672)]
    return layer * 80


def deepseek_v3_experts() -> list[Shape]:
    """58 layers of 32 experts, a part of 256 over 8 expert-parallel ranks: gate, up and down."""
    return [(32, 2048, 7168), (32, 2048, 7168), (32, 7168, 2048)] * 58


MODELS = {"70B over 64 ranks": llama_70b(), "DeepSeek-V3 experts, EP 8 x 64 ranks": deepseek_v3_experts()}
NUM_RANKS = 64


@cache
def newton_schulz_seconds(shape: Shape) -> float:
    """The products of a stack of matrices, by the segments that the package chooses."""
    *stack, rows, cols = shape
    short, long = sorted((rows, cols))
    multiplications = 0.0
    steps = schedule(CoefficientType.QUINTIC, num_steps=5)
    half = ORTHOGONALIZATION.HALVED
    for segment in ORTHOGONALIZATION.cut(steps, rows=short, cols=long, dtype=torch.float16, symmetric=True):
        small = sum(step.c != 0.0 for step in segment) + 3 * (len(segment) - 1)
        multiplications += (1 + half) * short**2 * long + half * small * short**3
    return 2 * float(torch.Size(stack).numel()) * multiplications / FLOPS


def seconds_of(name: str, given: Any) -> float:
    """The rates."""
    if name == "NS":
        return sum(newton_schulz_seconds(tuple(matrix.shape)) for matrix in given[0])
    if name == "all_to_all":
        out, sent, sizes = given
        traffic = max(out.numel(), sent.numel()) * out.element_size() * (len(sizes) - 1) / len(sizes)
        return LATENCY + LATENCY_PER_PEER * len(sizes) + traffic / BYTES_PER_SECOND
    return 0.0


def no_stats(grads: Any, **_: Any) -> SimpleNamespace:
    """Those of gradients of zeros: tensors without memory have none."""
    none = torch.zeros((), dtype=torch.int64)
    return SimpleNamespace(sum_of_squares=none.double(), nonfinite=none, zeros=none)


class ByKernels:
    """A rule whose phases are one kernel each."""

    def __init__(self, rule: Any, device: Any):
        self._rule = rule
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def update_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        return self._rule.update_dtype(dtype, device)  # directions return in the dtype of the products

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        self._device.mode.queue("momentum", lambda *_: None, (grad,))

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        self._device.mode.queue("NS", lambda *_: None, (list(inputs.unbind()),))
        return inputs

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        self._device.mode.queue("weights", lambda *_: None, (update,))


def seconds_of_step(shapes: Iterable[Shape], num_ranks: int, *, ahead: int = 2) -> float:
    """Replay one step. `ahead`: runs that are gathered before the first is computed; 1 is without overlap."""
    given = list(shapes)
    for shape in given:
        newton_schulz_seconds(shape)  # computed here, as it uses tensors

    def rank_main(one: DeferredRank) -> float:
        model = nn.Module()
        for number, (*stack, rows, cols) in enumerate(given):
            part = torch.empty(*stack, rows // num_ranks, cols, device="meta", dtype=torch.bfloat16)
            model.register_parameter(f"w{number}", nn.Parameter(part))
            marks = {"tensor_model_parallel": True, "partition_dim": len(stack)}
            vars(model.get_parameter(f"w{number}")).update(marks)
        config = OptimizerConfig(lr=0.1, optimizer="muon", muon_tp_mode="layer_sharded", clip_grad=0.0, bf16=True)
        overrides = {ParamKey(name="*"): {"optimizer": "muon"}}  # stacks of matrices, too
        optimizer = get_optimizer(config, [model], overrides, pg_collection=roles_over(tp=one.comm))
        stepper = optimizer.stepper
        stepper.device = torch.device("cpu")  # of the statistics, which have values
        stepper.losses = type(stepper.losses)(stepper.device)
        for unit in stepper.units:
            unit.rule = ByKernels(unit.rule, one.device)
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        begin = one.device.seconds()
        optimizer.step()
        return one.device.seconds() - begin

    with ExitStack() as patches:
        patches.enter_context(patch("opt_distributed.pieces.exchange.AHEAD", ahead))
        patches.enter_context(patch("opt_stack.factory.CHECKS_HERE", ()))  # which refuse "meta"
        patches.enter_context(patch("opt_distributed.step.verdict.grad_stats", no_stats))
        return max(run_deferred(num_ranks, rank_main, seed=0, eagerness=1.0, rates=seconds_of))


if __name__ == "__main__":
    for name, shapes in MODELS.items():
        alone = seconds_of_step(shapes, NUM_RANKS, ahead=1)
        print(
            f"{name}: {alone * 1e3:.0f} ms without overlap, {seconds_of_step(shapes, NUM_RANKS) * 1e3:.0f} ms with it"
        )
