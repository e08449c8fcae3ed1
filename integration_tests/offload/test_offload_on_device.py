"""Offload to the host of a device that runs its work later: the bits are those of a CPU without it, in every legal
order of the work, in every layout, with every kind of rule and state.

More orders at night.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cut_ranks
import pytest
import torch
from cut_ranks import EVEN, Parts
from fake_accelerator import DeferredRank, run_deferred
from on_device import (
    BAD_STEP,
    NUM_ORDERS,
    SIZE,
    STEPS,
    Trained,
    built,
    equal,
    iterate,
    launch_rules_,
    launched,
    layouts,
    outcome,
)
from parity import Case, Numbers, Spread, Wrapping
from torch import Tensor, nn
from tp_model import cut

from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_kernels import hooks
from opt_stack import Optimizer, QKClip, build, get_optimizer
from opt_stack.qk_clip import fused_qkv

pytestmark = pytest.mark.usefixtures(launched.__name__)

ON_DEVICE: dict[str, Any] = {}
HALF = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
ALL = HALF | {"optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True}
OVERLAPPED = HALF | {"overlap_cpu_optimizer_d2h_h2d": True}
Program = Callable[[nn.Module, Optimizer, Comm], Trained]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy each piece separately, so that copies and updates interleave."""
    monkeypatch.setattr(build, "PART_NUMEL", 1)


def check(
    case: Case, program: Program, *, offloads: Sequence[dict[str, Any]] = (ALL, OVERLAPPED), **fields: Any
) -> list[Trained]:
    """The results of `program` on a CPU without offload, which are those on devices with each of the offloads.

    One rank's piece of a parameter may be on the device while another rank's is on the host.
    """

    def on_device(one: DeferredRank, offload: dict[str, Any]) -> Trained:
        model, optimizer = built(case, one.comm, **offload, **fields)
        launch_rules_(optimizer)
        return program(model, optimizer, one.comm)

    expected = run_threads(SIZE, lambda comm: program(*built(case, comm, **fields), comm))
    for seed in range(max(len(offloads), NUM_ORDERS)):
        offload = offloads[seed % len(offloads)]
        found = run_deferred(SIZE, lambda one, offload=offload: on_device(one, offload), seed=seed)
        assert all(map(equal, found, expected)), f"seed {seed}, {offload}"
    return expected


def steps(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """One of the steps overflows."""
    return outcome(model, optimizer, [iterate(model, optimizer, step, comm) for step in range(STEPS)])


@pytest.mark.parametrize("case", layouts(), ids=str)
def test_every_order_gives_the_bits_of_a_step_without_offload(case: Case) -> None:
    check(case, steps, offloads=(OVERLAPPED, {**ALL, "overlap_cpu_optimizer_d2h_h2d": False}))


def flat(numbers: Numbers, rule: str = "adam") -> Case:
    return Case(size=SIZE, spread=Spread.FLAT, numbers=numbers, rule=rule, clips=True, wrapping=Wrapping.PLAIN)


def flat_or_whole(rule: str) -> Case:
    return replace(flat(Numbers.BF16, rule), spread=Spread.FLAT if rule == "lion" else Spread.WHOLE)


PRECISIONS = [Numbers.FP32, Numbers.BF16, Numbers.REMAINDER]
every_precision = pytest.mark.parametrize("numbers", PRECISIONS, ids=lambda numbers: numbers.value)
MASK = (hooks.CautiousUpdate(), hooks.CoupledDecay(), hooks.ClipUpdateRms(0.05))
CENTERED = (hooks.CentralizeGradient(), hooks.ClipUpdateRms(0.05))
NARROW: Mapping[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "fp16 mains": {"main_params_dtype": torch.float16},
    "24-bit mains": {"main_params_dtype": torch.int8},
}
STEPPED: dict[str, tuple[Case, dict[str, Any]]] = {
    **{f"norms, {numbers.value}": (flat(numbers), {"hooks": MASK}) for numbers in PRECISIONS},
    **{f"row means, {numbers.value}": (flat(numbers), {"hooks": CENTERED}) for numbers in PRECISIONS},
    "norms of replicas": (replace(flat(Numbers.BF16), spread=Spread.REPLICATED), {"hooks": MASK}),
    **{name: (flat(Numbers.REMAINDER), NARROW[name]) for name in NARROW},
    **{rule: (flat_or_whole(rule), {}) for rule in ("soap", "adaptive_muon", "lion")},
}


@pytest.mark.parametrize("name", STEPPED)
def test_so_do_hooks_other_formats_and_other_rules(name: str) -> None:
    case, fields = STEPPED[name]
    check(case, steps, **fields)


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

    check(flat(numbers), program)


def with_copies(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: with_copies(value) for name, value in tree.items()}
    return [with_copies(one) for one in tree] if isinstance(tree, list) else tree


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

    check(flat(numbers), program)


@every_precision
def test_weights_to_evaluate_with_come_from_the_host(numbers: Numbers) -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = [iterate(model, optimizer, step, comm) for step in (0, 2)]
        optimizer.eval()
        evaluated = [param.detach().clone() for param in model.parameters()]
        optimizer.train()
        found = outcome(model, optimizer, results)
        assert not all(map(torch.equal, evaluated, found.weights))
        return found._replace(weights=[*evaluated, *found.weights])

    check(flat(numbers, "schedule_free"), program)


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
    replace(flat(Numbers.BF16), wrapping=Wrapping.OVERLAP),
    flat(Numbers.FP32),
    replace(flat(Numbers.REMAINDER), spread=Spread.REPLICATED),
    replace(flat(Numbers.FP16, "muon"), spread=Spread.WHOLE, wrapping=Wrapping.WRAPPED),
]


@pytest.mark.parametrize("case", CLIPPED, ids=str)
def test_qk_clip_has_the_bits_of_a_cpu_with_state_on_the_device_and_on_the_host(case: Case) -> None:
    expected = check(replace(case, clips=False), clipped, offloads=(ON_DEVICE, HALF, ALL))
    assert [result[0] for result in expected[0].results] == [step != BAD_STEP for step in range(STEPS)]


@pytest.mark.parametrize(
    "fields",
    [{"optimizer": "muon", "muon_tp_mode": mode} for mode in ("distributed", "duplicated")] + [{"optimizer": "soap"}],
    ids=["distributed", "duplicated", "soap"],
)
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
        for found, want in zip(run_deferred(2, lambda one: train(one.comm, **ALL), seed=seed), expected, strict=True):
            assert all(map(torch.equal, found, want))
