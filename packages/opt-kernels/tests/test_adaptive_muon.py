"""AdaptiveMuon: AdaMuon, NorMuon and NAMO against their formulas in float64, scaled once."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from opt_kernels import MatrixError
from opt_kernels.hooks import ClipUpdateRms, hooked
from opt_kernels.matrices import MatmulPrecision
from opt_kernels.matrices.orthogonalization import reference_newton_schulz as newton_schulz
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


def test_an_unequal_part_of_a_matrix_is_refused_by_namo() -> None:
    rule, main = AdaptiveMuonRule(second_moment=NAMO), tensor(5, 8)
    matrix = MatrixSpec(part=MatrixPart("w", (8, 8), 0))
    work = Work(grad=main.clone(), main=main, state=rule.init_state(main), matrix=matrix)
    with pytest.raises(MatrixError, match=r"NAMO with an unequal part of a matrix \(8, 8\)"):
        rule.update_([Batch(HYPER, [work])])


def test_hooks_run_on_the_backend_of_muon() -> None:
    """Symptom: weights were moved by the backend of the device, whichever the optimizer was built with."""
    assert hooked(AdaptiveMuonRule(muon=EXACT), (ClipUpdateRms(),)).backend == "reference"  # type: ignore[attr-defined]
