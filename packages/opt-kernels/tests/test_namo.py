"""NAMO against its formula in float64."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from opt_kernels.matrices.muon import Decay
from opt_kernels.matrices.newton_schulz.reference import newton_schulz
from opt_kernels.matrices.orthogonalization import MatmulPrecision
from opt_kernels.matrices.stacks import MatrixError
from opt_kernels.rules.adaptive_muon import AdaptiveMuonRule, Lines
from opt_kernels.rules.muon import MuonRule
from opt_kernels.rules.namo import NAMORule, adaptive_rule
from opt_kernels.works import Batch, Hyper, MatrixPart, MatrixSpec, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.0, 0.95), eps=1e-8)
EXACT = MuonRule(backend="reference")
BACKENDS = ["reference", "torch"]
if find_spec("triton") is not None and not torch.cuda.is_available():
    BACKENDS.append("triton")


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moved(rule: NAMORule, main: Tensor, *grads: Tensor, hyper: Hyper = HYPER, grad_scale: float = 1.0) -> Tensor:
    main, state = main.clone(), rule.init_state(main)
    for grad in grads:
        rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state)])], grad_scale=grad_scale)
    return main


def by_formula(main: Tensor, *grads: Tensor, nesterov: bool) -> Tensor:
    """The docstring of the rule, line by line, in float64."""
    p, m, v = main.double(), torch.zeros_like(main, dtype=torch.float64), 0.0
    for grad in grads:
        g = grad.double()
        m = m + 0.1 * (g - m)
        u = g + 0.9 * (m - g) if nesterov else m
        v = v + 0.05 * (float(g.square().sum()) - v)
        wide = u if u.shape[0] <= u.shape[1] else u.mT
        o = newton_schulz(wide[None], segments=(EXACT.orthogonalization.schedule,))[0]
        o = o if u.shape[0] <= u.shape[1] else o.mT
        p = p - 0.1 * 0.3 * p - 0.1 * max(main.shape) ** 0.5 * (float(u.norm()) / (v**0.5 + 1e-8)) * o
    return p


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(1, 7), (24, 24), (40, 24)], ids=str)
def test_steps_follow_the_formula(shape: tuple[int, int], nesterov: bool, backend: str) -> None:
    rule = NAMORule(muon=MuonRule(nesterov=nesterov, backend=backend, fp32_matmul_prec=MatmulPrecision.HIGHEST))
    main, grads = tensor(*shape), [tensor(*shape, seed=seed) for seed in (1, 2, 3)]
    expected = by_formula(main, *grads, nesterov=nesterov)
    # fp32: updates of size lr x scale = 0.6, to a few hundred units of rounding.
    torch.testing.assert_close(moved(rule, main, *grads).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 256.0])
def test_the_size_of_gradients_does_not_matter(scale: float) -> None:
    rule, grads = NAMORule(muon=EXACT), [tensor(12, 20, seed=seed) for seed in (1, 2)]
    expected = moved(rule, torch.zeros(12, 20), *grads)
    scaled = [grad / scale for grad in grads]
    torch.testing.assert_close(moved(rule, torch.zeros(12, 20), *scaled), expected, rtol=1e-4, atol=1e-5)
    # `grad_scale` undoes it: the moment is that of the scaled gradient.
    got = moved(rule, torch.zeros(12, 20), *scaled, grad_scale=scale)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_a_stack_of_matrices_is_so_many_matrices() -> None:
    rule, main, grad = NAMORule(muon=EXACT), tensor(3, 12, 20), tensor(3, 12, 20, seed=1)
    assert rule.init_state(main)["moment2_buffer"].shape == (3,)
    got = moved(rule, main, grad)
    for i in range(3):
        torch.testing.assert_close(got[i], moved(rule, main[i], grad[i]), rtol=1e-5, atol=1e-5)


def test_a_skipped_step_leaves_every_byte() -> None:
    rule, main = NAMORule(), tensor(24, 40)
    state = rule.init_state(main)
    before = [main.clone(), *(t.clone() for t in state.values())]
    work = Work(grad=torch.full((24, 40), torch.nan), main=main, state=state)
    rule.update_([Batch(HYPER, [work])], skip=torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip([main, *state.values()], before))


def test_zeros_only_decay() -> None:
    main = tensor(24, 40)
    torch.testing.assert_close(moved(NAMORule(), main, torch.zeros(24, 40)), main * (1 - 0.1 * 0.3))


def test_an_unequal_part_of_a_matrix_is_refused() -> None:
    rule, main = NAMORule(), tensor(5, 8)
    work = Work(
        grad=main.clone(), main=main, state=rule.init_state(main), matrix=MatrixSpec(part=MatrixPart("w", (8, 8), 0))
    )
    with pytest.raises(MatrixError, match=r"NAMO with an unequal part of a matrix \(8, 8\)"):
        rule.update_([Batch(HYPER, [work])])


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: NAMORule(muon=MuonRule(weight_decay_method=Decay.L2)), "NAMO with L2 weight decay"),
    (
        lambda: adaptive_rule(MuonRule(), "adam"),
        "moment2_method='adam' is unknown; pass 'adamuon', 'adamuon_paper', 'normuon' or 'namo'",
    ),
    (lambda: adaptive_rule(MuonRule(), "namo", lines=Lines.COLS), "lines='cols' with 'namo'"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_options_are_checked_when_the_rule_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_each_method_has_its_rule() -> None:
    muon = replace(EXACT, nesterov=True)
    assert adaptive_rule(muon, "namo") == NAMORule(muon=muon)
    assert adaptive_rule(muon, "adamuon") == AdaptiveMuonRule(muon=muon)
    assert isinstance(adaptive_rule(muon, "normuon", lines=Lines.COLS), AdaptiveMuonRule)
