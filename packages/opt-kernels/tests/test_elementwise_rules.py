"""Adam, SGD and Lion: one contract for every rule, backend, size and dtype.

Pairs of values of these; all combinations at night.
"""

from dataclasses import replace

import pytest
import torch
from elementwise_works import (
    BACKENDS,
    FAST,
    HYPER,
    KEPT,
    ON_BACKENDS,
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

from opt_kernels.backends.torch_native import PIECE_NUMEL
from opt_kernels.rules import SGD, Adam
from opt_kernels.works import Batch

pytestmark = pytest.mark.usefixtures("poisoned")
SIZES = [0, 1, 63, 1025, 65537]


@on_pairs_of(make=RULES, kept=KEPT, backend=BACKENDS, size={str(size): size for size in SIZES})
def test_every_backend_and_dtype_agrees_with_the_float64_reference(
    make: Make, kept: Kept, backend: str, size: int
) -> None:
    size = min(size, 5000) if backend == "triton" else size  # an interpreter takes its time
    work = run(make(backend=backend), kept.work(make(), start_of((size,), backend)), scale=0.5)
    exact = make(backend="reference")
    truth = run(exact, KEPT["fp64"].work(exact, start_of((size,))), scale=0.5)
    # Three steps: a rounding of the main each (2^-24, 2^-17 in 24 bits, or 2^-9 for a bfloat16 main), and the moments'
    # own of 2^-24 of an update of at most lr * |m| / sqrt(v) < 10 lr.
    rounding = 2.0**-8 if kept.main is torch.bfloat16 else 2.0**-15 if kept.remainder is torch.int8 else 2.0**-22
    close = torch.isclose(main_of(work), main_of(truth), rtol=3 * rounding, atol=3 * rounding * 0.1)
    # A sum that is zero but for its rounding has either sign, and Lion and Adam's first step move by the sign; a
    # bfloat16 main that passes zero has the rounding of what it was before.
    few = make in (RULES["lion"], RULES["adam-l2"]) or kept.main is torch.bfloat16
    assert (~close).sum() <= (1e-4 * size if few else 0)


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
