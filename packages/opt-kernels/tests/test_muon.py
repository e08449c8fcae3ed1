"""Muon against the SVD and a float64 reference, for every way its parameters, gradients and options come; and
AdaMuon, NorMuon and NAMO against their formulas."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from elementwise_works import NEEDS_TRITON, device_of
from matrix_works import HYPER, moved, tensor
from torch import Tensor

from opt_kernels import MatrixError
from opt_kernels.hooks import ClipUpdateRms, hooked
from opt_kernels.matrices import CoefficientType, Decay, MatmulPrecision, ScaleMode
from opt_kernels.matrices.orthogonalization import Orthogonalization
from opt_kernels.matrices.orthogonalization import reference_newton_schulz as newton_schulz
from opt_kernels.rules import AdaptiveMuonRule, Lines, MuonRule, SecondMoment
from opt_kernels.works import Batch, Hyper, MatrixPart, MatrixSpec, Work

# Ten steps that leave singular values from 0.999 to 1.001: the polar factor, but for matrices with tiny ones.
POLAR = MuonRule(coefficient_type=CoefficientType.DEEPSEEKV4, num_ns_steps=10, fp32_matmul_prec=MatmulPrecision.HIGHEST)
POLAR_EXACT = replace(POLAR, backend="reference")


def polar(x: Tensor) -> Tensor:
    """The oracle: the nearest matrix with orthonormal rows or columns, in float64."""
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return torch.matmul(u, v)


SHAPES = [(1, 1), (1, 63), (63, 1), (16, 16), (33, 65), (64, 256), (256, 64), (3, 24, 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_step_is_the_polar_factor_scaled_and_decays_before(shape: tuple[int, ...]) -> None:
    main, grad = tensor(*shape), tensor(*shape, seed=1)
    scale = max(shape[-2:]) ** 0.5
    expected = main.double() * (1 - 0.1 * 0.3) - 0.1 * scale * polar(grad)
    # The map's 1e-3 at the ends of its range, times lr and scale.
    torch.testing.assert_close(moved(POLAR, main, grad).double(), expected, rtol=0, atol=2e-3 * 0.1 * scale)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_an_average_and_nesterov_looks_ahead(nesterov: bool) -> None:
    main, grads = tensor(24, 40), [tensor(24, 40, seed=seed) for seed in (1, 2, 3)]
    expected, momentum = main.double(), torch.zeros(24, 40, dtype=torch.float64)
    for grad in grads:
        momentum = 0.9 * momentum + 0.1 * grad.double()
        direction = 0.1 * grad.double() + 0.9 * momentum if nesterov else momentum
        expected = expected * (1 - 0.1 * 0.3) - 0.1 * 40**0.5 * polar(direction)
    got = moved(replace(POLAR, nesterov=nesterov), main, *grads)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=6e-3 * 0.1 * 40**0.5)


SCALES = [
    (ScaleMode.SPECTRAL, (8, 32), 32**0.5),
    (ScaleMode.SPECTRAL, (32, 8), 32**0.5),
    (ScaleMode.UNIT_RMS_NORM, (8, 32), 0.5),
    (ScaleMode.UNIT_RMS_NORM, (32, 8), 2.0),
    (ScaleMode.SHAPE_SCALING, (8, 32), 1.0),
    (ScaleMode.SHAPE_SCALING, (32, 8), 2.0),
    (ScaleMode.MATCH_RMS_ADAMW, (8, 32), 0.2 * 32**0.5),
    (ScaleMode.MUP, (32, 8), 2.0),
    (ScaleMode.MUP, (8, 32), 0.5),
]


@pytest.mark.parametrize(("mode", "shape", "factor"), SCALES)
def test_an_update_has_the_scale_of_its_mode_times_the_extra_factor(
    mode: ScaleMode, shape: tuple[int, int], factor: float
) -> None:
    rule = replace(POLAR, scale_mode=mode, extra_scale_factor=0.2)
    update = torch.zeros(shape) - moved(rule, torch.zeros(shape), tensor(*shape), hyper=Hyper(lr=1.0))
    # All 8 singular values of the polar factor are 1.
    assert float(update.norm()) == pytest.approx(0.2 * factor * 8**0.5, rel=2e-3)


@pytest.mark.parametrize("coefficients", [kind for kind in CoefficientType if kind not in ("aol", "custom")])
@pytest.mark.parametrize("precision", MatmulPrecision)
@pytest.mark.parametrize("use_syrk", [True, False])
def test_fast_and_reference_backends_agree(
    coefficients: CoefficientType, precision: MatmulPrecision, use_syrk: bool
) -> None:
    # Wide enough that all products of the fp32 iteration are halved.
    fast = MuonRule(coefficient_type=coefficients, fp32_matmul_prec=precision, use_syrk=use_syrk)
    main, grad = torch.zeros(256, 1024), tensor(256, 1024)
    expected = moved(replace(fast, backend="reference"), main, grad)
    error = (moved(fast, main, grad) - expected).norm() / expected.norm()
    # bf16 rounds at 4e-3 and its steps pull that apart to a few percent; fp32 at 6e-8.
    assert float(error) < (0.05 if precision is MatmulPrecision.MEDIUM else 1e-4)


@pytest.mark.parametrize("shape", [(96, 32), (192, 16)], ids=str)
@pytest.mark.parametrize("mode", ScaleMode)
def test_fused_rows_are_orthogonalised_and_scaled_one_by_one(shape: tuple[int, int], mode: ScaleMode) -> None:
    # Groups of 4 rows of q, 1 of k, 1 of v.
    grad, rule = tensor(*shape), replace(POLAR_EXACT, scale_mode=mode)
    got = moved(rule, torch.zeros(shape), grad, matrix=MatrixSpec(split_rows=(4, 1, 1)))
    grouped = grad.view(-1, 6, shape[1])
    parts = [grouped[:, a:b].reshape(-1, shape[1]) for a, b in pairwise((0, 4, 5, 6))]
    separately = [moved(rule, torch.zeros_like(part), part) for part in parts]
    expected = torch.cat([part.view(-1, rows, shape[1]) for part, rows in zip(separately, (4, 1, 1))], dim=1)
    torch.testing.assert_close(got, expected.view(shape), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-12, torch.tensor(0.25)], ids=["one", "small", "on_device"])
def test_gradients_are_read_as_they_are_and_never_written(dtype: torch.dtype, scale: float | Tensor) -> None:
    grad = tensor(24, 40, dtype=dtype)
    before, main = grad.clone(), torch.zeros(24, 40)
    state = POLAR_EXACT.init_state(main)
    POLAR_EXACT.update_([Batch(HYPER, [Work(grad=grad, main=main, state=state)])], grad_scale=scale)
    assert torch.equal(grad, before)
    torch.testing.assert_close(state["momentum_buffer"], 0.1 * float(scale) * grad.float())
    torch.testing.assert_close(main, moved(POLAR_EXACT, torch.zeros(24, 40), grad.float()), rtol=0, atol=1e-5)


def test_coupled_weight_decay_goes_into_the_momentum() -> None:
    main, grad = tensor(24, 40), tensor(24, 40, seed=1)
    got = moved(replace(POLAR_EXACT, weight_decay_method=Decay.L2), main, grad)
    expected = moved(POLAR_EXACT, main, grad + 0.3 * main, hyper=replace(HYPER, weight_decay=0.0))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_independent_decay_does_not_depend_on_the_learning_rate(backend: str) -> None:
    main, grad = tensor(24, 40), tensor(24, 40, seed=1)
    rule = replace(POLAR, weight_decay_method=Decay.INDEPENDENT, backend=backend)
    torch.testing.assert_close(moved(rule, main, grad, hyper=replace(HYPER, lr=0.0)), 0.7 * main, rtol=1e-6, atol=0)
    expected = 0.7 * main.double() - 0.1 * 40**0.5 * polar(grad)
    torch.testing.assert_close(moved(rule, main, grad).double(), expected, rtol=0, atol=2e-3)


HEADS = [
    pytest.param((24, 40), (4,), True, [slice(i, i + 4) for i in range(0, 24, 4)], id="heads"),
    pytest.param((24, 40), (5, 3, 16), False, [slice(0, 5), slice(5, 8), slice(8, 24)], id="uneven"),
    pytest.param((10, 8), (3, 2), True, [slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 10)], id="groups"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "rows", "by_group", "heads"), HEADS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "stack"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_heads_are_matrices_of_their_own(
    shape: tuple[int, int],
    rows: tuple[int, ...],
    by_group: bool,
    heads: list[slice],
    batch: tuple[int, ...],
    backend: str,
) -> None:
    rule = replace(POLAR, backend=backend, scale_mode=ScaleMode.SPECTRAL)
    main, grad = tensor(*batch, *shape), tensor(*batch, *shape, seed=1)
    got = moved(rule, main, grad, matrix=MatrixSpec(split_rows=rows, by_group=by_group))
    apart = [moved(rule, main[..., head, :], grad[..., head, :]) for head in heads]
    torch.testing.assert_close(got, torch.cat(apart, dim=-2), rtol=0, atol=1e-4)


def test_equal_heads_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    call = Orthogonalization.__call__
    monkeypatch.setattr(
        Orthogonalization, "__call__", lambda self, x, **how: shapes.append(tuple(x.shape)) or call(self, x, **how)
    )
    spec = MatrixSpec(split_rows=(8, 2, 2))
    moved(POLAR, tensor(24, 40), tensor(24, 40, seed=1), matrix=spec)
    moved(POLAR, tensor(24, 40), tensor(24, 40, seed=1), matrix=MatrixSpec(split_rows=(4,), by_group=True))
    assert shapes == [(1, 16, 40), (2, 4, 40), (6, 4, 40)]


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float16), ("cpu", torch.bfloat16)])
def test_16_bit_products_have_the_dtype_that_suits_the_device(device: str, dtype: torch.dtype) -> None:
    inputs = MuonRule().orthogonalization.inputs(
        torch.float32, torch.device(device), cut_dim=None, tensor_parallel=None
    )
    assert inputs.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_momentum_with_scales_follows_the_memory_order_of_its_parameter(dtype: torch.dtype) -> None:
    rule = replace(POLAR, momentum_buffer_dtype=dtype)
    main, grads = tensor(6, 10), [tensor(6, 10, seed=seed) for seed in (1, 2, 3)]
    transposed = moved(rule, main.t().contiguous().t(), *grads)
    torch.testing.assert_close(transposed, moved(rule, main, *grads), rtol=0, atol=0)  # one block has one scale


# --- AdaMuon, NorMuon and NAMO, scaled once --------------------------------------------------------------------------

ADAPTIVE = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.0, 0.95), eps=1e-8)
EXACT = MuonRule(backend="reference")
OF_ADAPTIVE = [(1, 7), (24, 24), (40, 24), (24, 40)]
NAMO = SecondMoment.NAMO


def orthogonalised(x: Tensor) -> Tensor:
    """By the reference, in float64, along the shorter side."""
    wide = x.shape[0] <= x.shape[1]
    done = newton_schulz((x if wide else x.mT)[None], segments=(EXACT.orthogonalization.schedule,))[0]
    return done if wide else done.mT


def by_formula(
    method: SecondMoment,
    main: Tensor,
    *grads: Tensor,
    extra: float = 1.0,
    lines: Lines = Lines.ROWS,
    nesterov: bool = False,
) -> Tensor:
    """The docstring of the rule, line by line."""
    p, m = main.double(), torch.zeros_like(main, dtype=torch.float64)
    v: Tensor | float = 0.0
    for grad in grads:
        m = m + 0.1 * (grad.double() - m)
        u = grad.double() + 0.9 * (m - grad.double()) if nesterov else m
        o = orthogonalised(u.sign() if method is SecondMoment.ADAMUON_PAPER else u)
        if method is NAMO:
            v = v + 0.05 * (float(grad.double().square().sum()) - v)
            u = float(u.norm()) / (v**0.5 + 1e-8) * o
        elif method is not SecondMoment.NORMUON:
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


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        *((method, "reference") for method in SecondMoment),  # test_triton_muon compares backends
        *((NAMO, "torch"), pytest.param(NAMO, "triton", marks=NEEDS_TRITON)),
    ],
)
@pytest.mark.parametrize("shape", OF_ADAPTIVE, ids=str)
@pytest.mark.parametrize(("extra", "nesterov"), [(1.0, False), (0.2, True)])
def test_steps_follow_the_formula(
    method: SecondMoment, shape: tuple[int, int], extra: float, nesterov: bool, backend: str
) -> None:
    precision = MatmulPrecision.HIGHEST
    muon = MuonRule(extra_scale_factor=extra, nesterov=nesterov, backend=backend, fp32_matmul_prec=precision)
    rule = AdaptiveMuonRule(muon=muon, second_moment=method)
    main, grads = tensor(*shape), [tensor(*shape, seed=seed) for seed in (1, 2, 3)]
    expected, device = by_formula(method, main, *grads, extra=extra, nesterov=nesterov), device_of(backend)
    found = moved(rule, main.to(device), *(grad.to(device) for grad in grads), hyper=ADAPTIVE)
    # fp32 states: 6e-8 of updates that AdaMuon makes sqrt(20) x lr x scale = 3 large, relatively more for small O.
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lines", Lines)
@pytest.mark.parametrize("shape", OF_ADAPTIVE, ids=str)
def test_normuon_may_keep_rows_columns_or_the_longer_side(lines: Lines, shape: tuple[int, int]) -> None:
    rule = AdaptiveMuonRule(muon=EXACT, second_moment=SecondMoment.NORMUON, lines=lines)
    main, grads = tensor(*shape), [tensor(*shape, seed=seed) for seed in (1, 2, 3)]
    expected = by_formula(SecondMoment.NORMUON, main, *grads, lines=lines)
    torch.testing.assert_close(moved(rule, main, *grads, hyper=ADAPTIVE).double(), expected, rtol=1e-5, atol=1e-4)
    (name,) = rule.init_state(main).keys() - {"momentum_buffer"}
    specs = {spec.name: spec for spec in rule.state_specs}
    assert name in specs
    assert specs[name].optional is (lines is Lines.LONGER)
    numel = {Lines.ROWS: shape[0], Lines.COLS: shape[1], Lines.LONGER: max(shape)}[lines]
    assert rule.init_state(main)[name].shape == (numel,)


def test_an_unequal_part_of_a_matrix_is_refused_by_namo() -> None:
    rule, main = AdaptiveMuonRule(second_moment=NAMO), tensor(5, 8)
    matrix = MatrixSpec(part=MatrixPart("w", (8, 8), 0))
    work = Work(grad=main.clone(), main=main, state=rule.init_state(main), matrix=matrix)
    with pytest.raises(MatrixError, match=r"NAMO with an unequal part of a matrix \(8, 8\)"):
        rule.update_([Batch(ADAPTIVE, [work])])


def test_hooks_run_on_the_backend_of_muon() -> None:
    """Symptom: weights were moved by the backend of the device, whichever the optimizer was built with."""
    assert hooked(AdaptiveMuonRule(muon=EXACT), (ClipUpdateRms(),)).backend == "reference"  # type: ignore[attr-defined]
