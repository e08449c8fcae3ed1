"""Works that elementwise rules take on every backend: layouts, cuts, skips, refusals.

Pairs of rules, formats and backends; all combinations at night.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

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
    gradients,
    on_pairs_of,
    run,
    start_of,
    written,
)
from torch import Tensor

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.torch_native.tiles import TILE_NUMEL
from opt_kernels.codecs import CodecError
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.base import Rule
from opt_kernels.rules.lion import Lion
from opt_kernels.rules.sgd import SGD
from opt_kernels.works import Batch, Work

pytestmark = pytest.mark.usefixtures("poisoned")


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a tensor, which tell NaNs and zeros apart as numbers do not."""
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@on_pairs_of(make=RULES, kept=KEPT, backend=BACKENDS)
def test_gradients_and_neighbours_are_never_written(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    frame = kept.work(rule, start_of((3 * 1025,)))
    inner = slice(1025, 2050)
    states = {name: tensor[inner] for name, tensor in frame.state.items()}
    work = Work(
        grad=gradients((1025,), kept.grad)[0],
        main=None if frame.main is None else frame.main[inner],
        out=None if frame.out is None else frame.out[inner],
        remainder=None if frame.remainder is None else frame.remainder[inner],
        state=states,
    )
    grad = bits(work.grad)
    before = [(bits(t[:1025]), bits(t[2050:])) for t in written(frame)]
    rule.update_([Batch(HYPER, [work])], grad_scale=0.5)
    assert bits(work.grad) == grad
    assert [(bits(t[:1025]), bits(t[2050:])) for t in written(frame)] == before


@on_pairs_of(make=RULES, kept=KEPT, backend=BACKENDS)
def test_a_skip_flag_leaves_every_byte_unchanged(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    work = replace(run(rule, kept.work(rule, start_of((130,)))), grad=torch.full((130,), torch.nan, dtype=kept.grad))
    before = [bits(tensor) for tensor in written(work)]
    rule.update_([Batch(HYPER, [work])], skip=torch.tensor(1))
    assert [bits(tensor) for tensor in written(work)] == before
    rule.update_(
        [Batch(replace(HYPER, step=4), [replace(work, grad=torch.full_like(work.grad, 9.0))])], skip=torch.tensor(0)
    )
    assert [bits(tensor) for tensor in written(work)] != before


@on_pairs_of(make=RULES, kept=KEPT, scale={"1": 1.0, "0.3": 0.3}, backend=FAST)
def test_the_bits_do_not_depend_on_how_a_parameter_is_cut(make: Make, kept: Kept, scale: float, backend: str) -> None:
    rule = make(backend=backend)
    size = TILE_NUMEL + 64 * 1000 + 37
    cuts = [0, 64, 64 * 3, 64 * 501, TILE_NUMEL - 64, TILE_NUMEL + 64, size]
    whole, pieces = kept.work(rule, start_of((size,))), kept.work(rule, start_of((size,)))
    whole = run(rule, whole, scale=scale, steps=2)
    for step, grad in enumerate(gradients((size,), kept.grad, 2), start=1):
        works = [cut(replace(pieces, grad=grad), slice(a, b)) for a, b in pairwise(cuts)]
        rule.update_([Batch(replace(HYPER, step=step), works)], grad_scale=scale)
    for one, other in zip(written(whole), written(pieces), strict=True):
        assert torch.equal(one, other)


@ON_FAST
def test_works_of_any_dtypes_go_together_in_one_call(backend: str) -> None:
    together: list[Work] = []
    alone: list[Work] = []
    for kept in KEPT.values():
        for works in (together, alone):
            work = kept.work(Adam(), start_of((200,)))
            works.append(replace(work, grad=gradients((200,), kept.grad)[0]))
    rule = Adam(backend=backend)
    rule.update_([Batch(HYPER, together[:5]), Batch(replace(HYPER, lr=0.5), together[5:])], grad_scale=0.5)
    for index, work in enumerate(alone):
        rule.update_([Batch(HYPER if index < 5 else replace(HYPER, lr=0.5), [work])], grad_scale=0.5)
    for one, other in zip(together, alone):
        assert all(torch.equal(a, b) for a, b in zip(written(one), written(other), strict=True))


@ON_RULES
@ON_BACKENDS
def test_numbers_may_be_tensors(make: Make, backend: str) -> None:
    rule = make(backend=backend)
    plain, tensors = (KEPT["fp32"].work(rule, start_of((70,))) for _ in range(2))
    grad = gradients((70,), torch.float32)[0]
    rule.update_([Batch(HYPER, [replace(plain, grad=grad)])], grad_scale=0.25)
    hyper = replace(HYPER, lr=torch.tensor(1e-2, dtype=torch.float64), weight_decay=torch.tensor(0.1).double())
    hyper = replace(hyper, step=torch.tensor(1))
    rule.update_([Batch(hyper, [replace(tensors, grad=grad)])], grad_scale=torch.tensor(0.25))
    assert all(torch.equal(a, b) for a, b in zip(written(plain), written(tensors), strict=True))


@on_pairs_of(make=RULES, kept=KEPT, backend=FAST)
def test_a_matrix_moves_as_its_elements_do(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    flat, matrix = kept.work(rule, start_of((30 * 8,))), kept.work(rule, start_of((30, 8)))
    grad = gradients((30 * 8,), kept.grad)[0]
    small = kept.work(rule, start_of((8,)))
    works = [replace(matrix, grad=grad.view(30, 8)), replace(small, grad=grad[:8])]
    rule.update_([Batch(HYPER, [replace(flat, grad=grad)])], grad_scale=0.3)
    rule.update_([Batch(HYPER, works)], grad_scale=0.3)
    assert all(torch.equal(a.view(30, 8), b) for a, b in zip(written(flat), written(matrix), strict=True))


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
    start, grad = start_of((30, 8)).float(), gradients((30, 8), torch.float32)[0]
    expected, main = arrange(start.clone()), arrange(start.clone())
    shaped = arrange(grad)
    straight = Work(grad=shaped.contiguous(), main=expected.contiguous(), state=rule.init_state(expected.contiguous()))
    rule.update_([Batch(HYPER, [straight])], grad_scale=0.5)
    work = Work(grad=shaped if same_layout else shaped.contiguous(), main=main, state=rule.init_state(main))
    rule.update_([Batch(HYPER, [work])], grad_scale=0.5)
    assert straight.main is not None
    assert torch.equal(main, straight.main)


@ON_BACKENDS
def test_a_dense_layout_longer_than_a_tile_works_with_states_of_other_sizes(backend: str) -> None:
    turned = [torch.randn(2, 2, TILE_NUMEL).transpose(0, 1) for _ in range(2)]
    straight = [tensor.clone(memory_format=torch.contiguous_format) for tensor in turned]
    rule = Adam(backend=backend)
    for main, grad in turned, straight:
        state = rule.init_state(main) | {"step": torch.zeros(())}
        rule.update_([Batch(HYPER, [Work(grad=grad, main=main, state=state)])], grad_scale=0.5)
    assert torch.equal(turned[0], straight[0])


def test_an_order_without_a_fused_sweep_makes_no_tensor_of_a_parameters_size() -> None:
    work = replace(KEPT["fp32"].work(Adam(), start_of((9 * TILE_NUMEL,))), grad=torch.randn(9 * TILE_NUMEL))
    with torch.profiler.profile(profile_memory=True) as profile:
        Adam(order="te", backend="torch").update_([Batch(HYPER, [work])])
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * TILE_NUMEL


@ON_BACKENDS
@pytest.mark.parametrize("part", ["state", "out"])
def test_tensors_in_another_order_than_their_parameter_are_refused(part: str, backend: str) -> None:
    main, turned = torch.zeros(4, 3), torch.zeros(3, 4).t()
    state = Adam().init_state(main) | ({"exp_avg": turned} if part == "state" else {})
    work = Work(grad=torch.ones(4, 3), main=main, state=state, out=turned if part == "out" else None)
    with pytest.raises(LayoutError, match="allowed are equal strides"):
        Adam(backend=backend).update_([Batch(HYPER, [work])])


@ON_BACKENDS
@pytest.mark.parametrize("part", ["main", "state", "out"])
def test_what_would_be_written_without_its_sign_flag_is_refused(part: str, backend: str) -> None:
    flagged = torch._neg_view(torch.zeros(6))
    main = flagged if part == "main" else torch.zeros(6)
    state = Adam().init_state(torch.zeros(6)) | ({"exp_avg": flagged} if part == "state" else {})
    work = Work(grad=torch.ones(6), main=main, state=state, out=flagged if part == "out" else None)
    with pytest.raises(LayoutError, match="resolve_neg"):
        Adam(backend=backend).update_([Batch(HYPER, [work])])


@pytest.mark.parametrize("numel", [3, 4000])
@pytest.mark.parametrize("of", ["state", "out"])
@ON_BACKENDS
def test_what_has_another_number_of_elements_is_refused(of: str, numel: int, backend: str) -> None:
    # Swept by address it would be read and written beyond its end.
    rule = Adam(backend=backend)
    work = replace(KEPT["fp32-out16"].work(rule, start_of((100,))), grad=torch.randn(100))
    other = KEPT["fp32-out16"].work(rule, start_of((numel,)))
    work = (
        replace(work, state=other.state | {"step": torch.zeros(())}) if of == "state" else replace(work, out=other.out)
    )
    with pytest.raises(LayoutError, match=rf"has shape \({numel},\) where its parameter has \(100,\)"):
        rule.update_([Batch(HYPER, [work])])


@NEEDS_COMPILER
def test_compiled_sweeps_refuse_what_is_in_no_cpu_memory() -> None:
    work = KEPT["fp32"].work(Adam(), start_of((100,)))
    work = replace(work, grad=torch.randn(100), state=Adam().init_state(torch.empty(100, device="meta")))
    with pytest.raises(LayoutError, match="meta"):
        Adam(backend="cpp").update_([Batch(HYPER, [work])])


@ON_BACKENDS
def test_a_parameter_with_holes_is_refused(backend: str) -> None:
    main = torch.zeros(10, 4)[:, :2]
    work = Work(grad=torch.zeros(10, 2), main=main, state=Adam().init_state(main))
    with pytest.raises(LayoutError, match="make the parameter contiguous"):
        Adam(backend=backend).update_([Batch(HYPER, [work])])


def test_stochastic_rounding_of_float16_is_refused() -> None:
    main = torch.zeros(4, dtype=torch.float16)
    work = Work(grad=torch.zeros(4), main=main, state=Adam().init_state(main))
    with pytest.raises(ValueError, match="only bfloat16 is rounded stochastically"):
        Adam(stochastic_rounding=True, backend="torch").update_([Batch(HYPER, [work])])


REFUSED: Mapping[str, tuple[Callable[[], Rule], type[Exception], str]] = {
    "order": (lambda: Adam(order="apex"), ValueError, "pass 'torch' or 'te'"),
    "backend": (lambda: Adam(backend="cuda"), ValueError, "'reference', 'torch', 'cpp', 'triton'"),
    "signed codes of a square": (lambda: Adam(exp_avg_sq_dtype=torch.int8), CodecError, "uint8"),
    "unsigned codes of a mean": (lambda: Lion(exp_avg_dtype=torch.uint8), CodecError, "int8"),
    "dampened nesterov": (lambda: SGD(nesterov=True, dampening=0.1), ValueError, "dampening=0.0"),
    "nesterov without buffer": (lambda: SGD(nesterov=True, momentum_buffer=False), ValueError, "momentum_buffer=True"),
}


@pytest.mark.parametrize(("build", "error", "advice"), REFUSED.values(), ids=REFUSED.keys())
def test_an_illegal_rule_is_refused_with_advice(build: Callable[[], Rule], error: type[Exception], advice: str) -> None:
    with pytest.raises(error, match=advice):
        build()
