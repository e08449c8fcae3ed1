"""SOAP and SOAP-Muon against their formulas in float64, with bases from eigh and QR."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matrix_works import HYPER, grads_of, stepped, tensor

from opt_kernels import MatrixError
from opt_kernels.matrices import CoefficientType, MatmulPrecision, ScaleMode
from opt_kernels.matrices.coefficients import Coefficients
from opt_kernels.matrices.muon import scale_factor
from opt_kernels.matrices.orthogonalization import reference_newton_schulz
from opt_kernels.rules import Order, SOAPMuonRule, SOAPRule
from opt_kernels.works import Batch, Hyper, Work

PLAIN = SOAPRule(use_kl_shampoo=False)
KL = SOAPRule()
MEGATRON = SOAPRule(order=Order.MEGATRON)


def signed_qr(columns):
    q, r = torch.linalg.qr(columns)
    return torch.mul(q, r.diagonal().sign())


def advance(rule, main, state, grads, *, first=1):
    stepped(rule, grads, Work(grad=main, main=main, state=state), first=first)


class ByFormula:
    """The docstring of the rule in float64, for one matrix; QR by Householder. It begins as after a first step, with
    factors whose eigenvalues are apart."""

    def __init__(self, rule, main):
        self.rule = rule
        self.p = main.double().clone()
        (m, n) = main.shape
        limit = rule.max_precond_dim or max(m, n)
        self.exp_avg = torch.zeros_like(self.p)
        self.exp_avg_sq = torch.zeros_like(self.p)
        # Of rows and of columns: whether there is a factor K, its basis Q, and its eigenvalues.
        self.has = [m <= limit and (not rule.one_sided or m <= n), n <= limit and (not rule.one_sided or n < m)]
        turned = [(signed_qr(tensor(size, size, seed=7).double()), torch.linspace(4.0, 1.0, size)) for size in (m, n)]
        self.k = [vectors @ values.double().diag() @ vectors.mT for vectors, values in turned]
        self.q = [torch.eye(size).double() for size in (m, n)]
        self.e = [torch.full((size,), float(rule.order is Order.PAPER)).double() for size in (m, n)]
        self._turn(first=True)

    def states(self):
        of_sides = {"": self.k, "Q_": self.q, "eigvals_": self.e}
        sides = {f"{name}{side}": value for name, of in of_sides.items() for side, value in zip("LR", of)}
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, **sides}

    def step(self, grad, t):
        g = grad.double()
        b = self.rule.shampoo_beta
        if self.rule.order is Order.PAPER and t > 1:
            self._adam(g, t - 1)
        grams = [g @ g.mT, g.mT @ g]
        if self.rule.use_kl_shampoo:
            of_rows, of_cols = (q @ (1 / e.clamp_min(1e-8)).diag() @ q.mT / len(e) for q, e in zip(self.q, self.e))
            grams = [g @ of_cols @ g.mT, g.mT @ of_rows @ g]
        weight = (1 - b) / (1 - b**t)
        self.k = [k + weight * (gram - k) for k, gram in zip(self.k, grams)]
        if (t - 1) % self.rule.precondition_frequency == 0:
            self._turn(first=t == 1)
        if self.rule.order is Order.MEGATRON:
            self._adam(g, t)

    def _adam(self, g, t):
        q_l, q_r = self.q
        g = q_l.mT @ g @ q_r
        self.exp_avg = 0.9 * self.exp_avg + 0.1 * g
        self.exp_avg_sq = 0.95 * self.exp_avg_sq + 0.05 * g**2
        u = (self.exp_avg / (1 - 0.9**t)) / ((self.exp_avg_sq / (1 - 0.95**t)).sqrt() + 1e-8)
        self.p = self.p - 0.1 * 0.3 * self.p - 0.1 * q_l @ u @ q_r.mT

    def _turn(self, *, first):
        in_p = self.q[0] @ self.exp_avg @ self.q[1].mT
        orders = [torch.arange(len(q)) for q in self.q]
        for side in (side for side in range(2) if self.has[side]):
            self.q[side], self.e[side], orders[side] = self._basis(self.k[side], self.q[side], first=first)
        self.exp_avg = self.q[0].mT @ in_p @ self.q[1]
        if self.rule.order is Order.PAPER:
            self.exp_avg_sq = self.exp_avg_sq[orders[0]][:, orders[1]]

    def _basis(self, k, q, *, first):
        if first:
            values, vectors = torch.linalg.eigh(k)
            return vectors.flip(1), values.flip(0), torch.arange(len(k))
        order = (q.mT @ k @ q).diagonal().argsort(descending=True)
        q = q[:, order] if self.rule.order is Order.PAPER else q
        for _ in range(self.rule.power_iterations):
            q = signed_qr(k @ q)
        values = (q.mT @ k @ q).diagonal()
        if self.rule.order is Order.MEGATRON:
            order = values.argsort(descending=True)
            return q[:, order], values[order], order
        return q, values, order


RULES = {
    "plain": PLAIN,
    "kl": KL,
    "every_third_step": replace(KL, precondition_frequency=3),
    "two_iterations": replace(PLAIN, power_iterations=2),
    "reference": replace(PLAIN, backend="reference"),
    "megatron": MEGATRON,
    "megatron_plain": replace(MEGATRON, use_kl_shampoo=False),
    "megatron_every_second_step": replace(MEGATRON, precondition_frequency=2, power_iterations=2),
    "limited": replace(PLAIN, max_precond_dim=7),
    "limited_kl": replace(KL, max_precond_dim=7),
    "one_sided_kl": replace(KL, one_sided=True),
    "no_factors": replace(KL, max_precond_dim=1),
}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("shape", [(1, 5), (6, 6), (12, 7), (7, 12)], ids=str)
def test_steps_follow_the_formula(kind, shape):
    # From the middle of a training: the first factors of a matrix that is not square have a null space, whose basis is
    # left to rounding. All in float64, so that what differs is the formula.
    rule = RULES[kind]
    main = tensor(*shape, seed=99).double()
    formula = ByFormula(rule, main)
    state = {name: value.double().copy_(formula.states()[name]) for name, value in rule.init_state(main).items()}
    for step, grad in enumerate(grads_of(*shape, steps=9), start=2):
        advance(rule, main, state, [grad], first=step)
        formula.step(grad, step)
    torch.testing.assert_close(main, formula.p, rtol=0, atol=1e-7)
    assert ["L" in state, "R" in state] == formula.has
    for name in state:
        torch.testing.assert_close(state[name], formula.states()[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("recorded", range(2), ids=["plain", "kl"])
def test_the_order_of_megatron_follows_its_recorded_runs(recorded):
    run = torch.load(Path(__file__).parent / "data" / "soap_megatron_order.pt", weights_only=True)[recorded]
    hyper = Hyper(lr=run["lr"], weight_decay=run["weight_decay"], betas=tuple(run["betas"]), eps=run["eps"])
    rule = replace(MEGATRON, use_kl_shampoo=run["kl"])
    main = run["start"].clone()
    state = rule.init_state(main)
    # In its own singular vectors the first gradient is diagonal. What rounding leaves beside the diagonal differs
    # between processors, and is divided by itself and eps: a tenth of the first update, a thousandth of the later ones.
    for step, (grad, expected) in enumerate(zip(run["grads"], run["params"]), start=1):
        rule.update_([Batch(replace(hyper, step=step), [Work(grad=grad, main=main, state=state)])])
        moved = (expected - run["start"]).norm()
        assert (main - expected).norm() < (0.2 if step == 1 else 0.02) * moved


def moved_by_scaled(rule, shape, scale, eps):
    """The weights after 20 steps from zero, with gradients times `scale`."""
    main = torch.zeros(shape)
    grads = [grad * scale for grad in grads_of(*shape, steps=20)]
    stepped(rule, grads, Work(grad=main, main=main, state=rule.init_state(main)), hyper=replace(HYPER, eps=eps))
    return main


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("shape", [(12, 7), (8, 8), (3, 20)], ids=str)
def test_steps_have_adams_size_whatever_the_scale_of_gradients(shape, order):
    plain = replace(PLAIN, order=order)
    kl = replace(KL, order=order)
    for scale in (2.0**exponent for exponent in (-30, -20, 20, 40)):
        scaled = moved_by_scaled(plain, shape, scale, eps=1e-8 * scale)
        assert torch.equal(scaled, moved_by_scaled(plain, shape, 1.0, eps=1e-8)), scale
    expected = float(moved_by_scaled(kl, shape, 1.0, eps=1e-8).norm())
    for scale in (1e-12, 1e-6, 1e6, 1e12):  # the clamped eigenvalues do not scale: results differ in more than bits
        moved = float(moved_by_scaled(kl, shape, scale, eps=1e-8 * min(scale, 1.0)).norm())
        assert expected / 3 < moved < 3 * expected, scale


@pytest.mark.parametrize("scale", [1e19, float("inf"), float("nan")])
def test_an_overflowing_factor_is_refused_before_any_write(scale):
    main = tensor(8, 12)
    (grad, *_) = grads_of(8, 12, steps=1)
    state = KL.init_state(main)
    advance(KL, main, state, grads_of(8, 12, steps=2))
    before = [t.clone() for t in (main, *state.values())]
    with pytest.raises(MatrixError, match="a factor of SOAP overflowed, or a gradient is not finite"):
        advance(KL, main, state, [grad * scale], first=3)
    assert all(map(torch.equal, (main, *state.values()), before))


def test_a_side_that_is_too_long_has_no_factor():
    state = SOAPRule().init_state(torch.empty(128_000, 64, device="meta"))
    assert set(state) == {"exp_avg", "exp_avg_sq", "R", "Q_R", "eigvals_R"}
    optional = {spec.name for spec in SOAPRule().state_specs if spec.optional}
    assert {"L", "Q_L", "eigvals_L"} <= optional
    assert not any(spec.optional for spec in SOAPRule(max_precond_dim=None).state_specs)


def test_the_first_step_only_finds_eigenvectors_of_the_factors():
    # A step in the basis of its own gradient is rounding noise made as large as lr, and ruins the second moments.
    grad = tensor(7, 12).double()
    main = torch.ones(7, 12, dtype=torch.float64)
    state = PLAIN.init_state(main)
    advance(PLAIN, main, state, [grad])
    assert torch.equal(main, torch.ones_like(main))
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(state["L"].double(), grad @ grad.mT, **close)
    torch.testing.assert_close(state["R"].double(), grad.mT @ grad, **close)
    turned = state["Q_L"].double().mT @ grad @ state["Q_R"].double()
    values = torch.linalg.svdvals(grad)
    torch.testing.assert_close(turned[:, :7].diagonal().abs(), values, **close)
    torch.testing.assert_close(turned.norm(), values.norm(), **close)


# --- SOAP-Muon -------------------------------------------------------------------------------------------------------

OF_MUON = Hyper(lr=0.1, weight_decay=0.3, momentum=0.8, eps=1e-8)
COEFFICIENTS = (Coefficients(2.0, -1.5, 0.5),)
SOAP_MUON = SOAPMuonRule(
    num_ns_steps=4,
    coefficient_type=CoefficientType.CUSTOM,
    custom_coefficients=COEFFICIENTS,
    fp32_matmul_prec=MatmulPrecision.HIGHEST,
    extra_scale_factor=0.5,
)


def steps_of(rule, grads, **hyper):
    """By how much each step moves weights that begin at one; and the states after the first step."""
    main = torch.ones_like(grads[0])
    state = {name: value.to(main.dtype) for name, value in rule.init_state(main).items()}
    moves = []
    first = None
    for step, grad in enumerate(grads, start=1):
        before = main.clone()
        rule.update_([Batch(replace(OF_MUON, step=step, **hyper), [Work(grad=grad, main=main, state=state)])])
        moves.append(main - before)
        first = first or {name: value.clone() for name, value in state.items()}
    return moves, first


def followed(factor, q, v):
    """The next basis of `factor` and V, whose rows are in its order."""
    order = (q.mT @ factor @ q).diagonal().argsort(descending=True)
    return torch.linalg.qr(factor @ q[:, order]).Q, v[order]


def by_equations(grads, first, *, mode, b=0.9):
    """Minus lr s e O of each step, in the letters of N. Vyas's note. `first`: bases after the first step, of whose null
    space rounding chooses the vectors."""
    rows, cols = grads[0].shape
    scale = 0.5 * scale_factor(mode, rows=rows, cols=cols)
    mu = 0.8
    eps = 1e-8
    m = torch.zeros_like(grads[0])
    v = torch.zeros_like(grads[0])
    left = torch.zeros(rows, rows).double()
    right = torch.zeros(cols, cols).double()
    q_l = first["Q_L"]
    q_r = first["Q_R"]
    moves = []
    for t, g in enumerate(grads, start=1):
        m = mu * m + (1 - mu) * g
        u = (1 - mu) * g + mu * m
        if t > 1:
            p = q_l.mT @ u @ q_r
            v = b * v + (1 - b) * p * p
            found = q_l @ (p / v.clamp_min(eps**2).sqrt()) @ q_r.mT
            four = [torch.linalg.matrix_norm(x @ x.mT).sqrt() for x in (u, found)]  # Schatten-4 norms
            u = found * four[0] / four[1]
        moves.append(-0.1 * scale * reference_newton_schulz(u[None], segments=(4 * COEFFICIENTS,))[0])
        left = b * left + (1 - b) * g @ g.mT
        right = b * right + (1 - b) * g.mT @ g
        if t == 1:
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
def test_steps_of_soap_muon_follow_its_equations(shape, mode):
    grads = [tensor(*shape, seed=seed).double() for seed in range(8)]
    moves, first = steps_of(replace(SOAP_MUON, scale_mode=mode), grads, weight_decay=0.0)
    torch.testing.assert_close(moves, by_equations(grads, first, mode=mode), rtol=0, atol=1e-6)
    (decayed,), _ = steps_of(replace(SOAP_MUON, scale_mode=mode), grads[:1])
    torch.testing.assert_close(decayed, moves[0] - 0.1 * 0.3, rtol=0, atol=1e-6)


@pytest.mark.parametrize("exponent", [-40, 40])
def test_a_power_of_two_factors_out_of_soap_muon(exponent):
    grads = [tensor(6, 9, seed=seed) for seed in range(5)]
    scale = 2.0**exponent
    scaled, _ = steps_of(SOAP_MUON, [grad * scale for grad in grads], eps=1e-8 * scale)
    # The first step is Muon's, whose norm has a lower bound of 1e-7.
    start = 1 if exponent < 0 else 0
    torch.testing.assert_close(scaled[start:], steps_of(SOAP_MUON, grads)[0][start:], rtol=1e-4, atol=1e-5)
