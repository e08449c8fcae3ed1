"""Works that elementwise rules take on every backend: layouts, cuts, skips, refusals, narrow and special numbers.

Pairs of rules, formats and backends; all combinations at night.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from elementwise_works import (
    BACKENDS,
    COMBINATIONS,
    FAST,
    HYPER,
    KEPT,
    NEEDS_COMPILER,
    ON_BACKENDS,
    ON_FAST,
    RULES,
    Combination,
    Kept,
    Make,
    cut,
    device_of,
    gradients,
    main_of,
    on,
    on_pairs_of,
    run,
    start_of,
    work_of,
    written,
)
from torch import Tensor

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.torch_native import PIECE_NUMEL
from opt_kernels.rules import SGD, Adam, Lion, Rule
from opt_kernels.works import Batch, Work

# Of the rules that `HYPER` has all numbers of.
CODED = {
    name: combination
    for name, combination in COMBINATIONS.items()
    if combination.formula.name in ("adam", "lion", "sgd")
    and combination.formula.states
    and combination.states not in ("fp32", "bf16")
}
pytestmark = pytest.mark.usefixtures("poisoned")


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a tensor, which tell NaNs and zeros apart as numbers do not."""
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@on_pairs_of(make=RULES, kept=KEPT, backend=BACKENDS)
def test_gradients_and_neighbours_are_never_written(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    frame = kept.work(rule, start_of((3 * 1025,), backend))
    work = replace(cut(frame, slice(1025, 2050)), grad=gradients((1025,), kept.grad)[0].to(device_of(backend)))
    grad = bits(work.grad)
    before = [(bits(t[:1025]), bits(t[2050:])) for t in written(frame)]
    rule.update_([Batch(HYPER, [work])], grad_scale=0.5)
    assert bits(work.grad) == grad
    assert [(bits(t[:1025]), bits(t[2050:])) for t in written(frame)] == before


@on_pairs_of(make=RULES, kept=KEPT, backend=BACKENDS)
def test_a_skip_flag_leaves_every_byte_unchanged(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    device = device_of(backend)
    lost = torch.full((130,), torch.nan, dtype=kept.grad, device=device)
    work = replace(run(rule, kept.work(rule, start_of((130,), backend))), grad=lost)
    before = [bits(tensor) for tensor in written(work)]
    rule.update_([Batch(HYPER, [work])], skip=torch.tensor(1, device=device))
    assert [bits(tensor) for tensor in written(work)] == before
    batch = Batch(replace(HYPER, step=4), [replace(work, grad=torch.full_like(lost, 9.0))])
    rule.update_([batch], skip=torch.tensor(0, device=device))
    assert [bits(tensor) for tensor in written(work)] != before


def stepped_in_pieces(rule: Rule, kept: Kept, size: int, cuts: list[int], block: int = 1, **scale: float) -> None:
    """Check that two steps of a parameter and of its pieces have the same bits."""
    whole, pieces = (kept.work(rule, start_of((size,), rule.backend)) for _ in range(2))
    whole = run(rule, whole, steps=2, **scale)
    for step, grad in enumerate(gradients((size,), kept.grad, 2), start=1):
        works = [
            cut(replace(pieces, grad=grad.to(device_of(rule.backend))), slice(a, b), block) for a, b in pairwise(cuts)
        ]
        rule.update_([Batch(replace(HYPER, step=step), works)], grad_scale=scale.get("scale", 1.0))
    assert all(map(torch.equal, written(whole), written(pieces)))


@on_pairs_of(make=RULES, kept=KEPT, scale={"1": 1.0, "0.3": 0.3}, backend=FAST)
def test_the_bits_do_not_depend_on_how_a_parameter_is_cut(make: Make, kept: Kept, scale: float, backend: str) -> None:
    tile = 2048 if backend == "triton" else PIECE_NUMEL  # an interpreter takes its time
    size = tile + 64 * 50 + 37
    cuts = [0, 64, 64 * 3, 64 * 31, tile - 64, tile + 64, size]
    stepped_in_pieces(make(backend=backend), kept, size, sorted(cuts), scale=scale)


@ON_FAST
@pytest.mark.parametrize("combination", CODED.values(), ids=CODED.keys())
def test_coded_states_are_cut_at_blocks_without_a_trace(combination: Combination, backend: str) -> None:
    rule = combination.rule(backend)
    stepped_in_pieces(rule, KEPT[combination.kept], 128 * 21 + 5, [0, 128, 128 * 20, 128 * 21 + 5], block=128)


def test_stochastic_rounding_counts_on_from_piece_to_piece() -> None:
    rule = Adam(stochastic_rounding=True, backend="torch")
    size = PIECE_NUMEL + 128
    stepped_in_pieces(rule, KEPT["bf16"], size, [0, 64, size])


@ON_FAST
def test_works_of_any_dtypes_go_together_in_one_call(backend: str) -> None:
    kinds = [kept for name, kept in KEPT.items() if (backend, name) != ("triton", "fp64")]
    rule = Adam(backend=backend)
    hypers = [HYPER] * 5 + [replace(HYPER, lr=0.5)] * (len(kinds) - 5)
    together, alone = (
        [
            replace(kept.work(rule, start_of((200,), backend)), grad=gradients((200,), kept.grad)[0].to(device))
            for kept in kinds
        ]
        for device in [device_of(backend)] * 2
    )
    rule.update_([Batch(HYPER, together[:5]), Batch(hypers[-1], together[5:])], grad_scale=0.5)
    rule.update_([])
    rule.update_([Batch(HYPER, [])])
    for hyper, one, other in zip(hypers, together, alone):
        rule.update_([Batch(hyper, [other])], grad_scale=0.5)
        assert all(map(torch.equal, written(one), written(other)))


@ON_BACKENDS
def test_numbers_may_be_tensors(backend: str) -> None:
    for name, make in RULES.items():
        rule = make(backend=backend)
        device = device_of(backend)
        plain, tensors = (work_of(rule, 70, "fp32", backend) for _ in range(2))
        rule.update_([Batch(HYPER, [plain])], grad_scale=0.25)
        lr, decay, scale = torch.tensor([1e-2, 0.1, 0.25], dtype=torch.float64, device=device)
        hyper = replace(HYPER, lr=lr, weight_decay=decay, step=torch.tensor(1, device=device))
        rule.update_([Batch(hyper, [tensors])], grad_scale=scale)
        assert all(map(torch.equal, written(plain), written(tensors))), name


@ON_FAST
def test_a_tensor_may_hold_a_momentum_of_zero(backend: str) -> None:
    found = []
    for name in ("reference", backend):
        rule = SGD(backend=name)
        device = device_of(name)
        work = replace(work_of(rule, 100, "fp32", name), grad=torch.ones(100, device=device))
        for step, momentum in enumerate((0.9, torch.zeros((), device=device), 0.9), start=1):
            rule.update_([Batch(replace(HYPER, step=step, momentum=momentum), [work])])
        found.append(main_of(work).cpu())
    torch.testing.assert_close(found[1], found[0])


@on("reference", "torch", "cpp")
def test_long_dense_layouts_work_with_states_of_other_sizes(backend: str) -> None:
    turned = [torch.randn(2, 2, PIECE_NUMEL).transpose(0, 1) for _ in range(2)]
    straight = [tensor.clone(memory_format=torch.contiguous_format) for tensor in turned]
    rule = Adam(backend=backend)
    for main, grad in turned, straight:
        state = rule.init_state(main) | {"step": torch.zeros(())}
        rule.update_([Batch(HYPER, [Work(grad=grad, main=main, state=state)])], grad_scale=0.5)
    assert torch.equal(turned[0], straight[0])


def test_orders_without_a_fused_sweep_allocate_no_parameter() -> None:
    work = replace(KEPT["fp32"].work(Adam(), start_of((9 * PIECE_NUMEL,))), grad=torch.randn(9 * PIECE_NUMEL))
    with torch.profiler.profile(profile_memory=True) as profile:
        Adam(order="te", backend="torch").update_([Batch(HYPER, [work])])
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * PIECE_NUMEL


@ON_BACKENDS
def test_a_gradient_whose_sign_is_a_flag_is_read_with_it(backend: str) -> None:
    # As the gradient of an imaginary part may be.
    lazy, plain = (work_of(SGD(), 70, "fp32", backend) for _ in range(2))
    SGD(backend=backend).update_([Batch(HYPER, [replace(lazy, grad=torch._neg_view(-lazy.grad))])])
    SGD(backend=backend).update_([Batch(HYPER, [plain])])
    assert torch.equal(main_of(lazy), main_of(plain))


def halves(out: torch.dtype, remainder: torch.dtype | None) -> dict[str, Any]:
    rest = None if remainder is None else torch.zeros(3, 4, dtype=remainder)
    return {"main": None, "out": torch.ones(3, 4, dtype=out), "remainder": rest}


# Swept by address, these would be read or written at wrong places, with a wrong sign, or beyond their end.
REFUSED_TENSORS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"exp_avg": torch.zeros(4, 3).t()}, "allowed are equal strides"),
    (lambda: {"out": torch.zeros(4, 3).t()}, "allowed are equal strides"),
    (lambda: {"main": torch._neg_view(torch.zeros(3, 4))}, "resolve_neg"),
    (lambda: {"exp_avg": torch._neg_view(torch.zeros(3, 4))}, "resolve_neg"),
    (lambda: {"out": torch._neg_view(torch.zeros(3, 4))}, "resolve_neg"),
    (lambda: {"exp_avg": torch.zeros(3)}, r"has shape \(3,\) where its parameter has \(3, 4\)"),
    (lambda: {"out": torch.zeros(99)}, r"has shape \(99,\) where its parameter has \(3, 4\)"),
    (lambda: {"main": torch.zeros(3, 8)[:, ::2]}, "make the parameter contiguous"),
    (lambda: {"main": None}, "neither a main nor its two halves"),
    (lambda: halves(torch.bfloat16, torch.uint8), "neither a main nor its two halves"),
    (lambda: halves(torch.bfloat16, None), "neither a main nor its two halves"),
    (lambda: halves(torch.float16, torch.int16), "neither a main nor its two halves"),
]


@ON_BACKENDS
def test_tensors_that_a_sweep_would_misread_are_refused(backend: str) -> None:
    rule = Lion(backend=backend)
    for tensors, message in REFUSED_TENSORS:
        with torch.device(device_of(backend)):
            given = tensors()
            ones = torch.ones(3, 4)
        state = rule.init_state(ones) | {key: given.pop(key) for key in ("exp_avg",) if key in given}
        with pytest.raises(LayoutError, match=message):
            rule.update_([Batch(HYPER, [Work(state=state, **{"grad": ones, "main": ones.clone(), **given})])])


@NEEDS_COMPILER
def test_compiled_sweeps_refuse_what_is_in_no_cpu_memory() -> None:
    work = replace(work_of(Adam(), 100, "fp32"), state=Adam().init_state(torch.empty(100, device="meta")))
    with pytest.raises(LayoutError, match="meta"):
        Adam(backend="cpp").update_([Batch(HYPER, [work])])


@on_pairs_of(make=RULES, kept=KEPT, backend=BACKENDS)
def test_a_lost_gradient_reaches_the_weight(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    work = kept.work(rule, start_of((70,), backend))
    work.grad.fill_(1.0)[[3, 69]] = torch.nan
    rule.update_([Batch(HYPER, [work])])
    for weight in (main_of(work), work.out):
        assert weight is None or weight.isnan().nonzero().flatten().tolist() == [3, 69]


@ON_BACKENDS
@pytest.mark.parametrize("combination", CODED.values(), ids=CODED.keys())
def test_an_outlier_loses_its_own_states_only(combination: Combination, backend: str) -> None:
    """Symptom: one infinite, NaN or huge element lost the states, and so the weights, of the 127 next to it."""
    kept = KEPT[combination.kept]
    rule = combination.rule(backend)
    sizes = [torch.inf, -torch.inf, torch.nan] + [1e30] * (kept.grad is not torch.float16)
    at = [1 + 70 * index for index in range(len(sizes))]
    found = []
    for bad in (torch.zeros(len(sizes)), torch.tensor(sizes)):
        grads = gradients((300,), kept.grad)
        start = start_of((300,), backend)
        start[at] = 0.0
        for grad in grads:
            grad[at] = 0.0
        grads[-1][at] = bad.to(grads[-1])  # the last: with L2 decay, weights reach states
        found.append(run(rule, kept.work(rule, start), grads, scale=0.5))
    others = torch.ones(300, dtype=torch.bool)
    others[at] = False
    expected, moved = (main_of(work)[others] for work in found)
    assert expected.isfinite().all()
    assert torch.equal(moved, expected)
    for name, state in found[0].state.items():
        assert torch.equal(found[1].state[name].float(), state.float()), name


@ON_BACKENDS
def test_an_infinite_parameter_stays_infinite(backend: str) -> None:
    infinite = torch.full((70,), -torch.inf, dtype=torch.float64, device=device_of(backend))
    for name, make in RULES.items():
        for decay in (0.0, 0.1) if name in ("adamw", "lion") else (0.0,):
            rule = make(backend=backend)
            work = KEPT["fp32"].work(rule, infinite)
            rule.update_([Batch(replace(HYPER, weight_decay=decay), [work])])
            assert bool((main_of(work) == -torch.inf).all()), (name, decay)
