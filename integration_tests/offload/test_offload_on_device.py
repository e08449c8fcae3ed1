"""State on the host of a device that runs its work later, which is written, saved, evaluated and clipped there.

The bits are those of a CPU. Ordinary steps: `device/test_step_on_device.py`. More orders at night.
"""

from dataclasses import replace
from typing import Any

import cut_ranks
import pytest
import torch
from cut_ranks import EVEN, Parts
from fake_accelerator import run_deferred
from on_device import (
    ALL,
    FLAT,
    HALF,
    NUM_ORDERS,
    OVERLAPS,
    STEPS,
    Trained,
    assert_bits_of_a_cpu,
    iterate,
    launched,
    outcome,
    with_copies,
)
from parity import Case, Numbers, Spread, Wrapping
from torch import Tensor, nn
from tp_model import cut

from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, QKClip, build, get_optimizer
from opt_stack.qk_clip import fused_qkv

pytestmark = pytest.mark.usefixtures(launched.__name__)

OFFLOADS = (ALL | OVERLAPS, HALF | OVERLAPS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy each piece separately, so that copies and updates interleave."""
    monkeypatch.setattr(build, "PART_NUMEL", 1)


PRECISIONS = [Numbers.FP32, Numbers.BF16, Numbers.REMAINDER]
every_precision = pytest.mark.parametrize("numbers", PRECISIONS, ids=lambda numbers: numbers.value)


@every_precision
def test_a_parameter_that_the_user_writes_counts(numbers: Numbers) -> None:
    """Through `.data`, which no version counter sees; where mains are a copy, `reload_model_params` announces it."""

    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = []
        for step in (0, 2, 3):
            results.append(iterate(model, optimizer, step, comm))
            for param in model.parameters():
                param.data.mul_(0.5)
            if numbers is Numbers.BF16:
                optimizer.reload_model_params()
        return outcome(model, optimizer, results)

    assert_bits_of_a_cpu(replace(FLAT, numbers=numbers), program, on_device=OFFLOADS)


@every_precision
def test_local_state_is_saved_and_loaded(numbers: Numbers) -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = [iterate(model, optimizer, 0, comm)]
        saved = with_copies(optimizer.state_dict())
        weights = [param.detach().clone() for param in model.parameters()]
        iterate(model, optimizer, 2, comm)
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                if param.dtype is torch.float32:  # others are written with their main values
                    param.copy_(value)
        optimizer.load_state_dict(saved)
        results.append(iterate(model, optimizer, 3, comm))
        for param in optimizer.state:
            optimizer.state[param] = {}
        results.append(iterate(model, optimizer, 4, comm))
        return outcome(model, optimizer, results)

    assert_bits_of_a_cpu(replace(FLAT, numbers=numbers), program, on_device=OFFLOADS)


def evaluated(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    results = [iterate(model, optimizer, step, comm) for step in (0, 2)]
    optimizer.eval()
    shown = [param.detach().clone() for param in model.parameters()]
    optimizer.train()
    found = outcome(model, optimizer, results)
    assert not all(map(torch.equal, shown, found.weights))
    return found._replace(weights=[*shown, *found.weights])


@every_precision
def test_weights_to_evaluate_with_come_from_the_host(numbers: Numbers) -> None:
    assert_bits_of_a_cpu(replace(FLAT, rule="schedule_free", numbers=numbers), evaluated, on_device=OFFLOADS)


def clipped(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """A head of one rank is clipped after each step, also after the one that overflowed."""
    qkv = next(param for name, param in model.named_parameters() if "qkv" in name)
    clip = QKClip(optimizer, [fused_qkv(qkv, num_heads=2, head_dim=2)], threshold=100.0)
    results = []
    for step in range(STEPS):
        results.append(iterate(model, optimizer, step, comm))
        assert clip([torch.tensor([3.0, 250.0 if comm.rank else 2.0])]) == 250.0
    return outcome(model, optimizer, results)


CLIPPED = [
    replace(FLAT, numbers=Numbers.BF16, wrapping=Wrapping.OVERLAP),
    replace(FLAT, numbers=Numbers.FP32),
    replace(FLAT, numbers=Numbers.REMAINDER, spread=Spread.REPLICATED),
    replace(FLAT, rule="muon", spread=Spread.WHOLE, wrapping=Wrapping.WRAPPED),
]


@pytest.mark.parametrize("case", CLIPPED, ids=str)
def test_qk_clip_has_the_bits_of_a_cpu_with_state_on_the_device_and_on_the_host(case: Case) -> None:
    assert_bits_of_a_cpu(replace(case, clips=False), clipped, on_device=({}, HALF, ALL | OVERLAPS))


MATRICES = [{"optimizer": "muon", "muon_tp_mode": mode} for mode in ("distributed", "duplicated")]


@pytest.mark.parametrize("fields", [*MATRICES, {"optimizer": "soap"}], ids=["distributed", "duplicated", "soap"])
def test_matrices_that_ranks_hold_parts_of_meet_through_the_device(fields: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=0.02, clip_grad=0.0, muon_fp32_matmul_prec="highest", **fields)

    def train(tp: Comm, **offload: Any) -> list[Tensor]:
        net, axes = Parts(EVEN, 0, tp), Axes(dp=Alone(), tp=tp)
        roles = Roles(dense=axes, expert=axes, everyone=tp)
        optimizer = get_optimizer(replace(config, **offload), [net], {}, pg_collection=roles)
        for step in range(STEPS):
            for part, whole in zip(net.children(), cut_ranks.Net(EVEN, 1 + step).children(), strict=True):
                part.weight.grad = cut(whole.weight.detach(), tp.rank, tp.size, dim=part.dim)
            optimizer.step()
        return [param.detach().clone() for param in net.parameters()]

    expected = run_threads(2, train)
    for seed in range(NUM_ORDERS):
        for found, want in zip(run_deferred(2, lambda one: train(one.comm, **OFFLOADS[0]), seed=seed), expected):
            assert all(map(torch.equal, found, want))
