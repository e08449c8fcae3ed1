"""AdaptiveMuon: AdaMuon and NorMuon against their formulas in float64, scaled once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from opt_kernels.hooks import ClipUpdateRms, hooked
from opt_kernels.matrices.newton_schulz.reference import newton_schulz
from opt_kernels.matrices.orthogonalization import ScaleMode
from opt_kernels.rules.adaptive_muon import AdaptiveMuonRule, Lines, SecondMoment
from opt_kernels.rules.base import Needs
from opt_kernels.rules.muon import MuonRule
from opt_kernels.works import Batch, Hyper, StateKind, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.0, 0.95), eps=1e-8)
EXACT = MuonRule(backend="reference")
SHAPES = [(1, 7), (24, 24), (40, 24), (24, 40)]


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(rule: AdaptiveMuonRule | MuonRule, main: Tensor, *grads: Tensor, hyper: Hyper = HYPER) -> Tensor:
    main, state = main.clone(), rule.init_state(main)
    for grad in grads:
        rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state)])])
    return main


def orthogonalised(x: Tensor) -> Tensor:
    """By the reference, in float64, along the shorter side."""
    wide = x.shape[0] <= x.shape[1]
    done = newton_schulz((x if wide else x.mT)[None], segments=(EXACT.orthogonalization.schedule,))[0]
    return done if wide else done.mT


def by_formula(
    method: SecondMoment, main: Tensor, *grads: Tensor, extra: float = 1.0, lines: Lines = Lines.ROWS
) -> Tensor:
    """The docstring of the rule, line by line."""
    p, m = main.double(), torch.zeros_like(main, dtype=torch.float64)
    v: Tensor | float = 0.0
    for grad in grads:
        m = m + 0.1 * (grad.double() - m)
        o = orthogonalised(m.sign() if method is SecondMoment.ADAMUON_PAPER else m)
        if method is not SecondMoment.NORMUON:
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


@pytest.mark.parametrize("method", SecondMoment)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("extra", [1.0, 0.2])
def test_steps_follow_the_formula(method: SecondMoment, shape: tuple[int, int], extra: float) -> None:
    rule = AdaptiveMuonRule(muon=replace(EXACT, extra_scale_factor=extra), second_moment=method)
    main, grads = tensor(*shape), [tensor(*shape, seed=seed) for seed in (1, 2, 3)]
    expected = by_formula(method, main, *grads, extra=extra)
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


def test_lines_belong_to_normuon() -> None:
    with pytest.raises(ValueError, match="lines='cols' with 'adamuon': only 'normuon' has lines"):
        AdaptiveMuonRule(lines=Lines.COLS)


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


@pytest.mark.parametrize("method", SecondMoment)
def test_a_stack_of_matrices_is_so_many_matrices(method: SecondMoment) -> None:
    rule = AdaptiveMuonRule(muon=EXACT, second_moment=method)
    main, grad = tensor(3, 12, 20), tensor(3, 12, 20, seed=1)
    got = moved(rule, main, grad)
    for i in range(3):
        torch.testing.assert_close(got[i], moved(rule, main[i], grad[i]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", SecondMoment)
def test_a_skipped_step_leaves_every_byte(method: SecondMoment) -> None:
    rule, main = AdaptiveMuonRule(second_moment=method), tensor(24, 40)
    state = rule.init_state(main)
    before = [main.clone(), *(t.clone() for t in state.values())]
    work = Work(grad=torch.full((24, 40), torch.nan), main=main, state=state)
    rule.update_([Batch(HYPER, [work])], skip=torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip([main, *state.values()], before))


@pytest.mark.parametrize(
    ("method", "kind", "shape"),
    [(SecondMoment.ADAMUON, StateKind.LIKE_PARAM, (24, 40)), (SecondMoment.NORMUON, StateKind.REDUCED, (24,))],
)
def test_the_second_moment_is_declared_as_it_is(method: SecondMoment, kind: StateKind, shape: tuple[int, ...]) -> None:
    rule = AdaptiveMuonRule(second_moment=method)
    assert (rule.name, rule.needs) == ("adaptive_muon", Needs.MATRICES)
    specs, state = rule.state_specs, rule.init_state(tensor(24, 40))
    assert [spec.name for spec in specs] == list(state)
    assert specs[1].kind is kind
    assert state["moment2_buffer"].shape == shape


def test_an_unknown_second_moment_is_refused() -> None:
    with pytest.raises(
        ValueError, match="'namo' is not a SecondMoment; pass one of 'adamuon', 'adamuon_paper', 'normuon'"
    ):
        SecondMoment("namo")


@pytest.mark.parametrize("kind", SecondMoment)
def test_a_gradient_of_zeros_leaves_the_weight_to_its_decay(kind: SecondMoment) -> None:
    # The norm of the update is zero, and what it is divided by must not be.
    rule, main = AdaptiveMuonRule(second_moment=kind), torch.ones(6, 4)
    work = Work(grad=torch.zeros(6, 4), main=main, state=rule.init_state(main))
    for step in (1, 2):
        rule.update_([Batch(Hyper(lr=0.1, weight_decay=0.5, step=step), [work])])
    torch.testing.assert_close(main, torch.full((6, 4), 0.95**2))


def test_hooks_run_on_the_backend_of_muon() -> None:
    """Symptom: weights were moved by the backend of the device, whichever the optimizer was built with."""
    assert hooked(AdaptiveMuonRule(muon=EXACT), (ClipUpdateRms(),)).backend == "reference"  # type: ignore[attr-defined]
