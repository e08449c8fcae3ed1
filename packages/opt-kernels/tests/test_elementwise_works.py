"""Works that elementwise rules take on every backend: layouts, cuts, skips, refusals, narrow and special numbers.

Pairs of rules, formats and backends; all combinations at night.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from elementwise_works import (
    BACKENDS,
    FAST,
    HYPER,
    KEPT,
    NEEDS_COMPILER,
    ON_BACKENDS,
    ON_FAST,
    ON_RULES,
    RULES,
    Kept,
    Make,
    cut,
    device_of,
    gradients,
    main_of,
    on_pairs_of,
    run,
    start_of,
    written,
)
from torch import Tensor

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.torch_native import PIECE_NUMEL
from opt_kernels.rules import SGD, Adam, Lion
from opt_kernels.works import Batch, Work

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
    rule, device = make(backend=backend), device_of(backend)
    lost = torch.full((130,), torch.nan, dtype=kept.grad, device=device)
    work = replace(run(rule, kept.work(rule, start_of((130,), backend))), grad=lost)
    before = [bits(tensor) for tensor in written(work)]
    rule.update_([Batch(HYPER, [work])], skip=torch.tensor(1, device=device))
    assert [bits(tensor) for tensor in written(work)] == before
    batch = Batch(replace(HYPER, step=4), [replace(work, grad=torch.full_like(lost, 9.0))])
    rule.update_([batch], skip=torch.tensor(0, device=device))
    assert [bits(tensor) for tensor in written(work)] != before


@on_pairs_of(make=RULES, kept=KEPT, scale={"1": 1.0, "0.3": 0.3}, backend=FAST)
def test_the_bits_do_not_depend_on_how_a_parameter_is_cut(make: Make, kept: Kept, scale: float, backend: str) -> None:
    rule = make(backend=backend)
    tile = 2048 if backend == "triton" else PIECE_NUMEL  # an interpreter takes its time
    size = tile + 64 * 50 + 37
    cuts = [0, 64, 64 * 3, 64 * 31, tile - 64, tile + 64, size]
    whole, pieces = (kept.work(rule, start_of((size,), backend)) for _ in range(2))
    whole = run(rule, whole, scale=scale, steps=2)
    for step, grad in enumerate(gradients((size,), kept.grad, 2), start=1):
        pieces = replace(pieces, grad=grad.to(device_of(backend)))
        rule.update_(
            [Batch(replace(HYPER, step=step), [cut(pieces, slice(a, b)) for a, b in pairwise(sorted(cuts))])],
            grad_scale=scale,
        )
    for one, other in zip(written(whole), written(pieces), strict=True):
        assert torch.equal(one, other)


@ON_FAST
def test_works_of_any_dtypes_go_together_in_one_call(backend: str) -> None:
    def works() -> list[Work]:
        made = [kept.work(Adam(), start_of((200,), backend)) for kept in kinds]
        return [
            replace(work, grad=gradients((200,), kept.grad)[0].to(device_of(backend)))
            for work, kept in zip(made, kinds, strict=True)
        ]

    kinds = [kept for name, kept in KEPT.items() if (backend, name) != ("triton", "fp64")]
    rule, together, alone = Adam(backend=backend), works(), works()
    rule.update_([Batch(HYPER, together[:5]), Batch(replace(HYPER, lr=0.5), together[5:])], grad_scale=0.5)
    for index, work in enumerate(alone):
        rule.update_([Batch(HYPER if index < 5 else replace(HYPER, lr=0.5), [work])], grad_scale=0.5)
    for one, other in zip(together, alone):
        assert all(torch.equal(a, b) for a, b in zip(written(one), written(other), strict=True))


@ON_RULES
@ON_BACKENDS
def test_numbers_may_be_tensors(make: Make, backend: str) -> None:
    rule = make(backend=backend)
    plain, tensors = (KEPT["fp32"].work(rule, start_of((70,), backend)) for _ in range(2))
    grad = gradients((70,), torch.float32)[0].to(device_of(backend))
    rule.update_([Batch(HYPER, [replace(plain, grad=grad)])], grad_scale=0.25)
    lr, decay, scale = torch.tensor([1e-2, 0.1, 0.25], dtype=torch.float64, device=device_of(backend))
    hyper = replace(HYPER, lr=lr, weight_decay=decay, step=torch.tensor(1, device=device_of(backend)))
    rule.update_([Batch(hyper, [replace(tensors, grad=grad)])], grad_scale=scale)
    assert all(torch.equal(a, b) for a, b in zip(written(plain), written(tensors), strict=True))


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "channels last": lambda t: t.view(6, 5, 2, 4).to(memory_format=torch.channels_last),
    "of size one": lambda t: t.view(1, 240, 1).transpose(0, 2),
}


@pytest.mark.parametrize("arrange", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("same_layout", [True, False], ids=["gradient in the same layout", "gradient contiguous"])
@ON_BACKENDS
def test_any_dense_layout_is_walked(arrange: Callable[[Tensor], Tensor], same_layout: bool, backend: str) -> None:
    rule = Adam(backend=backend, exp_avg_dtype=torch.bfloat16)
    start, grad = start_of((30, 8), backend).float(), gradients((30, 8), torch.float32)[0].to(device_of(backend))
    expected, main = arrange(start.clone()), arrange(start.clone())
    shaped = arrange(grad)
    straight = Work(grad=shaped.contiguous(), main=expected.contiguous(), state=rule.init_state(expected.contiguous()))
    rule.update_([Batch(HYPER, [straight])], grad_scale=0.5)
    work = Work(grad=shaped if same_layout else shaped.contiguous(), main=main, state=rule.init_state(main))
    rule.update_([Batch(HYPER, [work])], grad_scale=0.5)
    assert straight.main is not None
    assert torch.equal(main, straight.main)


@pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpp", marks=NEEDS_COMPILER)])
def test_a_dense_layout_longer_than_a_tile_works_with_states_of_other_sizes(backend: str) -> None:
    turned = [torch.randn(2, 2, PIECE_NUMEL).transpose(0, 1) for _ in range(2)]
    straight = [tensor.clone(memory_format=torch.contiguous_format) for tensor in turned]
    rule = Adam(backend=backend)
    for main, grad in turned, straight:
        state = rule.init_state(main) | {"step": torch.zeros(())}
        rule.update_([Batch(HYPER, [Work(grad=grad, main=main, state=state)])], grad_scale=0.5)
    assert torch.equal(turned[0], straight[0])


def test_an_order_without_a_fused_sweep_makes_no_tensor_of_a_parameters_size() -> None:
    work = replace(KEPT["fp32"].work(Adam(), start_of((9 * PIECE_NUMEL,))), grad=torch.randn(9 * PIECE_NUMEL))
    with torch.profiler.profile(profile_memory=True) as profile:
        Adam(order="te", backend="torch").update_([Batch(HYPER, [work])])
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * PIECE_NUMEL


@ON_FAST
def test_a_tensor_may_hold_a_momentum_of_zero(backend: str) -> None:
    """The torch backend raised RuntimeError: torch's fused SGD takes no buffer then."""
    found = []
    for name in ("reference", backend):
        rule, device = SGD(backend=name), device_of(name)
        work = replace(KEPT["fp32"].work(rule, start_of((100,), name)), grad=torch.ones(100, device=device))
        for step, momentum in enumerate((0.9, torch.zeros((), device=device), 0.9), start=1):
            rule.update_([Batch(replace(HYPER, step=step, momentum=momentum), [work])])
        found.append(main_of(work).cpu())
    torch.testing.assert_close(found[1], found[0])


def turned() -> Tensor:
    return torch.zeros(4, 3).t()


def flagged() -> Tensor:
    return torch._neg_view(torch.zeros(3, 4))


def with_holes() -> Tensor:
    return torch.zeros(3, 8)[:, ::2]


def halves(out: torch.dtype, remainder: torch.dtype) -> dict[str, Any]:
    return {"main": None, "out": torch.ones(3, 4, dtype=out), "remainder": torch.zeros(3, 4, dtype=remainder)}


# Swept by address, these would be read or written at wrong places, with a wrong sign, or beyond their end.
REFUSED_TENSORS: Mapping[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a state in another order": (lambda: {"exp_avg": turned()}, "allowed are equal strides"),
    "an out in another order": (lambda: {"out": turned()}, "allowed are equal strides"),
    "a main with its sign in a flag": (lambda: {"main": flagged()}, "resolve_neg"),
    "a state with its sign in a flag": (lambda: {"exp_avg": flagged()}, "resolve_neg"),
    "an out with its sign in a flag": (lambda: {"out": flagged()}, "resolve_neg"),
    "a shorter state": (lambda: {"exp_avg": torch.zeros(3)}, r"has shape \(3,\) where its parameter has \(3, 4\)"),
    "a longer out": (lambda: {"out": torch.zeros(99)}, r"has shape \(99,\) where its parameter has \(3, 4\)"),
    "a main with holes": (lambda: {"main": with_holes()}, "make the parameter contiguous"),
    "a remainder of uint8": (lambda: halves(torch.bfloat16, torch.uint8), "neither a main nor its two halves"),
    "a remainder of int32": (lambda: halves(torch.bfloat16, torch.int32), "neither a main nor its two halves"),
    "no remainder": (lambda: halves(torch.bfloat16, torch.int16) | {"remainder": None}, "neither a main nor its two"),
    "no halves": (lambda: {"main": None}, "neither a main nor its two halves"),
    "halves in float16": (lambda: halves(torch.float16, torch.int16), "neither a main nor its two halves"),
    "halves in float32": (lambda: halves(torch.float32, torch.int16), "neither a main nor its two halves"),
}


@ON_BACKENDS
def test_tensors_that_a_sweep_would_misread_are_refused(backend: str) -> None:
    device = device_of(backend)
    for tensors, message in REFUSED_TENSORS.values():
        with torch.device(device):
            given = tensors()
        rule = Lion(backend=backend)
        main, state = torch.ones(3, 4, device=device), rule.init_state(torch.ones(3, 4, device=device))
        work = {"grad": torch.ones(3, 4, device=device), "main": main, **given}
        state |= {key: work.pop(key) for key in given if key in state}
        with pytest.raises(LayoutError, match=message):
            rule.update_([Batch(HYPER, [Work(state=state, **work)])])


@NEEDS_COMPILER
def test_compiled_sweeps_refuse_what_is_in_no_cpu_memory() -> None:
    work = KEPT["fp32"].work(Adam(), start_of((100,)))
    work = replace(work, grad=torch.randn(100), state=Adam().init_state(torch.empty(100, device="meta")))
    with pytest.raises(LayoutError, match="meta"):
        Adam(backend="cpp").update_([Batch(HYPER, [work])])


# --- numbers ---------------------------------------------------------------------------------------------------------

NARROW = {
    "bf16": (torch.bfloat16, torch.bfloat16, 2.0**-8),
    "fp16": (torch.float16, torch.float16, 2.0**-11),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, 2.0**-4),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2, 2.0**-3),
    "8 bit": (torch.int8, torch.uint8, 2.0**-6),
}


@on_pairs_of(narrow=NARROW, kept=KEPT, backend=FAST)
def test_narrow_moments_stay_close_and_are_cut_at_blocks_without_a_trace(
    narrow: tuple[torch.dtype, torch.dtype, float], kept: Kept, backend: str
) -> None:
    first, second, rounding = narrow
    rule = Adam(exp_avg_dtype=first, exp_avg_sq_dtype=second, backend=backend)
    size, start = 128 * 21 + 5, start_of((128 * 21 + 5,), backend)
    whole, pieces = kept.work(rule, start), kept.work(rule, start)
    whole = run(rule, whole, scale=0.5)
    for step, grad in enumerate(gradients((size,), kept.grad), start=1):
        parts = [slice(0, 128), slice(128, 128 * 20), slice(128 * 20, size)]
        works = [cut(replace(pieces, grad=grad.to(device_of(backend))), part, 128) for part in parts]
        rule.update_([Batch(replace(HYPER, step=step), works)], grad_scale=0.5)
    for one, other in zip(written(whole), written(pieces), strict=True):
        assert torch.equal(one, other)
    exact = run(Adam(backend="reference"), KEPT["fp64"].work(Adam(), start_of((size,))), scale=0.5)
    # Two of three steps see rounded moments, each within `rounding` of its block's largest; an element far below it
    # moves by at most as much as a large one, lr.
    typical = (main_of(whole) - main_of(exact)).abs().median()
    assert typical < 1e-2 * (4 * rounding) + (2.0**-8 if kept.main is torch.bfloat16 else 0)


@on_pairs_of(make=RULES, kept=KEPT, backend=BACKENDS)
def test_a_lost_gradient_reaches_the_weight(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    work = kept.work(rule, start_of((70,), backend))
    work.grad.fill_(1.0)[[3, 69]] = torch.nan
    rule.update_([Batch(HYPER, [work])])
    for weight in (main_of(work), work.out):
        assert weight is None or weight.isnan().nonzero().flatten().tolist() == [3, 69]


@ON_BACKENDS
def test_an_infinite_parameter_stays_infinite_without_weight_decay_or_with_a_decoupled_one(backend: str) -> None:
    infinite = torch.full((70,), -torch.inf, dtype=torch.float64, device=device_of(backend))
    for name, make in RULES.items():
        for decay in (0.0, 0.1) if name in ("adamw", "lion") else (0.0,):
            rule = make(backend=backend)
            work = KEPT["fp32"].work(rule, infinite)
            rule.update_([Batch(replace(HYPER, weight_decay=decay), [work])])
            assert bool((main_of(work) == -torch.inf).all()), (name, decay)


@ON_BACKENDS
def test_a_gradient_whose_sign_is_a_flag_is_read_with_it(backend: str) -> None:
    # As the gradient of an imaginary part may be.
    ones = torch.ones(70, device=device_of(backend))
    lazy, plain = (replace(KEPT["fp32"].work(SGD(), start_of((70,), backend)), grad=ones) for _ in range(2))
    SGD(backend=backend).update_([Batch(HYPER, [replace(lazy, grad=torch._neg_view(-lazy.grad))])])
    SGD(backend=backend).update_([Batch(HYPER, [plain])])
    assert torch.equal(main_of(lazy), main_of(plain))


@ON_BACKENDS
def test_stochastic_rounding_is_right_on_average_whatever_the_cut(backend: str) -> None:
    rule = Adam(stochastic_rounding=True, backend=backend)
    size, hyper = 64 * 50, replace(HYPER, lr=1e-4, weight_decay=0.0)
    start = torch.full((size,), 1.0, dtype=torch.float64, device=device_of(backend))
    whole, pieces = (KEPT["bf16"].work(rule, start) for _ in range(2))
    for step in range(1, 21):
        grad = torch.ones(size, dtype=torch.bfloat16, device=device_of(backend))
        works = [cut(replace(pieces, grad=grad), part) for part in (slice(0, 64 * 7), slice(64 * 7, size))]
        rule.update_([Batch(replace(hyper, step=step), [replace(whole, grad=grad)])])
        rule.update_([Batch(replace(hyper, step=step), works)])
    assert torch.equal(main_of(whole), main_of(pieces))
    # Each step moves by lr = 1e-4, far below the spacing 2^-8 under 1: nearest rounding would never move at all. The
    # mean of 3200 walks of 20 steps has a deviation of about sqrt(20 * 2^-8 * 1e-4 / 3200) = 5e-5.
    assert abs(main_of(whole).mean() - (1 - 20e-4)) < 4 * 5e-5


def test_stochastic_rounding_goes_on_counting_from_piece_to_piece() -> None:
    rule = Adam(stochastic_rounding=True, backend="torch")
    size = PIECE_NUMEL + 128
    whole, pieces = (KEPT["bf16"].work(rule, start_of((size,))) for _ in range(2))
    grad = gradients((size,), torch.bfloat16)[0]
    rule.update_([Batch(HYPER, [replace(whole, grad=grad)])])
    parts = [slice(0, PIECE_NUMEL - 64), slice(PIECE_NUMEL - 64, size)]
    rule.update_([Batch(HYPER, [cut(replace(pieces, grad=grad), part) for part in parts])])
    assert torch.equal(main_of(whole), main_of(pieces))
