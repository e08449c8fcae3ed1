"""AdaptiveMuon: AdaMuon, NorMuon and NAMO against their formulas in float64, scaled once."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from opt_kernels import MatrixError
from opt_kernels.hooks import ClipUpdateRms, hooked
from opt_kernels.matrices import MatmulPrecision, ScaleMode
from opt_kernels.matrices.newton_schulz import reference_newton_schulz as newton_schulz
from opt_kernels.rules import AdaptiveMuonRule, Lines, MuonRule, SecondMoment
from opt_kernels.works import Batch, Hyper, MatrixPart, MatrixSpec, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.0, 0.95), eps=1e-8)
EXACT = MuonRule(backend="reference")
SHAPES = [(1, 7), (24, 24), (40, 24), (24, 40)]
NAMO = SecondMoment.NAMO
BACKENDS = ["reference", "torch"]
if find_spec("triton") is not None and not torch.cuda.is_available():
    BACKENDS.append("triton")


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(
    rule: AdaptiveMuonRule | MuonRule, main: Tensor, *grads: Tensor, hyper: Hyper = HYPER, grad_scale: float = 1.0
) -> Tensor:
    main, state = main.clone(), rule.init_state(main)
    for grad in grads:
        rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state)])], grad_scale=grad_scale)
    return main


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
    ("method", "backend"), [*((method, "reference") for method in SecondMoment), *((NAMO, one) for one in BACKENDS[1:])]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("extra", "nesterov"), [(1.0, False), (0.2, True)])
def test_steps_follow_the_formula(
    method: SecondMoment, shape: tuple[int, int], extra: float, nesterov: bool, backend: str
) -> None:
    precision = MatmulPrecision.HIGHEST
    muon = MuonRule(extra_scale_factor=extra, nesterov=nesterov, backend=backend, fp32_matmul_prec=precision)
    rule = AdaptiveMuonRule(muon=muon, second_moment=method)
    main, grads = tensor(*shape), [tensor(*shape, seed=seed) for seed in (1, 2, 3)]
    expected = by_formula(method, main, *grads, extra=extra, nesterov=nesterov)
    # fp32 states: 6e-8 of updates that AdaMuon makes sqrt(20) x lr x scale = 3 large, relatively more for small O.
    torch.testing.assert_close(moved(rule, main, *grads).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lines", Lines)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normuon_may_keep_rows_columns_or_the_longer_side(lines: Lines, shape: tuple[int, int]) -> None:
    rule = AdaptiveMuonRule(muon=EXACT, second_moment=SecondMoment.NORMUON, lines=lines)
    main, grads = tensor(*shape), [tensor(*shape, seed=seed) for seed in (1, 2, 3)]
    expected = by_formula(SecondMoment.NORMUON, main, *grads, lines=lines)
    torch.testing.assert_close(moved(rule, main, *grads).double(), expected, rtol=1e-5, atol=1e-4)
    (name,) = rule.init_state(main).keys() - {"momentum_buffer"}
    specs = {spec.name: spec for spec in rule.state_specs}
    assert name in specs
    assert specs[name].optional is (lines is Lines.LONGER)
    numel = {Lines.ROWS: shape[0], Lines.COLS: shape[1], Lines.LONGER: max(shape)}[lines]
    assert rule.init_state(main)[name].shape == (numel,)


def test_the_papers_adamuon_aligns_its_root_mean_square_with_adamws() -> None:
    # Megatron-Core's variant moves about 100 times as far as Muon at the same lr.
    muon = replace(EXACT, scale_mode=ScaleMode.MATCH_RMS_ADAMW)
    rule = AdaptiveMuonRule(muon=muon, second_moment=SecondMoment.ADAMUON_PAPER)
    grads = [tensor(24, 40, seed=seed) for seed in (1, 2)]
    after = [moved(rule, torch.zeros(24, 40), *grads[:n], hyper=replace(HYPER, weight_decay=0.0)) for n in (1, 2)]
    for step in (after[0], after[1] - after[0]):
        assert float(step.square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 256.0])
def test_the_size_of_gradients_does_not_matter_to_namo(scale: float) -> None:
    rule, grads = AdaptiveMuonRule(second_moment=NAMO, muon=EXACT), [tensor(12, 20, seed=seed) for seed in (1, 2)]
    expected = moved(rule, torch.zeros(12, 20), *grads)
    scaled = [grad / scale for grad in grads]
    torch.testing.assert_close(moved(rule, torch.zeros(12, 20), *scaled), expected, rtol=1e-4, atol=1e-5)
    # `grad_scale` undoes it: the moment is that of the scaled gradient.
    got = moved(rule, torch.zeros(12, 20), *scaled, grad_scale=scale)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_an_unequal_part_of_a_matrix_is_refused_by_namo() -> None:
    rule, main = AdaptiveMuonRule(second_moment=NAMO), tensor(5, 8)
    matrix = MatrixSpec(part=MatrixPart("w", (8, 8), 0))
    work = Work(grad=main.clone(), main=main, state=rule.init_state(main), matrix=matrix)
    with pytest.raises(MatrixError, match=r"NAMO with an unequal part of a matrix \(8, 8\)"):
        rule.update_([Batch(HYPER, [work])])


@pytest.mark.parametrize("method", SecondMoment)
def test_the_scale_is_applied_once(method: SecondMoment) -> None:
    # The reference scales before and after the second moment: its NorMuon update grows with the square of the factor.
    sizes = []
    for extra in (1.0, 2.0, 4.0):
        rule = AdaptiveMuonRule(muon=replace(EXACT, extra_scale_factor=extra), second_moment=method)
        grads = [tensor(24, 40, seed=1), tensor(24, 40, seed=2)]
        sizes.append(float(moved(rule, torch.zeros(24, 40), *grads, hyper=replace(HYPER, weight_decay=0.0)).norm()))
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=1e-5)
    assert sizes[2] == pytest.approx(4 * sizes[0], rel=1e-5)


def test_normuon_keeps_the_norm_of_muon_and_evens_out_its_rows() -> None:
    grad = tensor(40, 24) * torch.logspace(0, -2, 40)[:, None]
    hyper = replace(HYPER, weight_decay=0.0)
    plain = moved(EXACT, torch.zeros(40, 24), grad, hyper=hyper)
    even = moved(
        AdaptiveMuonRule(muon=EXACT, second_moment=SecondMoment.NORMUON), torch.zeros(40, 24), grad, hyper=hyper
    )
    assert float(even.norm()) == pytest.approx(float(plain.norm()), rel=1e-5)
    rows = even.norm(dim=1)
    # The floor of eps under the mean squares keeps the faintest rows from the others' size.
    assert float(rows.max() / rows.min()) < 1.5 < float(plain.norm(dim=1).max() / plain.norm(dim=1).min())


def test_hooks_run_on_the_backend_of_muon() -> None:
    """Symptom: weights were moved by the backend of the device, whichever the optimizer was built with."""
    assert hooked(AdaptiveMuonRule(muon=EXACT), (ClipUpdateRms(),)).backend == "reference"  # type: ignore[attr-defined]
