"""Elementwise rules against their papers, written out in float64, and against torch.optim where it has them."""

import math

import pytest
import torch
from torch import nn

from opt_kernels import optim
from opt_kernels.formulas import FORMULAS, q_pochhammer

NUMEL = 64
STEPS = 12


def start():
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def grads():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(NUMEL, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def ademamix(theta, gs, *, eta, lam, alpha, warmup):
    """arXiv 2409.03137, algorithm 1 and section 3.1; both schedules over `warmup` steps."""
    b1 = 0.9
    b2 = 0.99
    b3 = 0.999
    eps = 1e-8
    m1 = m2 = nu = torch.zeros_like(theta)
    for t, g in enumerate(gs, start=1):
        a = min(t * alpha / warmup, alpha) if warmup else alpha
        b = b3
        if warmup and t < warmup:
            l1 = math.log(b1)
            l3 = math.log(b3)
            b = min(math.exp(l1 * l3 / ((1 - t / warmup) * l3 + t / warmup * l1)), b3)
        m1 = b1 * m1 + (1 - b1) * g
        m2 = b * m2 + (1 - b) * g
        nu = b2 * nu + (1 - b2) * g * g
        m1_hat = m1 / (1 - b1**t)
        nu_hat = nu / (1 - b2**t)
        theta = theta - eta * ((m1_hat + a * m2) / (nu_hat.sqrt() + eps) + lam * theta)
    return theta


def adan(theta, gs, *, eta, lam, prox):
    """arXiv 2208.06677, algorithm 1 (betas are the paper's: weights of the new), bias corrections of the code."""
    b1 = 0.02
    b2 = 0.08
    b3 = 0.01
    eps = 1e-8
    m = v = n = torch.zeros_like(theta)
    before = gs[0]
    for k, g in enumerate(gs, start=1):
        m = (1 - b1) * m + b1 * g
        v = (1 - b2) * v + b2 * (g - before)
        n = (1 - b3) * n + b3 * (g + (1 - b2) * (g - before)) ** 2
        m_hat = m / (1 - (1 - b1) ** k)
        v_hat = v / (1 - (1 - b2) ** k)
        n_hat = n / (1 - (1 - b3) ** k)
        update = eta / (n_hat.sqrt() + eps) * (m_hat + (1 - b2) * v_hat)
        theta = (theta - update) / (1 + lam * eta) if prox else (1 - lam * eta) * theta - update
        before = g
    return theta


def laprop(theta, gs, *, eta, lam):
    """arXiv 2002.04839, algorithm 1."""
    mu = 0.9
    nu = 0.99
    eps = 1e-8
    n = m = torch.zeros_like(theta)
    for t, g in enumerate(gs, start=1):
        n = nu * n + (1 - nu) * g * g
        m = mu * m + (1 - mu) * g / ((n / (1 - nu**t)).sqrt() + eps)
        theta = theta - eta * m / (1 - mu**t) - eta * lam * theta
    return theta


def signum(x, gs, *, delta, lam):
    """arXiv 1802.04434, algorithm 2 with weight decay."""
    m = torch.zeros_like(x)
    for g in gs:
        m = 0.9 * m + 0.1 * g
        x = x - delta * (m.sign() + lam * x)
    return x


def lion(theta, gs, *, eta, lam):
    """arXiv 2302.06675, algorithm 2."""
    m = torch.zeros_like(theta)
    for g in gs:
        c = 0.9 * m + 0.1 * g
        theta = theta - eta * (c.sign() + lam * theta)
        m = 0.99 * m + 0.01 * g
    return theta


def mars(x, gs, *, eta, lam, gamma, at_old_weights=None):
    """The authors' code of arXiv 2411.10438 without its norm cap; it starts from an earlier gradient of zero.

    Exact variant: `at_old_weights[t]` is the gradient of step t's data at the weights before the last step.
    """
    b1 = 0.95
    b2 = 0.99
    eps = 1e-8
    m = v = torch.zeros_like(x)
    before = [torch.zeros_like(x), *(at_old_weights[1:] if at_old_weights else gs)]
    for t, (g, old) in enumerate(zip(gs, before), start=1):
        c = g + gamma * b1 / (1 - b1) * (g - old)
        m = b1 * m + (1 - b1) * c
        v = b2 * v + (1 - b2) * c * c
        x = x - eta * (m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps) + lam * x)
    return x


def schedule_free(y, gs, *, gamma, lam, warmup):
    """arXiv 2405.15682, algorithm 1, in its own terms x, y, z."""
    b1 = 0.9
    b2 = 0.99
    eps = 1e-8
    x = z = y
    v = torch.zeros_like(y)
    total = 0.0
    for t, g in enumerate(gs, start=1):
        gamma_t = gamma * min(1.0, t / warmup) if warmup else gamma
        y = (1 - b1) * z + b1 * x
        v = b2 * v + (1 - b2) * g * g
        z = z - gamma_t * (g / ((v / (1 - b2**t)).sqrt() + eps) + lam * y)
        total += gamma_t**2
        c = gamma_t**2 / total
        x = (1 - c) * x + c * z
    return (1 - b1) * z + b1 * x


ADEMAMIX = {"betas": (0.9, 0.99, 0.999), "alpha": 8.0}
ADAN = {"betas": (0.98, 0.92, 0.99)}
PAPERS = [
    ("ademamix", ADEMAMIX, lambda x, gs: ademamix(x, gs, eta=0.01, lam=0.1, alpha=8.0, warmup=0)),
    ("ademamix", ADEMAMIX | {"alpha_steps": 7, "beta3_steps": 7},
     lambda x, gs: ademamix(x, gs, eta=0.01, lam=0.1, alpha=8.0, warmup=7)),
    ("adan", ADAN, lambda x, gs: adan(x, gs, eta=0.01, lam=0.1, prox=True)),
    ("adan", ADAN | {"no_prox": True}, lambda x, gs: adan(x, gs, eta=0.01, lam=0.1, prox=False)),
    ("laprop", {"betas": (0.9, 0.99), "eps": 1e-8}, lambda x, gs: laprop(x, gs, eta=0.01, lam=0.1)),
    ("signum", {}, lambda x, gs: signum(x, gs, delta=0.01, lam=0.1)),
    ("lion", {"betas": (0.9, 0.99)}, lambda x, gs: lion(x, gs, eta=0.01, lam=0.1)),
    ("mars", {"gamma": 0.3}, lambda x, gs: mars(x, gs, eta=0.01, lam=0.1, gamma=0.3)),
    ("schedule_free", {"betas": (0.9, 0.99)}, lambda x, gs: schedule_free(x, gs, gamma=0.01, lam=0.1, warmup=0)),
    ("schedule_free", {"betas": (0.9, 0.99), "warmup_steps": 5},
     lambda x, gs: schedule_free(x, gs, gamma=0.01, lam=0.1, warmup=5)),
]  # fmt: skip


def trained(name, **options):
    """The weights after steps of the drop-in, in float64."""
    param = nn.Parameter(start())
    optimizer = getattr(optim, FORMULAS[name].title)([param], lr=0.01, weight_decay=0.1, **options)
    for grad in grads():
        param.grad = grad
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(("rule", "options", "paper"), PAPERS)
def test_a_rule_takes_its_papers_steps(rule, options, paper):
    # Both in float64: a few roundings a step.
    torch.testing.assert_close(trained(rule, **options), paper(start(), grads()), rtol=1e-12, atol=1e-13)


def test_exact_mars_takes_gradients_at_the_previous_weights():
    old = [grad + 0.1 for grad in reversed(grads())]
    param = nn.Parameter(start())
    optimizer = optim.MARSAdamW([param], lr=0.01, gamma=0.3, weight_decay=0.1)
    for step, (grad, at_old_weights) in enumerate(zip(grads(), old)):
        if step:
            optimizer.state[param]["previous_grad"].copy_(at_old_weights)
        param.grad = grad
        optimizer.step()
    expected = mars(start(), grads(), eta=0.01, lam=0.1, gamma=0.3, at_old_weights=old)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-11, atol=1e-12)


def test_every_rule_has_an_oracle():
    of_torch = {"adam", "sgd", "nadam", "radam"}
    assert {rule for rule, _, _ in PAPERS} | of_torch == set(FORMULAS), "write the equations of its paper in PAPERS"


@pytest.mark.parametrize(
    ("a", "q", "count"), [(0.48, 0.96, 1), (0.48, 0.96, 500), (0.4999, 0.99984, 3000), (0.3, 1.0, 9)]
)
def test_the_product_of_nadam_is_the_product(a, q, count):
    expected = math.prod(1 - a * q**k for k in range(count))
    assert q_pochhammer(a, q, count) == pytest.approx(expected, rel=1e-11)
