"""Hooks on rules: what they compute, in which numbers, and what is refused."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from elementwise_works import COMPILED, KEPT, Kept, main_of, start_of, written
from elementwise_works import HYPER as OTHER
from elementwise_works import run as run_with
from tiers import sampled

from opt_kernels import hooks
from opt_kernels.formulas import FORMULAS
from opt_kernels.hooks import (
    CautiousDecay,
    ClipUpdateRms,
    CoupledDecay,
    LrDecoupledDecay,
    RowMeans,
    SpannedRows,
    add_row_sums_,
    hooked,
)
from opt_kernels.hooks.compose import hyper_of
from opt_kernels.hooks.sums import subtract_row_means_, sums_of
from opt_kernels.rules import SGD, Adam, AdaptiveMuonRule, Lion, MuonRule, elementwise
from opt_kernels.works import Batch, Work

pytestmark = pytest.mark.usefixtures("poisoned")
LR = 0.02
WD = 0.1
MAX_LR = 0.05
NUMBERS = {"lr": LR, "weight_decay": WD}
HYPER = replace(OTHER, **NUMBERS)
SHAPE = (24, 40)
RULES = {
    "adamw": Adam,
    "adam-l2": lambda **options: Adam(decoupled=False, **options),
    "lion": Lion,
    "sgd": lambda **options: SGD(nesterov=True, **options),
}
MATRIX_RULES = {"muon": MuonRule(), "adaptive_muon": AdaptiveMuonRule()}
HOOKS = {  # by name, with their options
    "l2": {"CoupledDecay": {}},
    "cautious-decay": {"CautiousDecay": {}},
    "lr-decoupled": {"LrDecoupledDecay": {"max_lr": MAX_LR}},
    "cautious-update": {"CautiousUpdate": {}},
    "clip": {"ClipUpdateRms": {"threshold": 0.3}},
    "clip-cautious": {"ClipUpdateRms": {"threshold": 0.3}, "CautiousDecay": {}},
    "relative": {"RelativeUpdate": {}},
    "hyperball": {"Hyperball": {}},
    "hyperball-radius": {"Hyperball": {"radius": 3.0}},
    "brake": {"RadialBrake": {"outward": 0.25}},
    "pin": {"RadiusPin": {}},
    "brake-pin-clip": {"RadialBrake": {}, "RadiusPin": {}, "ClipUpdateRms": {"threshold": 0.3}},
    "brake-pin-lr-decoupled": {"RadialBrake": {}, "RadiusPin": {}, "LrDecoupledDecay": {"max_lr": MAX_LR}},
    "centralized": {"CentralizeGradient": {}},
    "floor": {"RowFloor": {"ratio": 0.9}},
    "floor-mask-cautious": {"CautiousDecay": {}, "RowFloor": {"ratio": 2.0}, "CautiousUpdate": {}},
    "centralized-l2-mask-clip": {
        "ClipUpdateRms": {"threshold": 0.3}, "CoupledDecay": {}, "CautiousUpdate": {}, "CentralizeGradient": {},
    },
}  # fmt: skip
MEASURED = [name for name in HOOKS if name not in ("l2", "cautious-decay", "lr-decoupled")]
OF_MATRICES = ["l2", "centralized", "cautious-decay", "lr-decoupled", "clip", "relative", "hyperball", "floor"]
OF_MATRICES += ["brake", "pin", "brake-pin-clip"]


def direction_of(name, shape):
    """A function of a gradient and a step: the u that the rule alone takes, from zeros, at lr 1 and without decay."""
    rule = RULES[name](backend="reference").in_float64() if name in RULES else MATRIX_RULES[name]
    work = KEPT["fp64" if name in RULES else "fp32"].work(rule, torch.zeros(shape, dtype=torch.float64))

    def direction(g, t):
        work.main.zero_()
        rule.update_([Batch(replace(HYPER, step=t, lr=1.0, weight_decay=0.0), [replace(work, grad=g.to(work.grad))])])
        return -work.main.double()

    return direction


def by_papers(rule, hooks, p, grads):
    """The weights after steps of the rule with hooks, from `p`."""
    direction = direction_of(rule, p.shape)
    coupled = rule in ("adam-l2", "sgd")  # whether the rule's own decay is in the gradient
    decay = next((h for h in hooks if h.endswith("Decay") or h == "Hyperball"), "L2" if coupled else "plain")
    for t, g in enumerate(grads, start=1):
        if "CentralizeGradient" in hooks and g.dim() > 1:
            g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
        if decay in ("CoupledDecay", "L2"):
            g = g + WD * p
        u = direction(g, t)
        if "CautiousUpdate" in hooks:
            mask = (u * g > 0).double()
            u = u * mask * (mask.numel() / (mask.sum() + 1))
        for name, options in hooks.items():
            if name == "RowFloor":
                floor = lambda row: max(float(row.norm()), 1e-8)
                u = torch.stack([r * max(1.0, options["ratio"] * floor(w) / floor(r)) for r, w in zip(u, p)])
            if name == "ClipUpdateRms":
                u = u / max(1.0, float(u.square().mean().sqrt()) / options["threshold"])
            if name == "RelativeUpdate":
                u = u * p.norm() / u.norm()
        u = braked(u, p, hooks)
        if decay == "Hyperball":
            radius = hooks["Hyperball"].get("radius") or p.norm()
            to = p - LR * radius * u / u.norm()
            p = radius * to / to.norm()
            continue
        amount = {"plain": LR * WD, "LrDecoupledDecay": LR / MAX_LR * WD}.get(decay, 0.0)
        if decay == "CautiousDecay":
            amount = LR * WD * (u * p >= 0).double()
        p = pinned(p - LR * u, u, p, hooks) - amount * p
    return p


def braked(u, p, hooks):
    c = (u * p).sum() / p.square().sum() if "RadialBrake" in hooks else 0.0
    return u if c >= 0 else u - (1 - hooks["RadialBrake"].get("outward", 0.5)) * c * p


def pinned(to, u, p, hooks):
    return to * (p.norm() - LR * (u * p).sum() / p.norm()) / to.norm() if "RadiusPin" in hooks else to


def run(rule, work, grads, **options):
    return run_with(rule, work, grads, **{**NUMBERS, **options})


def made(specs):
    return tuple(getattr(hooks, name)(**options) for name, options in specs.items())


def gradients(shape=SHAPE, steps=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16().double() for _ in range(steps)]


OF_PAPERS = [*product(HOOKS, RULES, ["fp64", "fp32", "fp32-out16-g16", "remainder-g16", "bf16"])]


@pytest.mark.parametrize(("name", "rule", "kept"), sampled(OF_PAPERS, enumerate))
def test_a_hooked_rule_follows_the_papers_equations(name, rule, kept):
    states = [f"{state}_dtype" for state in RULES[rule]().codecs] if kept == "fp64" else []
    subject = hooked(RULES[rule](backend="torch", **dict.fromkeys(states, torch.float64)), made(HOOKS[name]))
    found = main_of(run(subject, KEPT[kept].work(subject, start_of(SHAPE)), gradients(), scale=0.5))
    expected = by_papers(rule, HOOKS[name], start_of(SHAPE), [0.5 * grad for grad in gradients()])
    # Four roundings of a main, and float32 arithmetic of steps of at most 4 lr.
    rounding = {"fp64": 2.0**-44, "bf16": 2.0**-8}.get(kept, 2.0**-21)
    atol = 4 * rounding * 0.1
    if "CautiousUpdate" in HOOKS[name] and kept != "fp64":
        atol += 4 * LR * 4 / found.numel()  # an element that is masked on one side changes the factor of all
    close = torch.isclose(found, expected, rtol=4 * rounding, atol=atol)
    # Lion moves by a sign, masks by another: sums that are next to zero have either sign after rounding.
    jumps = rule == "lion" or "cautious" in name or "mask" in name
    allowed = 0.02 if kept == "bf16" else 0.002
    assert (~close).double().mean() <= (allowed if jumps else 0)


ON_BACKENDS = [(rule, name) for rule in RULES for name in HOOKS if rule == "adamw" or name not in MEASURED]


@COMPILED
@pytest.mark.parametrize(("rule", "name"), ON_BACKENDS)
def test_hooked_rules_agree_on_every_backend(rule, name, backend):
    kept = Kept(out=torch.bfloat16)
    expected, found = (
        run(hooked(RULES[rule](backend=b), made(HOOKS[name])), kept.work(RULES[rule](), start_of(SHAPE)), gradients())
        for b in ("reference", backend)
    )
    if name not in MEASURED:
        assert all(map(torch.equal, written(found), written(expected)))
    close = torch.isclose(main_of(found), main_of(expected), rtol=1e-6, atol=1e-6)
    assert (~close).double().mean() <= (0.002 if "mask" in name or "cautious" in name else 0)


@pytest.mark.parametrize("name", HOOKS)
def test_a_skipped_step_changes_no_byte(name):
    rule = Adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8, backend="torch")
    subject = hooked(rule, made(HOOKS[name]))
    for kept in (Kept(out=torch.bfloat16), Kept(main=None, out=torch.bfloat16)):
        work = run(subject, kept.work(subject, start_of(SHAPE)), gradients(steps=1))
        before = [tensor.clone() for tensor in written(work)]
        batch = Batch(replace(HYPER, step=2), [replace(work, grad=torch.full(SHAPE, torch.inf))])
        subject.update_([batch], skip=torch.ones(()))
        assert all(map(torch.equal, written(work), before))


@pytest.mark.parametrize("name", ["cautious-decay", "clip"])
def test_a_rule_that_rounds_stochastically_still_does(name):
    subject = hooked(Adam(stochastic_rounding=True, backend="torch"), made(HOOKS[name]))
    ones = torch.ones(64, 64)
    found = main_of(run(subject, Kept(main=torch.bfloat16).work(subject, ones.double()), [ones]))
    assert len(found.unique()) == 2


@pytest.mark.parametrize("name", MEASURED)
def test_many_works_and_groups_are_updated_as_each_alone(name):
    subject = hooked(Adam(backend="torch"), made(HOOKS[name]))
    hypers = [HYPER, replace(HYPER, lr=0.01)]
    together, alone = (
        [
            replace(Kept().work(subject, start_of(shape)), grad=gradients(shape, 1)[0].float())
            for shape in ((8, 16), (5, 3), (7, 64), (4, 4))
        ]
        for _ in range(2)
    )
    subject.update_([Batch(hypers[0], together[:2]), Batch(hypers[1], together[2:])])
    for index, work in enumerate(alone):
        subject.update_([Batch(hypers[index // 2], [work])])
    assert all(map(torch.equal, map(main_of, together), map(main_of, alone)))


@pytest.mark.parametrize("name", MEASURED)
def test_device_numbers_are_followed(name):
    subject = hooked(Adam(backend="torch"), made(HOOKS[name]))
    tensors = {"lr": torch.tensor(LR, dtype=torch.float64), "weight_decay": torch.tensor(WD, dtype=torch.float64)}
    found, expected = (
        main_of(run(subject, Kept().work(subject, start_of(SHAPE)), gradients(steps=1), **numbers))
        for numbers in ({"scale": torch.tensor(0.5), **tensors}, {"scale": 0.5})
    )
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", MATRIX_RULES)
@pytest.mark.parametrize("name", OF_MATRICES)
def test_matrix_rules_take_hooks(name, rule):
    expected = by_papers(rule, HOOKS[name], start_of(SHAPE), gradients())
    subject = hooked(MATRIX_RULES[rule], made(HOOKS[name]))
    found = run(subject, KEPT["fp32"].work(subject, start_of(SHAPE)), gradients())
    torch.testing.assert_close(main_of(found), expected, rtol=1e-4, atol=1e-4)


def test_small_empty_and_zero_works_stay_finite():
    zeros = torch.zeros(SHAPE, dtype=torch.float64)
    for name in ("clip", "relative", "cautious-update", "centralized", "hyperball", "floor"):
        subject = hooked(SGD(backend="torch"), made(HOOKS[name]))
        cases = [(start_of(shape), gradients(shape)) for shape in ((0, 4), (1, 1), (3,))]
        for start, grads in (*cases, (zeros, gradients()), (start_of(SHAPE), [zeros]), (zeros, [zeros])):
            found = main_of(run(subject, Kept().work(subject, start), grads, weight_decay=0.0))
            assert found.isfinite().all(), name
            assert grads[0] is not zeros or torch.allclose(found, start), name


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "schedule_free"])
def test_every_formula_takes_every_hook(name):
    rule = elementwise(FORMULAS[name], backend="torch")
    hyper = replace(hyper_of(rule.formula), lr=LR, weight_decay=0.0)

    def moved(rule):
        work = Kept().work(rule, start_of(SHAPE))
        for step, grad in enumerate(gradients(), start=1):
            rule.update_([Batch(replace(hyper, step=step), [replace(work, grad=grad.float())])])
        return main_of(work)

    expected = moved(rule)
    assert not torch.allclose(expected, start_of(SHAPE), atol=1e-3)
    for given in ([CautiousDecay()], [CoupledDecay()], [LrDecoupledDecay(1.0)], [ClipUpdateRms(1e6), CautiousDecay()]):
        assert torch.allclose(moved(hooked(rule, given)), expected, rtol=1e-5, atol=1e-6), given


@pytest.mark.parametrize("name", ["l2", "cautious-decay", "cautious-update", "centralized-l2-mask-clip"])
def test_a_rule_that_maximizes_follows_the_negative_gradient(name):
    up, down = (
        main_of(run(subject, Kept().work(subject, start_of(SHAPE)), [sign * grad for grad in gradients()]))
        for sign in (-1, 1)
        for subject in [hooked(Adam(maximize=sign < 0, backend="torch"), made(HOOKS[name]))]
    )
    assert torch.allclose(up, down, rtol=1e-6, atol=1e-6)


def test_sums_do_not_lose_digits_with_the_size_of_a_parameter():
    generator = torch.Generator().manual_seed(0)
    p, u = (torch.randn(5_000_001, generator=generator) + 1 for _ in range(2))
    (found,) = sums_of([Work(grad=u, main=p, state={})], [u], ("u_squares", "p_squares", "products"))
    expected = [float(a.double() @ b.double()) for a, b in ((u, u), (p, p), (p, u))]
    # Rows of 4,096 elements in float32: each sum is off by a few 2^-24 of itself.
    assert found[2:].tolist() == pytest.approx(expected, rel=1e-6)
    assert found[:2].tolist() == [p.numel(), 0]


@pytest.mark.parametrize("dims", [1, 2])
def test_blocks_of_columns_lose_the_means_of_whole_rows(dims):
    """Strided blocks, one of them without columns; rows are numbered by one dim, or of a stack of matrices by two."""
    grad = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = torch.split(grad.clone(), [4, 0, 2], dim=2)
    sums = torch.zeros(grad.shape[:dims].numel(), dtype=torch.float64)
    whole = grad.shape[dims:].numel()
    rows = [SpannedRows(sums.numel(), dims, block.shape[dims:].numel(), whole) for block in blocks]
    for block, of in zip(blocks, rows):
        add_row_sums_(sums, block, of, first=0)
    for block, of in zip(blocks, rows):
        subtract_row_means_(block, RowMeans(sums / whole, of, 0), scale=1.0)
    want = grad - grad.mean(tuple(range(dims, 3)), keepdim=True)
    torch.testing.assert_close(torch.cat(blocks, 2), want, rtol=0.0, atol=1e-15)


def test_sums_of_narrow_gradients_do_not_overflow():
    grad = torch.full((2, 4096), 60_000.0, dtype=torch.float16)
    sums = torch.zeros(2, dtype=torch.float64)
    add_row_sums_(sums, grad.view(-1), SpannedRows(2, 1, 4096, 4096), first=0)
    assert sums.tolist() == [4096 * 60_000.0] * 2
