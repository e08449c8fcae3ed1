"""Hooks on rules: what they compute, in which numbers, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from elementwise_works import COMPILED, KEPT, Kept, main_of, written
from elementwise_works import HYPER as OTHER
from elementwise_works import run as run_with
from elementwise_works import start_of as start_of_shape
from hook_oracle import BETAS, DIRECTIONS, EPS, LR, MAX_LR, MOMENTUM, WD, Oracle
from torch import Tensor

from opt_kernels import hooks
from opt_kernels.formulas import FORMULAS
from opt_kernels.hooks import (
    CautiousDecay,
    CentralizeGradient,
    ClipUpdateRms,
    CoupledDecay,
    Hook,
    LrDecoupledDecay,
    RowFloor,
    RowMeans,
    SpannedRows,
    add_row_sums_,
    hooked,
    shape_problem,
)
from opt_kernels.hooks.compose import hyper_of
from opt_kernels.hooks.sums import subtract_row_means_, sums_of
from opt_kernels.matrices import Decay
from opt_kernels.rules import SGD, Adam, AdaptiveMuonRule, Lion, MuonRule, Needs, elementwise
from opt_kernels.works import Batch, Work

pytestmark = pytest.mark.usefixtures("poisoned")
RULES: Mapping[str, Any] = {
    "adamw": Adam,
    "adam-l2": lambda **options: Adam(decoupled=False, **options),
    "lion": Lion,
    "sgd": lambda **options: SGD(nesterov=True, **options),
}
WIDE = {  # float64 states
    "adamw": dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.float64),
    "adam-l2": dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.float64),
    "lion": {"exp_avg_dtype": torch.float64},
    "sgd": {"momentum_buffer_dtype": torch.float64},
}
assert RULES.keys() == DIRECTIONS.keys()
HOOKS: Mapping[str, dict[str, dict[str, Any]]] = {  # as the oracle takes them
    "l2": {"CoupledDecay": {}},
    "cautious-decay": {"CautiousDecay": {}},
    "lr-decoupled": {"LrDecoupledDecay": {"max_lr": MAX_LR}},
    "cautious-update": {"CautiousUpdate": {}},
    "clip": {"ClipUpdateRms": {"threshold": 0.3}},
    "clip-cautious": {"ClipUpdateRms": {"threshold": 0.3}, "CautiousDecay": {}},
    "relative": {"RelativeUpdate": {}},
    "hyperball": {"Hyperball": {}},
    "hyperball-radius": {"Hyperball": {"radius": 3.0}},
    "centralized": {"CentralizeGradient": {}},
    "floor": {"RowFloor": {"ratio": 0.9}},
    "floor-mask-cautious": {"CautiousDecay": {}, "RowFloor": {"ratio": 2.0}, "CautiousUpdate": {}},
    "centralized-l2-mask-clip": {
        "ClipUpdateRms": {"threshold": 0.3}, "CoupledDecay": {}, "CautiousUpdate": {}, "CentralizeGradient": {},
    },
}  # fmt: skip
MEASURED = [name for name in HOOKS if name not in ("l2", "cautious-decay", "lr-decoupled")]
STORED = ("fp64", "fp32", "fp32-out16-g16", "remainder-g16", "bf16")
NUMBERS: dict[str, Any] = {"lr": LR, "weight_decay": WD, "betas": BETAS, "eps": EPS, "momentum": MOMENTUM}
HYPER = replace(OTHER, **NUMBERS)
SHAPE = (24, 40)


def start_of(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return start_of_shape(shape)


def run(rule: Any, work: Work, grads: list[Tensor], **options: Any) -> Work:
    return run_with(rule, work, grads, **{**NUMBERS, **options})


def made(specs: Mapping[str, dict[str, Any]]) -> tuple[Hook, ...]:
    return tuple(getattr(hooks, name)(**options) for name, options in specs.items())


def gradients(shape: tuple[int, ...] = SHAPE, steps: int = 4, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16().double() for _ in range(steps)]


@pytest.mark.parametrize("kept", STORED)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hooked_rule_follows_the_papers_equations(name: str, rule: str, kept: str) -> None:
    oracle = Oracle(rule=rule, hooks=HOOKS[name], p=start_of())
    subject = hooked(RULES[rule](backend="torch", **(WIDE[rule] if kept == "fp64" else {})), made(HOOKS[name]))
    work = KEPT[kept].work(subject, start_of())
    run(subject, work, gradients(), scale=0.5)
    for grad in gradients():
        oracle.step(0.5 * grad)
    assert not torch.equal(oracle.p, start_of())
    # Four roundings of a main, and float32 arithmetic of steps of at most 4 lr.
    rounding = {"fp64": 2.0**-44, "bf16": 2.0**-8}.get(kept, 2.0**-21)
    atol = 4 * rounding * 0.1
    if "CautiousUpdate" in HOOKS[name] and kept != "fp64":
        atol += 4 * LR * 4 / start_of().numel()  # an element that is masked on one side changes the factor of all
    close = torch.isclose(main_of(work), oracle.p, rtol=4 * rounding, atol=atol)
    # Lion moves by a sign, masks by another: sums that are next to zero have either sign after rounding.
    jumps = rule == "lion" or "cautious" in name or "mask" in name
    allowed = 0.02 if kept == "bf16" else 0.002
    assert (~close).double().mean() <= (allowed if jumps else 0)


ON_BACKENDS = [(rule, name) for rule in RULES for name in HOOKS if rule == "adamw" or name not in MEASURED]


@COMPILED
@pytest.mark.parametrize(("rule", "name"), ON_BACKENDS)
def test_hooked_rules_agree_on_every_backend(rule: str, name: str, backend: str) -> None:
    """Elementwise hooks have the same bits."""
    kept = Kept(out=torch.bfloat16)
    expected, found = (
        run(hooked(RULES[rule](backend=b), made(HOOKS[name])), kept.work(RULES[rule](), start_of()), gradients())
        for b in ("reference", backend)
    )
    if name not in MEASURED:
        assert all(map(torch.equal, written(found), written(expected)))
    close = torch.isclose(main_of(found), main_of(expected), rtol=1e-6, atol=1e-6)
    assert (~close).double().mean() <= (0.002 if "mask" in name or "cautious" in name else 0)


@pytest.mark.parametrize("name", HOOKS)
def test_a_skipped_step_changes_no_byte(name: str) -> None:
    rule = Adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8, backend="torch")
    subject = hooked(rule, made(HOOKS[name]))
    for kept in (Kept(out=torch.bfloat16), Kept(main=None, out=torch.bfloat16)):
        work = run(subject, kept.work(subject, start_of()), gradients(steps=1))
        before = [tensor.clone() for tensor in written(work)]
        batch = Batch(replace(HYPER, step=2), [replace(work, grad=torch.full(SHAPE, torch.inf))])
        subject.update_([batch], skip=torch.ones(()))
        assert all(map(torch.equal, written(work), before))


@pytest.mark.parametrize("name", ["cautious-decay", "clip", "hyperball", "relative"])
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    """A step of a tenth of a bfloat16's spacing is lost by rounding to nearest."""
    subject = hooked(Adam(stochastic_rounding=True, backend="torch"), made(HOOKS[name]))
    start = torch.full((64, 256), 1.0, dtype=torch.float64)
    grads = [torch.ones(64, 256, dtype=torch.float64) * (-1.0) ** torch.arange(256)]
    oracle = Oracle(rule="adamw", hooks=HOOKS[name], p=start)
    work = Kept(main=torch.bfloat16).work(subject, start)
    run(subject, work, grads)
    oracle.step(grads[0])
    for of_sign in (slice(0, None, 2), slice(1, None, 2)):
        moved = (main_of(work) - start)[:, of_sign]
        assert len(moved.unique()) > 1
        # The mean of 8,192 elements that are off by at most 2^-7 each.
        assert moved.mean().item() == pytest.approx((oracle.p - start)[:, of_sign].mean().item(), abs=2.0**-7 * 3 / 90)


@pytest.mark.parametrize("name", HOOKS)
def test_many_works_and_groups_are_updated_as_each_alone(name: str) -> None:
    subject = hooked(Adam(backend="torch"), made(HOOKS[name]))
    shapes = [(8, 16), (5, 3), (7, 64), (4, 4)]
    together, alone = (
        [
            replace(Kept().work(subject, start_of(shape)), grad=gradients(shape, 1, seed)[0].float())
            for seed, shape in enumerate(shapes)
        ]
        for _ in range(2)
    )
    hypers = [replace(HYPER, step=1), replace(HYPER, step=1, lr=0.01, weight_decay=0.3)]
    subject.update_([Batch(hypers[0], together[:2]), Batch(hypers[1], together[2:])])
    for index, work in enumerate(alone):
        subject.update_([Batch(hypers[index // 2], [work])])
    for one, other in zip(together, alone):
        assert torch.equal(main_of(one), main_of(other))


@pytest.mark.parametrize("name", MEASURED)
def test_device_numbers_are_followed(name: str) -> None:
    """Learning rate, weight decay, step and scale as 0-d tensors, as a captured step has them."""
    subject = hooked(Adam(backend="torch"), made(HOOKS[name]))
    one = run(subject, Kept().work(subject, start_of()), gradients(steps=1), scale=0.5)
    tensors = {"lr": torch.tensor(LR, dtype=torch.float64), "weight_decay": torch.tensor(WD, dtype=torch.float64)}
    other = run(subject, Kept().work(subject, start_of()), gradients(steps=1), scale=torch.tensor(0.5), **tensors)
    assert torch.allclose(main_of(one), main_of(other), rtol=1e-6, atol=1e-7)


def muon_direction(rule: Any, grads: list[Tensor]) -> list[Tensor]:
    """The u of each step, from a run of the rule alone at lr 1 and no decay: its update does not depend on weights."""
    work = Kept().work(rule, torch.zeros(SHAPE, dtype=torch.float64))
    found, before = [], main_of(work)
    for step, grad in enumerate(grads, start=1):
        rule.update_([Batch(replace(HYPER, step=step, lr=1.0, weight_decay=0.0), [replace(work, grad=grad.float())])])
        found.append(before - main_of(work))
        before = main_of(work)
    return found


@pytest.mark.parametrize("rule", [MuonRule(), AdaptiveMuonRule()], ids=["muon", "adaptive_muon"])
@pytest.mark.parametrize("name", ["cautious-decay", "lr-decoupled", "clip", "relative", "hyperball", "floor"])
def test_matrix_rules_take_hooks(name: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = iter(muon_direction(rule, gradients()))
    monkeypatch.setitem(DIRECTIONS, "adamw", (lambda state, g, t: next(updates), False))
    oracle = Oracle(rule="adamw", hooks=HOOKS[name], p=start_of())
    work = run(hooked(rule, made(HOOKS[name])), Kept().work(rule, start_of()), gradients())
    for grad in gradients():
        oracle.step(grad)
    # Muon at lr 1 adds up rounding of steps of size 6.
    assert torch.allclose(main_of(work), oracle.p, rtol=1e-4, atol=1e-4)


def test_a_matrix_rule_takes_gradient_hooks() -> None:
    subject = hooked(MuonRule(), [CentralizeGradient(), CoupledDecay()])
    centred = [grad - grad.mean(1, keepdim=True) for grad in gradients()]
    one = run(subject, Kept().work(subject, start_of()), gradients(), scale=0.5)
    other = run(
        MuonRule(weight_decay_method=Decay.L2), Kept().work(MuonRule(), start_of()), [0.5 * grad for grad in centred]
    )
    assert torch.allclose(main_of(one), main_of(other), rtol=1e-3, atol=1e-3)


def test_small_empty_and_zero_works_stay_finite() -> None:
    zeros, nothing = torch.zeros(SHAPE, dtype=torch.float64), [torch.zeros(SHAPE, dtype=torch.float64)]
    for name in ("clip", "relative", "cautious-update", "centralized", "hyperball"):
        subject = hooked(SGD(backend="torch"), made(HOOKS[name]))
        cases = [(start_of(shape), gradients(shape)) for shape in ((0, 4), (1, 1), (3,))]
        for start, grads in (*cases, (zeros, gradients()), (start_of(), nothing), (zeros, nothing)):
            work = run(subject, Kept().work(subject, start), grads, weight_decay=0.0)
            assert main_of(work).isfinite().all()
            assert grads is not nothing or torch.allclose(main_of(work), start)


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "schedule_free"])
def test_every_formula_takes_every_hook(name: str) -> None:
    """Cautious decay of no weight decay is the rule alone, and so is a clip that nothing reaches."""
    rule = elementwise(FORMULAS[name], backend="torch")
    hyper = replace(hyper_of(rule.formula), lr=LR)
    grads = gradients()
    for given in ([CautiousDecay()], [CoupledDecay()], [LrDecoupledDecay(1.0)], [ClipUpdateRms(1e6), CautiousDecay()]):
        subject = hooked(rule, given)
        one, other = (Kept().work(rule, start_of()) for _ in range(2))
        for step, grad in enumerate(grads, start=1):
            for r, work in ((rule, one), (subject, other)):
                r.update_([Batch(replace(hyper, step=step, weight_decay=0.0), [replace(work, grad=grad.float())])])
        assert torch.allclose(main_of(one), main_of(other), rtol=1e-5, atol=1e-6), given
        assert not torch.allclose(main_of(one), start_of(), atol=1e-3)


@pytest.mark.parametrize("name", ["l2", "cautious-decay", "cautious-update", "centralized-l2-mask-clip"])
def test_a_rule_that_maximizes_follows_the_negative_gradient(name: str) -> None:
    up, down = (hooked(Adam(maximize=m, backend="torch"), made(HOOKS[name])) for m in (True, False))
    one = run(up, Kept().work(up, start_of()), [-grad for grad in gradients()])
    other = run(down, Kept().work(down, start_of()), gradients())
    assert torch.allclose(main_of(one), main_of(other), rtol=1e-6, atol=1e-6)


def test_sums_do_not_lose_digits_with_the_size_of_a_parameter() -> None:
    """Sums in float32 over five million elements were off by 1e-4."""
    generator = torch.Generator().manual_seed(0)
    p, u = (torch.randn(5_000_001, generator=generator) + 1 for _ in range(2))
    work = Work(grad=u, main=p, state={})
    (found,) = sums_of([work], [u], ("u_squares", "p_squares", "products"))
    expected = [float(a.double() @ b.double()) for a, b in ((u, u), (p, p), (p, u))]
    # Rows of 4,096 elements in float32: each sum is off by a few 2^-24 of itself.
    assert found[2:].tolist() == pytest.approx(expected, rel=1e-6)
    assert found[:2].tolist() == [p.numel(), 0]


def test_a_floor_compares_rows_with_the_weights_and_stacks_are_refused() -> None:
    # It compared rows with the update, which is another rule than the one of this name (modded-nanogpt, track 3).
    subject = hooked(SGD(backend="torch"), [RowFloor(0.5)])
    grad, start = torch.zeros(SHAPE, dtype=torch.float64), start_of()
    grad[0], grad[1] = 10.0, 1e-3 * torch.randn(SHAPE[1], dtype=torch.float64).sign()
    moved = main_of(run(subject, Kept().work(subject, start), [grad], weight_decay=0.0)) - start_of()
    assert float(start_of()[0].norm()) < float(grad[0].norm())
    torch.testing.assert_close(moved[0], -LR * grad[0], rtol=1e-4, atol=0)
    assert float(moved[1].norm()) == pytest.approx(LR * 0.5 * float(start_of()[1].norm()), rel=1e-4)
    assert not moved[2:].any()
    assert "stacks of matrices" in shape_problem(RowFloor(1.0), Needs.MATRICES, (2, 4, 4))
    assert not shape_problem(CentralizeGradient(), Needs.MATRICES, (2, 4, 4))


# --- means of rows that span ranks: any cut of a parameter gives the means of the whole -------------------------------

CUTS = [(0, 35), (0, 7, 35), (0, 3, 5, 35), (0, 10, 11, 11, 24, 35), (0, 6, 8, 34, 35), tuple(range(36))]


def centered(grad: Tensor, rows: SpannedRows, cuts: tuple[int, ...], scale: float) -> Tensor:
    """`grad` scaled, without the means of its rows, run by run."""
    sums = torch.zeros(rows.num, dtype=torch.float64)
    runs = [(begin, grad.flatten()[begin:end]) for begin, end in pairwise(cuts)]
    for first, run in runs:
        add_row_sums_(sums, run, rows, first=first)
    found = []
    for first, run in runs:
        found.append(scale * run)
        subtract_row_means_(found[-1], RowMeans(sums / rows.whole_numel, rows, first), scale=scale)
    return torch.cat(found).view(grad.shape)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_flat_runs_lose_the_means_of_whole_rows(cuts: tuple[int, ...]) -> None:
    grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = centered(grad, SpannedRows(num=5, dims=1, local_numel=7, whole_numel=7), cuts, scale=0.25)
    torch.testing.assert_close(got, 0.25 * (grad - grad.mean(1, keepdim=True)), rtol=0.0, atol=1e-15)


@pytest.mark.parametrize("dims", [1, 2])
def test_blocks_of_columns_lose_the_means_of_whole_rows(dims: int) -> None:
    """Strided blocks, one of them without columns; rows are numbered by one dim, or of a stack of matrices by two."""
    grad = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = torch.split(grad, [4, 0, 2], dim=2)
    sums = torch.zeros(grad.shape[:dims].numel(), dtype=torch.float64)
    whole = grad.shape[dims:].numel()
    rows = [SpannedRows(sums.numel(), dims, block.shape[dims:].numel(), whole) for block in blocks]
    for block, of in zip(blocks, rows):
        add_row_sums_(sums, block, of, first=0)
    got = [block.clone() for block in blocks]
    for block, of in zip(got, rows):
        subtract_row_means_(block, RowMeans(sums / whole, of, 0), scale=1.0)
    want = grad - grad.mean(tuple(range(dims, 3)), keepdim=True)
    torch.testing.assert_close(torch.cat(got, 2), want, rtol=0.0, atol=1e-15)


def test_sums_of_narrow_gradients_do_not_overflow() -> None:
    grad = torch.full((2, 4096), 60_000.0, dtype=torch.float16)
    sums = torch.zeros(2, dtype=torch.float64)
    add_row_sums_(sums, grad.view(-1), SpannedRows(2, 1, 4096, 4096), first=0)
    assert sums.tolist() == [4096 * 60_000.0] * 2
