"""The step against torch and against float64, in one process; the fuzz compares ranks with one."""

import math
from typing import Any

import pytest
import torch
from tiny_model import joined_batch, make_model, train_here, weights
from torch import Tensor

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
