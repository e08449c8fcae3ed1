"""SOAP-Muon: against its equations in float64, with bases from eigh and QR and an iteration by SVD."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opt_kernels.matrices import CoefficientType, MatmulPrecision, ScaleMode
from opt_kernels.matrices.orthogonalization import Coefficients, scale_factor
from opt_kernels.rules import SOAPMuonRule
from opt_kernels.works import Batch, Hyper, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, momentum=0.8, eps=1e-8)
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


def steps_of(rule: SOAPMuonRule, grads: list[Tensor], **hyper: float) -> list[Tensor]:
    """By how much each step moves weights that begin at one."""
    main = torch.ones_like(grads[0])
    state, moves = {name: value.to(main.dtype) for name, value in rule.init_state(main).items()}, []
    for step, grad in enumerate(grads, start=1):
        before = main.clone()
        rule.update_([Batch(replace(HYPER, step=step, **hyper), [Work(grad=grad, main=main, state=state)])])
        moves.append(main - before)
    return moves


def newton_schulz(x: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values = values / values.norm()
    for _ in range(STEPS):
        values = A * values + B * values**3 + C * values**5
    return left @ values.diag() @ right


def followed(factor: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The next basis of `factor` and V, whose rows are in its order."""
    order = (q.mT @ factor @ q).diagonal().argsort(descending=True)
    return torch.linalg.qr(factor @ q[:, order]).Q, v[order]


def by_equations(grads: list[Tensor], first: dict[str, Tensor], *, mode: ScaleMode, b: float = 0.9) -> list[Tensor]:
    """Minus lr s e O of each step, in the letters of N. Vyas's note. `first`: the rule's bases after the first step, of
    whose null space rounding chooses the vectors."""
    rows, cols = grads[0].shape
    scale, mu, eps = 0.5 * scale_factor(mode, rows=rows, cols=cols), 0.8, 1e-8
    m, v = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    left, right = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
    q_l = q_r = None
    moves = []
    for g in grads:
        m = mu * m + (1 - mu) * g
        u = (1 - mu) * g + mu * m
        if q_l is not None and q_r is not None:
            p = q_l.mT @ u @ q_r
            v = b * v + (1 - b) * p * p
            found = q_l @ (p / v.clamp_min(eps**2).sqrt()) @ q_r.mT
            four = [torch.linalg.matrix_norm(x @ x.mT).sqrt() for x in (u, found)]  # Schatten-4 norms
            u = found * four[0] / four[1]
        moves.append(-0.1 * scale * newton_schulz(u))
        left, right = b * left + (1 - b) * g @ g.mT, b * right + (1 - b) * g.mT @ g
        if q_l is None or q_r is None:
            q_l, q_r = first["Q_L"], first["Q_R"]
            for q, factor in ((q_l, left), (q_r, right)):  # they are eigenvectors, in descending order
                values = torch.linalg.eigvalsh(factor).flip(0)
                torch.testing.assert_close(q.mT @ factor @ q, values.diag(), rtol=0, atol=1e-6)
            continue
        q_l, v = followed(left, q_l, v)
        q_r, v_t = followed(right, q_r, v.mT)
        v = v_t.mT
    return moves


@pytest.mark.parametrize("mode", ScaleMode)
@pytest.mark.parametrize("shape", [(6, 6), (7, 5), (5, 7)], ids=str)
def test_steps_follow_the_equations(shape: tuple[int, int], mode: ScaleMode) -> None:
    # It orthogonalised Adam's update of the gradient in the basis, which is another rule than the one of this name.
    grads = [grad.double() for grad in grads_of(8, *shape)]
    rule = replace(RULE, scale_mode=mode)
    moves = steps_of(rule, grads, weight_decay=0.0)
    first = {name: value.double() for name, value in rule.init_state(grads[0]).items()}
    work = Work(grad=grads[0], main=torch.ones_like(grads[0]), state=first)
    rule.update_([Batch(HYPER, [work])])
    for move, expected in zip(moves, by_equations(grads, first, mode=mode), strict=True):
        torch.testing.assert_close(move, expected, rtol=0, atol=1e-6)


def test_the_first_step_is_muons_and_decay_is_decoupled() -> None:
    grads = grads_of(3, 5, 7)
    moves, without = steps_of(RULE, grads), steps_of(RULE, grads, weight_decay=0.0)
    expected = -0.1 * 0.5 * newton_schulz(grads[0])
    torch.testing.assert_close(without[0], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(moves[0], expected - 0.1 * 0.3 * torch.ones(5, 7), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exponent", [-40, 40])
def test_a_power_of_two_factors_out(exponent: int) -> None:
    grads, scale = grads_of(5, 6, 9), 2.0**exponent
    scaled = steps_of(RULE, [grad * scale for grad in grads], eps=1e-8 * scale)
    # The first step is Muon's, whose norm has a lower bound of 1e-7.
    for move, expected in list(zip(scaled, steps_of(RULE, grads)))[1 if exponent < 0 else 0 :]:
        torch.testing.assert_close(move, expected, rtol=1e-4, atol=1e-5)
