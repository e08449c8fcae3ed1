"""Muon against the SVD and a float64 reference, for every way its parameters, gradients and options come; and
AdaMuon, NorMuon and NAMO against their formulas."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from elementwise_works import device_of, on
from matrix_works import HYPER, moved, tensor

from opt_kernels import MatrixError
from opt_kernels.hooks import ClipUpdateRms, hooked
from opt_kernels.matrices import CoefficientType, Decay, MatmulPrecision, PostNorm, PreNorm, ScaleMode
from opt_kernels.matrices.orthogonalization import reference_newton_schulz as newton_schulz
from opt_kernels.rules import AdaptiveMuonRule, Lines, MuonRule, SecondMoment, update_dtype
from opt_kernels.works import Batch, Hyper, MatrixPart, MatrixSpec, Task, Work

# Ten steps that leave singular values from 0.999 to 1.001: the polar factor, but for matrices with tiny ones.
POLAR = MuonRule(coefficient_type=CoefficientType.DEEPSEEKV4, num_ns_steps=10, fp32_matmul_prec=MatmulPrecision.HIGHEST)
POLAR_EXACT = replace(POLAR, backend="reference")
SHAPES = [(1, 1), (1, 63), (63, 1), (16, 16), (33, 65), (64, 256), (256, 64), (3, 24, 40)]


def polar(x):
    """The oracle: the nearest matrix with orthonormal rows or columns, in float64."""
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return torch.matmul(u, v)


def check_steps(shape, steps, *, decay=Decay.DECOUPLED, nesterov=False, backend=None):
    main = tensor(*shape)
    grads = [tensor(*shape, seed=seed) for seed in range(1, steps + 1)]
    device = device_of(backend)
    expected = main.double()
    momentum = torch.zeros(shape, dtype=torch.float64)
    scale = max(shape[-2:]) ** 0.5
    for grad in grads:
        g = grad.double() + (0.3 * expected if decay is Decay.L2 else 0.0)
        momentum = 0.9 * momentum + 0.1 * g
        share = {Decay.DECOUPLED: 0.1 * 0.3, Decay.INDEPENDENT: 0.3, Decay.L2: 0.0}[decay]
        expected = expected * (1 - share) - 0.1 * scale * polar(0.1 * g + 0.9 * momentum if nesterov else momentum)
    rule = replace(POLAR, nesterov=nesterov, weight_decay_method=decay, backend=backend)
    got = moved(rule, main.to(device), *(grad.to(device) for grad in grads)).cpu()
    # The map's 1e-3 at the ends of its range, times lr and scale.
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-3 * steps * 0.1 * scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_step_decays_then_subtracts_the_polar_factor(shape):
    check_steps(shape, 1)


@on("reference", "torch", "triton")
@pytest.mark.parametrize("decay", Decay)
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_nesterov_and_decays_follow_their_formulas(nesterov, decay, backend):
    check_steps((24, 40), 3, decay=decay, nesterov=nesterov, backend=backend)


SCALES = [
    (ScaleMode.SPECTRAL, (8, 32), 32**0.5), (ScaleMode.SPECTRAL, (32, 8), 32**0.5),
    (ScaleMode.UNIT_RMS_NORM, (8, 32), 0.5), (ScaleMode.UNIT_RMS_NORM, (32, 8), 2.0),
    (ScaleMode.SHAPE_SCALING, (8, 32), 1.0), (ScaleMode.SHAPE_SCALING, (32, 8), 2.0),
    (ScaleMode.MATCH_RMS_ADAMW, (8, 32), 0.2 * 32**0.5), (ScaleMode.MATCH_RMS_ADAMW, (32, 8), 0.2 * 32**0.5),
    (ScaleMode.MUP, (32, 8), 2.0), (ScaleMode.MUP, (8, 32), 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "shape", "factor"), SCALES)
def test_an_update_has_its_modes_scale_times_the_extra_factor(mode, shape, factor):
    rule = replace(POLAR, scale_mode=mode, extra_scale_factor=0.2)
    update = moved(rule, torch.zeros(shape), tensor(*shape), hyper=Hyper(lr=1.0))
    assert float(update.norm()) == pytest.approx(0.2 * factor * 8**0.5, rel=2e-3)


def levelled(u, pre="none", post="none", nuclear=False):
    """The equations of MuonEq, Muon+ and PolarGrad, in float64, for u (m, n)."""
    o = orthogonalised(u / u.norm(dim=1, keepdim=True) if pre == "rows" else u)
    if post == "frobenius":
        o = o * min(u.shape) ** 0.5 / o.norm()
    for line in post.split("_"):
        if line in ("rows", "cols"):
            o = o / o.norm(dim=1 if line == "rows" else 0, keepdim=True)
    return o * (o * u).sum() if nuclear else o


LEVELS = [("rows", "none", False), ("none", "frobenius", False), ("none", "rows", False), ("none", "cols", False)]
LEVELS += [("rows", "cols_rows", False), ("none", "rows_cols", False), ("none", "none", True)]


@on("reference", "torch", "triton")
@pytest.mark.parametrize(("pre", "post", "nuclear"), LEVELS)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
def test_norms_around_newton_schulz_follow_their_equations(shape, pre, post, nuclear, backend):
    levels = {"pre_norm": PreNorm(pre), "post_norm": PostNorm(post), "nuclear_scale": nuclear}
    rule = replace(EXACT, backend=backend, scale_mode=ScaleMode.UNIT_RMS_NORM, **levels)
    device = device_of(backend)
    rows = torch.linspace(0.01, 3.0, shape[0])[:, None]
    grads = [tensor(*shape, seed=seed) * rows for seed in (1, 2)]
    main = tensor(*shape)
    expected = main.double()
    momentum = torch.zeros(shape, dtype=torch.float64)
    for grad in grads:
        momentum = 0.9 * momentum + 0.1 * grad.double()
        scale = (shape[0] / shape[1]) ** 0.5
        expected = expected * (1 - 0.1 * 0.3) - 0.1 * scale * levelled(momentum, pre, post, nuclear)
    got = moved(rule, main.to(device), *(grad.to(device) for grad in grads)).cpu()
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4 * float((expected - main).abs().max()))


def test_split_parts_and_matrices_of_stacks_are_normalised_apart():
    rule = replace(EXACT, pre_norm=PreNorm.ROWS, post_norm=PostNorm.FROBENIUS, scale_mode=ScaleMode.SHAPE_SCALING)
    grad = tensor(2, 12, 40)
    zero = torch.zeros(2, 12, 40)
    hyper = Hyper(lr=1.0, momentum=0.0)
    for spec, parts in ((MatrixSpec(), (slice(None),)), (MatrixSpec(split_rows=(8, 4)), (slice(8), slice(8, None)))):
        main = zero.clone()
        rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=rule.init_state(main), matrix=spec)])])
        for matrix, update in zip(grad.double(), main):
            for part in parts:
                wanted = -levelled(matrix[part], "rows", "frobenius")
                torch.testing.assert_close(update[part].double(), wanted, rtol=1e-4, atol=1e-5)


def test_rows_of_zeros_and_huge_rows_stay_finite():
    rule = replace(EXACT, backend="torch", pre_norm=PreNorm.ROWS, post_norm=PostNorm.ROWS_COLS)
    grad = tensor(8, 24)
    grad[3] = 0.0
    grad[5] *= 1e30
    moved_by = moved(rule, torch.zeros(8, 24), grad, hyper=Hyper(lr=1.0, momentum=0.0))
    assert moved_by.isfinite().all()
    assert moved_by[3].abs().max() < 1e-6
    assert moved_by[5].norm() > 0.1


def test_updates_that_are_scaled_after_products_travel_unrounded():
    rules = [MuonRule(post_norm=PostNorm.ROWS), MuonRule(nuclear_scale=True), MuonRule(pre_norm=PreNorm.ROWS)]
    found = [update_dtype(rule, torch.float32, torch.device("cpu")) for rule in rules]
    assert found == [torch.float32, torch.float32, torch.bfloat16]


def test_updates_of_a_class_with_other_directions_are_unrounded():
    class Scaled(MuonRule):
        def transform_(self, tasks: Sequence[Task], inputs: torch.Tensor, skip: torch.Tensor | None) -> torch.Tensor:
            return super().transform_(tasks, inputs, skip) / 3

    class Declared(Scaled):
        update_dtype = MuonRule.update_dtype

    found = [update_dtype(rule, torch.float32, torch.device("cpu")) for rule in (Scaled(), Declared())]
    assert found == [torch.float32, torch.bfloat16]


def test_a_nuclear_scale_beside_other_norms_is_refused():
    with pytest.raises(ValueError, match="nuclear_scale=True with pre_norm='rows', post_norm='none'"):
        MuonRule(nuclear_scale=True, pre_norm=PreNorm.ROWS)
    with pytest.raises(ValueError, match="nuclear_scale=True with a second moment"):
        AdaptiveMuonRule(muon=MuonRule(nuclear_scale=True))


def test_gradients_are_read_in_any_dtype_and_scaled():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for scale in (1.0, 2.0**-12, torch.tensor(0.25)):
            grad = tensor(24, 40, dtype=dtype)
            main = torch.zeros(24, 40)
            state = POLAR_EXACT.init_state(main)
            POLAR_EXACT.update_([Batch(HYPER, [Work(grad=grad, main=main, state=state)])], grad_scale=scale)
            torch.testing.assert_close(state["momentum_buffer"], 0.1 * float(scale) * grad.float())
            torch.testing.assert_close(main, moved(POLAR_EXACT, torch.zeros(24, 40), grad.float()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float16), ("cpu", torch.bfloat16)])
def test_16_bit_products_have_the_dtype_that_suits_the_device(device, dtype):
    inputs = MuonRule().orthogonalization.inputs
    assert inputs(torch.float32, torch.device(device), None).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_scaled_momentum_follows_its_parameters_memory_order(dtype):
    rule = replace(POLAR, momentum_buffer_dtype=dtype)
    main = tensor(6, 10)
    grads = [tensor(6, 10, seed=seed) for seed in (1, 2, 3)]
    transposed = moved(rule, main.t().contiguous().t(), *grads)
    torch.testing.assert_close(transposed, moved(rule, main, *grads), rtol=0, atol=0)  # one block has one scale


# --- AdaMuon, NorMuon and NAMO, scaled once --------------------------------------------------------------------------

ADAPTIVE = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.0, 0.95), eps=1e-8)
EXACT = MuonRule(backend="reference", fp32_matmul_prec=MatmulPrecision.HIGHEST)
OF_ADAPTIVE = [(1, 7), (24, 24), (40, 24), (24, 40)]
NORMUON = SecondMoment.NORMUON
NAMO = SecondMoment.NAMO


def orthogonalised(x):
    """By the reference, in float64, along the shorter side."""
    wide = x.shape[0] <= x.shape[1]
    done = newton_schulz((x if wide else x.mT)[None], segments=(EXACT.orthogonalization.schedule,))[0]
    return done if wide else done.mT


def by_formula(method, main, *grads, extra=1.0, lines=Lines.ROWS, nesterov=False):
    """The docstring of the rule, line by line."""
    p = main.double()
    m = torch.zeros_like(main, dtype=torch.float64)
    v = 0.0
    for grad in grads:
        m = m + 0.1 * (grad.double() - m)
        u = grad.double() + 0.9 * (m - grad.double()) if nesterov else m
        o = orthogonalised(u.sign() if method is SecondMoment.ADAMUON_PAPER else u)
        if method is NAMO:
            v = v + 0.05 * (float(grad.double().square().sum()) - v)
            u = float(u.norm()) / (v**0.5 + 1e-8) * o
        elif method is not NORMUON:
            v = v + 0.05 * (o**2 - v)
            u = o / (v.sqrt() + 1e-8)
            if method is SecondMoment.ADAMUON_PAPER:
                u = u * min(main.shape) ** 0.5 / u.norm()
        else:
            of_rows = lines is Lines.ROWS or (lines is Lines.LONGER and main.shape[0] >= main.shape[1])
            v = v + 0.05 * ((o**2).mean(1 if of_rows else 0, keepdim=True) - v)
            u = o / v.clamp_min(1e-8).sqrt()
            u = u * o.norm() / u.norm()
        p = p - 0.1 * 0.3 * p - 0.1 * extra * max(main.shape) ** 0.5 * u
    return p


CASES = [*((method, Lines.ROWS) for method in SecondMoment), (NORMUON, Lines.COLS), (NORMUON, Lines.LONGER)]


@on("reference", "torch", "triton")
@pytest.mark.parametrize(("method", "lines"), CASES)
@pytest.mark.parametrize("shape", OF_ADAPTIVE, ids=str)
def test_steps_follow_the_formula(method, lines, shape, backend):
    main = tensor(*shape)
    grads = [tensor(*shape, seed=seed) for seed in (1, 2, 3)]
    for extra, nesterov in ((1.0, False), (0.2, True)):
        muon = replace(EXACT, extra_scale_factor=extra, nesterov=nesterov, backend=backend)
        rule = AdaptiveMuonRule(muon=muon, second_moment=method, lines=lines)
        device = device_of(backend)
        expected = by_formula(method, main, *grads, extra=extra, lines=lines, nesterov=nesterov)
        found = moved(rule, main.to(device), *(grad.to(device) for grad in grads), hyper=ADAPTIVE)
        # fp32 states: 6e-8 of updates that AdaMuon makes sqrt(20) x lr x scale = 3 large, relatively more for small O.
        torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=2e-4)


def test_an_unequal_part_of_a_matrix_is_refused_by_namo():
    rule = AdaptiveMuonRule(second_moment=NAMO)
    main = tensor(5, 8)
    matrix = MatrixSpec(part=MatrixPart("w", (8, 8), 0))
    work = Work(grad=main.clone(), main=main, state=rule.init_state(main), matrix=matrix)
    with pytest.raises(MatrixError, match=r"NAMO with an unequal part of a matrix \(8, 8\)"):
        rule.update_([Batch(ADAPTIVE, [work])])


def test_hooks_run_on_the_backend_of_muon():
    assert hooked(AdaptiveMuonRule(muon=EXACT), (ClipUpdateRms(),)).backend == "reference"
