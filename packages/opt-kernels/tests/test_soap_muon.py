"""SOAP-Muon: the polar factor of SOAP's direction, scaled."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opt_kernels.matrices.newton_schulz.coefficients import Coefficients, CoefficientType
from opt_kernels.matrices.orthogonalization import MatmulPrecision, ScaleMode, scale_factor
from opt_kernels.optim import SOAPMuon as DropIn
from opt_kernels.rules.soap import Order, SOAPRule
from opt_kernels.rules.soap_muon import SOAPMuonRule
from opt_kernels.works import Batch, Hyper, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, betas=(0.9, 0.95), eps=1e-8)
STEPS, (A, B, C) = 4, (2.0, -1.5, 0.5)
RULE = SOAPMuonRule(
    num_ns_steps=STEPS,
    coefficient_type=CoefficientType.CUSTOM,
    custom_coefficients=(Coefficients(A, B, C),),
    fp32_matmul_prec=MatmulPrecision.HIGHEST,
    extra_scale_factor=0.5,
)


def grads_of(num_steps: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(num_steps)]


def steps_of(rule: SOAPRule | SOAPMuonRule, grads: list[Tensor], **hyper: float) -> list[Tensor]:
    """By how much each step moves weights that begin at one."""
    main = torch.ones_like(grads[0])
    state, moves = rule.init_state(main), []
    for step, grad in enumerate(grads, start=1):
        before = main.clone()
        rule.update_([Batch(replace(HYPER, step=step, **hyper), [Work(grad=grad, main=main, state=state)])])
        moves.append(main - before)
    return moves


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("mode", ScaleMode)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)], ids=str)
def test_steps_have_soaps_singular_vectors_and_newton_schulz_values(
    shape: tuple[int, int], mode: ScaleMode, order: Order
) -> None:
    grads = grads_of(4, *shape)
    rule = replace(RULE, soap=SOAPRule(order=order), scale_mode=mode)
    directions = steps_of(rule.soap, grads, lr=1.0, weight_decay=0.0)
    moves = steps_of(rule, grads, lr=1.0, weight_decay=0.0)
    for direction, move in zip(directions[1:], moves[1:]):
        left, values, right = torch.linalg.svd(direction, full_matrices=False)
        values = values / values.norm()
        for _ in range(STEPS):
            values = A * values + B * values**3 + C * values**5
        scale = 0.5 * scale_factor(mode, rows=shape[0], cols=shape[1])
        torch.testing.assert_close(move, scale * left @ values.diag() @ right, rtol=1e-4, atol=1e-4 * scale)


def test_the_first_step_is_soaps_and_decay_is_decoupled() -> None:
    grads = grads_of(3, 5, 7)
    moves = steps_of(RULE, grads)
    without = steps_of(RULE, grads, weight_decay=0.0)
    assert not moves[0].any()
    torch.testing.assert_close(moves[1], without[1] - 0.1 * 0.3 * torch.ones(5, 7))
    assert steps_of(replace(RULE, soap=SOAPRule(order=Order.MEGATRON)), grads)[0].any()


def test_a_stack_of_matrices_is_so_many_matrices() -> None:
    grads = grads_of(3, 2, 4, 6)
    stacked = steps_of(RULE, grads)
    for i in range(2):
        alone = steps_of(RULE, [grad[i] for grad in grads])
        for move, expected in zip(stacked, alone):
            torch.testing.assert_close(move[i], expected, rtol=1e-3, atol=1e-4)


def test_a_skipped_step_leaves_every_byte() -> None:
    main, (grad,) = torch.ones(4, 4), grads_of(1, 4, 4)
    state = RULE.init_state(main)
    before = {name: value.clone() for name, value in state.items()}
    work = Work(grad=grad, main=main, state=state)
    RULE.update_([Batch(replace(HYPER, step=3), [work])], skip=torch.ones(()))
    assert torch.equal(main, torch.ones(4, 4))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_the_drop_in_moves_about_as_far_as_adamw() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 24))
    optimizer = DropIn([weight], lr=0.1, weight_decay=0.0)
    for grad in grads_of(2, 16, 24):
        weight.grad = grad
        optimizer.step()
    # 0.2 sqrt(24) times an orthogonal (16, 24) has root mean square 0.2; the iteration is not exact.
    assert 0.1 < weight.detach().square().mean().sqrt() / 0.1 < 0.3


def test_options_are_checked_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="steps"):
        DropIn([torch.nn.Parameter(torch.zeros(2, 2))], num_ns_steps=0)
    with pytest.raises(ValueError, match="large"):
        DropIn([torch.nn.Parameter(torch.zeros(2, 2))], scale_mode="large")
