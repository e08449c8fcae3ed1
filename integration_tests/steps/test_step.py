"""The step against torch, against float64, and against itself on other numbers of ranks."""

import math
from typing import Any

import pytest
import torch
from processes import Job, run_jobs
from tiny_model import joined_batch, make_model, weights
from torch import Tensor
from training import overflow_on_one_rank, train_here, train_rank

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

STEPS = 50


MAX_NORM = 0.3  # below the norms this model has, so that clipping is active


def adamw(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 3e-3, "weight_decay": 0.1, "clip_grad": MAX_NORM, **changes})


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], *, rtol: float, atol: float) -> None:
    for name in want:
        torch.testing.assert_close(
            got[name],
            want[name],
            rtol=rtol,
            atol=atol,
            check_dtype=False,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def torch_run(
    optimizer_of: Any, *, steps: int = STEPS, max_norm: float = MAX_NORM
) -> tuple[dict[str, Tensor], list[float]]:
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    norms = []
    for step in range(steps):
        model(joined_batch(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), norms


# --- one process, against torch -------------------------------------------------------------------

# Ours folds the clip coefficient into the update, torch rounds the clipped gradient first: the gradients the rules see
# differ by one rounding, 2**-24 relative, and so do moments and updates; over 50 steps of lr 3e-3 weights drift by at
# most 50 * 3e-3 * a few 2**-24, far below this.
ONE_ULP_A_STEP = {"rtol": 1e-5, "atol": 2e-6}


@pytest.mark.parametrize(
    ("config", "peer"),
    [
        pytest.param(adamw(), lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1), id="adamw"),
        pytest.param(
            adamw(decoupled_weight_decay=False), lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1), id="adam-l2"
        ),
        pytest.param(
            adamw(optimizer="sgd", sgd_momentum=0.8),
            lambda p: torch.optim.SGD(p, lr=3e-3, momentum=0.8, weight_decay=0.1),
            id="sgd",
        ),
    ],
)
def test_fifty_steps_are_torchs(config: OptimizerConfig, peer: Any) -> None:
    want, norms = torch_run(peer)
    got = train_here(config, steps=STEPS, overrides={})
    assert_close(got.weights, want, **ONE_ULP_A_STEP)
    torch.testing.assert_close(got.norms, norms, rtol=1e-4, atol=0)
    assert max(norms) > MAX_NORM


# --- bf16 and fp16, against float64 ---------------------------------------------------------------


def float64_adamw(
    grads: list[dict[str, Tensor]], start: dict[str, Tensor], *, max_norm: float = MAX_NORM
) -> dict[str, Tensor]:
    """AdamW of the given gradients, in float64: lr 3e-3, betas (0.9, 0.999), eps 1e-8, weight decay 0.1."""
    main = {name: w.double() for name, w in start.items()}
    m = {name: torch.zeros_like(w) for name, w in main.items()}
    v = {name: torch.zeros_like(w) for name, w in main.items()}
    for t, grad in enumerate(grads, start=1):
        norm = math.sqrt(sum(g.double().square().sum().item() for g in grad.values()))
        coefficient = min(1.0, max_norm / (norm + 1e-6))
        for name, g in grad.items():
            g = g.double() * coefficient
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            update = (m[name] / (1 - 0.9**t)) / ((v[name] / (1 - 0.999**t)).sqrt() + 1e-8)
            main[name] = main[name] * (1 - 3e-3 * 0.1) - 3e-3 * update
    return main


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        pytest.param(torch.bfloat16, adamw(bf16=True), id="bf16"),
        pytest.param(torch.float16, adamw(fp16=True, initial_loss_scale=2.0**12), id="fp16-dynamic"),
        pytest.param(torch.float16, adamw(fp16=True, loss_scale=128.0), id="fp16-constant"),
        pytest.param(torch.bfloat16, adamw(bf16=True, loss_scale=4.0), id="bf16-constant"),
    ],
)
def test_mains_of_16_bit_models_follow_float64(dtype: torch.dtype, config: OptimizerConfig) -> None:
    """The same gradients through the step and through float64: mains agree to fp32, weights are the rounded mains."""
    model = make_model(dtype)
    start = weights(model)
    optimizer = get_optimizer(config, [model], {})
    grads = []
    for step in range(20):
        optimizer.scale_loss(model(joined_batch(step))).backward()
        scale = optimizer.get_loss_scale().item()
        grads.append({name: p.grad.double() / scale for name, p in model.named_parameters()})
        assert optimizer.step().success
        optimizer.zero_grad()
    want = float64_adamw(grads, start)
    mains = dict(zip(want, (s["fp32_param"] for s in optimizer.state_dict()["state"].values())))
    assert {m.dtype for m in mains.values()} == {torch.float32}
    assert_close(mains, want, rtol=1e-5, atol=1e-6)
    for name, weight in weights(model).items():
        assert torch.equal(weight, mains[name].to(dtype)), name


# --- more ranks -----------------------------------------------------------------------------------


FP32_RUNS = {
    "adamw": adamw(),
    "no-clip": adamw(clip_grad=0.0),
    "sgd": adamw(optimizer="sgd"),
    "flat": adamw(use_distributed_optimizer=True),
}
BF16_RUNS = {
    "bf16-replicated": adamw(bf16=True),
    "bf16-flat": adamw(bf16=True, use_distributed_optimizer=True),
}
OVERFLOWS = {
    f"{bad}-{'flat' if sharded else 'replicated'}": Job(
        overflow_on_one_rank,
        (
            adamw(fp16=True, initial_loss_scale=64.0, hysteresis=2, use_distributed_optimizer=sharded),
            torch.float16,
            bad,
        ),
    )
    for bad in (math.inf, math.nan)
    for sharded in (False, True)
}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    """The results of two ranks for all tests below."""
    fp32 = {name: Job(train_rank, (config, 10, torch.float32)) for name, config in FP32_RUNS.items()}
    bf16 = {name: Job(train_rank, (config, 10, torch.bfloat16)) for name, config in BF16_RUNS.items()}
    return run_jobs(2, fp32 | bf16 | OVERFLOWS)


@pytest.fixture(scope="module")
def four() -> dict[str, list[Any]]:
    return run_jobs(4, {name: Job(train_rank, (config, 10, torch.float32)) for name, config in FP32_RUNS.items()})


@pytest.mark.parametrize("world", ["two", "four"])
@pytest.mark.parametrize("name", FP32_RUNS)
def test_any_number_of_ranks_gives_the_weights_of_one(name: str, world: str, request: pytest.FixtureRequest) -> None:
    """Equal parts of a joined batch: the mean of the ranks' gradients is the joined one, up to summation order.

    Adam divides by sqrt(v), so the noise of tiny gradients grows: hence an absolute tolerance of lr / 150.
    """
    want = train_here(FP32_RUNS[name], steps=10)
    for got in request.getfixturevalue(world)[name]:
        assert_close(got.weights, want.weights, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", BF16_RUNS)
def test_ranks_of_a_bf16_model_stay_equal_and_near_one_rank(name: str, two: dict[str, list[Any]]) -> None:
    """Ranks see other bf16 activations than one rank on the joined batch, so near; among themselves, bit for bit."""
    want = train_here(BF16_RUNS[name], steps=10, dtype=torch.bfloat16)
    first, *others = two[name]
    for other in others:
        assert all(torch.equal(first.weights[name], other.weights[name]) for name in first.weights)
    torch.testing.assert_close(first.norms, want.norms, rtol=5e-2, atol=0)
    assert_close(first.weights, want.weights, rtol=5e-2, atol=3e-2)


# --- overflow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all_and_changes_nothing(
    name: str, two: dict[str, list[Any]]
) -> None:
    for rank in two[name]:
        success, norm, _ = rank.result
        assert success is False
        assert not math.isfinite(norm)
        for name, weight in rank.before["weights"].items():
            assert torch.equal(weight, rank.after["weights"][name]), name
        for index, state in rank.before["state"].items():
            assert all(torch.equal(state[key], rank.after["state"][index][key]) for key in state)
        assert rank.scales == [64.0, 64.0, 32.0, 16.0]  # one overflow is forgiven, every further one halves


def test_without_a_loss_scale_a_nan_norm_is_refused_too() -> None:
    model = make_model()
    optimizer = get_optimizer(adamw(), [model], {})
    model(joined_batch(0)).backward()
    model.head.bias.grad[3] = math.nan
    before = weights(model)
    result = optimizer.step()
    assert (result.success, math.isnan(result.grad_norm)) == (False, True)
    assert all(torch.equal(before[name], weight) for name, weight in weights(model).items())
