"""Adam, SGD and Lion: one contract for every rule, backend, size and dtype."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.torch_native.tiles import TILE_NUMEL
from opt_kernels.codecs import CodecError
from opt_kernels.codecs.remainder import join, split_
from opt_kernels.rules.adam import Adam
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.rules.lion import Lion
from opt_kernels.rules.sgd import SGD
from opt_kernels.works import Batch, Hyper, Work

pytestmark = pytest.mark.usefixtures("poisoned")

Make = Callable[..., Rule]
HYPER = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.8)
SIZES = [0, 1, 63, 1025, 65537]

RULES: Mapping[str, Make] = {
    "adamw": lambda **options: Adam(**options),
    "adam-l2": lambda **options: Adam(decoupled=False, **options),
    "adamw-te": lambda **options: Adam(order="te", **options),
    "sgd": lambda **options: SGD(**options),
    "sgd-nesterov": lambda **options: SGD(nesterov=True, **options),
    "sgd-dampening": lambda **options: SGD(dampening=0.3, **options),
    "sgd-plain": lambda **options: SGD(momentum_buffer=False, **options),
    "lion": lambda **options: Lion(**options),
}
TORCH: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)),
    "adam-l2": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)),
    "adamw-te": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, momentum=0.8),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, momentum=0.8, nesterov=True),
    "sgd-dampening": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, momentum=0.8, dampening=0.3),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """In which numbers a parameter is kept."""

    main: torch.dtype | None
    out: torch.dtype | None = None
    grad: torch.dtype = torch.float32

    def work(self, rule: Rule, start: Tensor) -> Work:
        """A work that begins at `start`, float64, with no gradient yet."""
        main = None if self.main is None else start.to(self.main, copy=True)
        out = None if self.out is None else torch.empty_like(start, dtype=self.out)
        remainder = torch.empty_like(start, dtype=torch.int16) if self.main is None else None
        if remainder is not None:
            assert out is not None
            split_(out, remainder, start.float())
        elif out is not None:
            out.copy_(start)
        anchor = out if main is None else main
        assert anchor is not None
        state = rule.init_state(anchor)
        return Work(grad=torch.zeros_like(start, dtype=self.grad), main=main, out=out, remainder=remainder, state=state)


KEPT: Mapping[str, Kept] = {
    "fp64": Kept(main=torch.float64, grad=torch.float64),
    "fp32": Kept(main=torch.float32),
    "fp32-g16": Kept(main=torch.float32, grad=torch.bfloat16),
    "fp32-gfp16": Kept(main=torch.float32, grad=torch.float16, out=torch.float16),
    "fp32-out16": Kept(main=torch.float32, out=torch.bfloat16),
    "fp32-out16-g16": Kept(main=torch.float32, out=torch.bfloat16, grad=torch.bfloat16),
    "remainder": Kept(main=None, out=torch.bfloat16),
    "remainder-g16": Kept(main=None, out=torch.bfloat16, grad=torch.bfloat16),
    "bf16": Kept(main=torch.bfloat16, grad=torch.bfloat16),
}
ON_RULES = pytest.mark.parametrize("make", RULES.values(), ids=RULES.keys())
ON_KEPT = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT.keys())
NEEDS_COMPILER = pytest.mark.skipif(not usable(), reason="no C++ compiler here")
ON_FAST = pytest.mark.parametrize("backend", ["torch", pytest.param("cpp", marks=NEEDS_COMPILER)])
ON_BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch", pytest.param("cpp", marks=NEEDS_COMPILER)])


def value(work: Work) -> Tensor:
    """The main, in float64."""
    if work.main is not None:
        return work.main.double()
    assert work.out is not None
    assert work.remainder is not None
    return join(work.out, work.remainder).double()


def gradients(shape: tuple[int, ...], dtype: torch.dtype, steps: int = 3) -> list[Tensor]:
    """Gradients of very different sizes, in numbers that every dtype has; a tenth of them zero."""
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn((2, *shape), generator=generator) for _ in range(steps)]
    kept = [torch.rand(shape, generator=generator) > 0.1 for _ in range(steps)]
    return [(n[0] * torch.exp(n[1]) * k).bfloat16().to(dtype) for n, k in zip(noise, kept)]


def run(rule: Rule, work: Work, *, scale: float | Tensor = 1.0, steps: int = 3) -> Work:
    """`work` after so many steps."""
    for step, grad in enumerate(gradients(tuple(work.grad.shape), work.grad.dtype, steps), start=1):
        work = replace(work, grad=grad)
        rule.update_([Batch(replace(HYPER, step=step), [work])], grad_scale=scale)
    return work


def start_of(shape: tuple[int, ...]) -> Tensor:
    """Weights that bfloat16 represents exactly, so that all storage formats start equal."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().double()


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a tensor, which tell NaNs and zeros apart as numbers do not."""
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def written(work: Work) -> list[Tensor]:
    """All that a rule may write."""
    return [t for t in (work.main, work.out, work.remainder, *work.state.values()) if t is not None]


@ON_RULES
@ON_KEPT
@ON_BACKENDS
@pytest.mark.parametrize("size", SIZES)
def test_every_backend_and_dtype_agrees_with_the_float64_reference(
    make: Make, kept: Kept, backend: str, size: int
) -> None:
    work = run(make(backend=backend), kept.work(make(), start_of((size,))), scale=0.5)
    exact = make(backend="reference")
    truth = run(exact, KEPT["fp64"].work(exact, start_of((size,))), scale=0.5)
    # Three steps: a rounding of the main each (2^-24, or 2^-9 for a bfloat16 main), and the moments' own of 2^-24 of an
    # update of at most lr * |m| / sqrt(v) < 10 lr.
    rounding = 2.0**-8 if kept.main is torch.bfloat16 else 2.0**-22
    close = torch.isclose(value(work), value(truth), rtol=3 * rounding, atol=3 * rounding * 0.1)
    # A sum that is zero but for its rounding has either sign, and Lion and Adam's first step move by the sign; a
    # bfloat16 main that passes zero has the rounding of what it was before.
    few = make in (RULES["lion"], RULES["adam-l2"]) or kept.main is torch.bfloat16
    assert (~close).sum() <= (1e-4 * size if few else 0)


@pytest.mark.parametrize("name", TORCH)
@ON_BACKENDS
def test_the_formula_is_torchs_where_torch_has_it(name: str, backend: str) -> None:
    rule = RULES[name](backend=backend)
    work = KEPT["fp64"].work(rule, start_of((1025,)))
    theirs = torch.nn.Parameter(start_of((1025,)))
    optimizer = TORCH[name]([theirs])
    for grad in gradients((1025,), torch.float64):
        theirs.grad = grad
        optimizer.step()
    # Our moments are float32 beside a float64 main: 2^-24 of an update of about lr, a few times over.
    torch.testing.assert_close(value(run(rule, work)), theirs.detach(), rtol=0, atol=1e-7)


def test_float32_adamw_has_the_bits_of_torchs_fused_adamw() -> None:
    rule = Adam(backend="torch")
    work = KEPT["fp32"].work(rule, start_of((1025,)))
    theirs = torch.nn.Parameter(start_of((1025,)).float())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for grad in gradients((1025,), torch.float32):
        theirs.grad = grad
        optimizer.step()
    ours = run(rule, work).main
    assert ours is not None
    assert torch.equal(ours, theirs)


@ON_KEPT
def test_out_is_the_main_rounded(kept: Kept) -> None:
    for backend in ("reference", "torch", None):
        work = run(Adam(backend=backend), kept.work(Adam(), start_of((1025,))))
        if work.main is not None and work.out is not None:
            assert torch.equal(work.out, work.main.to(work.out.dtype))


@ON_RULES
@ON_KEPT
@ON_BACKENDS
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


@ON_RULES
@ON_KEPT
@ON_BACKENDS
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


@ON_FAST
@ON_RULES
@ON_KEPT
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_bits_do_not_depend_on_how_a_parameter_is_cut(make: Make, kept: Kept, scale: float, backend: str) -> None:
    rule = make(backend=backend)
    size = TILE_NUMEL + 64 * 1000 + 37
    cuts = [0, 64, 64 * 3, 64 * 501, TILE_NUMEL - 64, TILE_NUMEL + 64, size]
    whole, pieces = kept.work(rule, start_of((size,))), kept.work(rule, start_of((size,)))
    whole = run(rule, whole, scale=scale, steps=2)
    for step, grad in enumerate(gradients((size,), kept.grad, 2), start=1):
        works = [_cut(replace(pieces, grad=grad), slice(a, b)) for a, b in pairwise(cuts)]
        rule.update_([Batch(replace(HYPER, step=step), works)], grad_scale=scale)
    for one, other in zip(written(whole), written(pieces), strict=True):
        assert torch.equal(one, other)


def _cut(work: Work, part: slice, block: int = 1) -> Work:
    scales = slice(part.start // block, -(-part.stop // block))
    return Work(
        grad=work.grad[part],
        main=None if work.main is None else work.main[part],
        out=None if work.out is None else work.out[part],
        remainder=None if work.remainder is None else work.remainder[part],
        state={name: t[scales] if name.endswith("_scale") else t[part] for name, t in work.state.items()},
        first=work.first + part.start,
    )


NARROW = {
    "bf16": (torch.bfloat16, torch.bfloat16, 2.0**-8),
    "fp16": (torch.float16, torch.float16, 2.0**-11),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, 2.0**-4),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2, 2.0**-3),
    "8 bit": (torch.int8, torch.uint8, 2.0**-6),
}


@ON_FAST
@pytest.mark.parametrize(("first", "second", "rounding"), NARROW.values(), ids=NARROW.keys())
@ON_KEPT
def test_narrow_moments_stay_close_and_are_cut_at_blocks_without_a_trace(
    first: torch.dtype, second: torch.dtype, rounding: float, kept: Kept, backend: str
) -> None:
    rule = Adam(exp_avg_dtype=first, exp_avg_sq_dtype=second, backend=backend)
    size, start = 128 * 21 + 5, start_of((128 * 21 + 5,))
    whole, pieces = kept.work(rule, start), kept.work(rule, start)
    whole = run(rule, whole, scale=0.5)
    for step, grad in enumerate(gradients((size,), kept.grad), start=1):
        parts = [slice(0, 128), slice(128, 128 * 20), slice(128 * 20, size)]
        works = [_cut(replace(pieces, grad=grad), part, 128) for part in parts]
        rule.update_([Batch(replace(HYPER, step=step), works)], grad_scale=0.5)
    for one, other in zip(written(whole), written(pieces), strict=True):
        assert torch.equal(one, other)
    exact = run(Adam(backend="reference"), KEPT["fp64"].work(Adam(), start), scale=0.5)
    # Two of three steps see rounded moments, each within `rounding` of its block's largest; an element far below it
    # moves by at most as much as a large one, lr.
    typical = (value(whole) - value(exact)).abs().median()
    assert typical < 1e-2 * (4 * rounding) + (2.0**-8 if kept.main is torch.bfloat16 else 0)


@pytest.mark.parametrize(("first", "second", "rounding"), NARROW.values(), ids=NARROW.keys())
def test_both_backends_store_the_same_narrow_moments(first: torch.dtype, second: torch.dtype, rounding: float) -> None:
    works = []
    for backend in ("reference", "torch"):
        rule = Adam(exp_avg_dtype=first, exp_avg_sq_dtype=second, backend=backend)
        works.append(run(rule, KEPT["fp32"].work(rule, start_of((300,))), steps=1))
    reference, fast = ([work.state[name].float() for name in ("exp_avg", "exp_avg_sq")] for work in works)
    for one, other in zip(reference, fast):
        # The last bit of a float32 moment may tip a code to its neighbour, rarely.
        assert (one != other).float().mean() < 0.02


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


@ON_FAST
@ON_RULES
@ON_KEPT
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
@pytest.mark.parametrize("grad_alike", [True, False], ids=["gradient alike", "gradient contiguous"])
@ON_BACKENDS
def test_any_dense_layout_is_walked(arrange: Callable[[Tensor], Tensor], grad_alike: bool, backend: str) -> None:
    rule = Adam(backend=backend, exp_avg_dtype=torch.bfloat16)
    start, grad = start_of((30, 8)).float(), gradients((30, 8), torch.float32)[0]
    expected, main = arrange(start.clone()), arrange(start.clone())
    shaped = arrange(grad)
    straight = Work(grad=shaped.contiguous(), main=expected.contiguous(), state=rule.init_state(expected.contiguous()))
    rule.update_([Batch(HYPER, [straight])], grad_scale=0.5)
    work = Work(grad=shaped if grad_alike else shaped.contiguous(), main=main, state=rule.init_state(main))
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
@ON_KEPT
@ON_RULES
def test_a_lost_gradient_reaches_the_weight(make: Make, kept: Kept, backend: str) -> None:
    rule = make(backend=backend)
    work = kept.work(rule, start_of((70,)))
    work.grad.fill_(1.0)[[3, 69]] = torch.nan
    rule.update_([Batch(HYPER, [work])])
    for weight in (value(work), work.out):
        assert weight is None or weight.isnan().nonzero().flatten().tolist() == [3, 69]


@ON_BACKENDS
@ON_RULES
def test_an_infinite_parameter_at_rest_stays_without_weight_decay(make: Make, backend: str) -> None:
    rule = make(backend=backend)
    work = KEPT["fp32"].work(rule, torch.full((70,), -torch.inf, dtype=torch.float64))
    rule.update_([Batch(replace(HYPER, weight_decay=0.0), [work])])
    assert bool((value(work) == -torch.inf).all())


@ON_BACKENDS
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_an_infinite_parameter_stays_infinite_under_decoupled_decay(name: str, backend: str) -> None:
    rule = RULES[name](backend=backend)
    work = KEPT["fp32"].work(rule, torch.full((70,), -torch.inf, dtype=torch.float64))
    rule.update_([Batch(HYPER, [work])])
    assert bool((value(work) == -torch.inf).all())


@ON_BACKENDS
def test_a_gradient_whose_sign_is_a_flag_is_read_with_it(backend: str) -> None:
    # As the gradient of an imaginary part may be.
    lazy, plain = (replace(KEPT["fp32"].work(SGD(), start_of((70,))), grad=torch.ones(70)) for _ in range(2))
    SGD(backend=backend).update_([Batch(HYPER, [replace(lazy, grad=torch._neg_view(-lazy.grad))])])
    SGD(backend=backend).update_([Batch(HYPER, [plain])])
    assert torch.equal(value(lazy), value(plain))


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


@ON_RULES
def test_state_is_what_the_specs_declare(make: Make) -> None:
    rule = make()
    state = rule.init_state(torch.empty(7, 5, dtype=torch.bfloat16))
    assert rule.needs is Needs.ELEMENTS
    assert {spec.name: spec.dtype for spec in rule.state_specs} == {name: t.dtype for name, t in state.items()}
    assert all(tensor.shape == (7, 5) and not tensor.any() for tensor in state.values())


def test_block_scales_are_declared_and_counted() -> None:
    rule = Adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8)
    assert [spec.name for spec in rule.state_specs] == ["exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"]
    assert rule.init_state(torch.empty(3, 100))["exp_avg_scale"].shape == (3,)


@ON_BACKENDS
def test_stochastic_rounding_is_right_on_average_whatever_the_cut(backend: str) -> None:
    rule = Adam(stochastic_rounding=True, backend=backend)
    size, hyper = 64 * 50, replace(HYPER, lr=1e-4, weight_decay=0.0)
    start = torch.full((size,), 1.0, dtype=torch.float64)
    whole, pieces = (KEPT["bf16"].work(rule, start) for _ in range(2))
    for step in range(1, 21):
        grad = torch.ones(size, dtype=torch.bfloat16)
        works = [_cut(replace(pieces, grad=grad), part) for part in (slice(0, 64 * 7), slice(64 * 7, size))]
        rule.update_([Batch(replace(hyper, step=step), [replace(whole, grad=grad)])])
        rule.update_([Batch(replace(hyper, step=step), works)])
    assert torch.equal(value(whole), value(pieces))
    # Each step moves by lr = 1e-4, far below the spacing 2^-8 under 1: nearest rounding would never move at all. The
    # mean of 3200 walks of 20 steps has a deviation of about sqrt(20 * 2^-8 * 1e-4 / 3200) = 5e-5.
    assert abs(value(whole).mean() - (1 - 20e-4)) < 4 * 5e-5


def test_stochastic_rounding_goes_on_counting_from_tile_to_tile() -> None:
    rule = Adam(stochastic_rounding=True, backend="torch")
    size = TILE_NUMEL + 128
    whole, pieces = (KEPT["bf16"].work(rule, start_of((size,))) for _ in range(2))
    grad = gradients((size,), torch.bfloat16)[0]
    rule.update_([Batch(HYPER, [replace(whole, grad=grad)])])
    parts = [slice(0, TILE_NUMEL - 64), slice(TILE_NUMEL - 64, size)]
    rule.update_([Batch(HYPER, [_cut(replace(pieces, grad=grad), part) for part in parts])])
    assert torch.equal(value(whole), value(pieces))


def test_stochastic_rounding_of_float16_is_refused() -> None:
    main = torch.zeros(4, dtype=torch.float16)
    work = Work(grad=torch.zeros(4), main=main, state=Adam().init_state(main))
    with pytest.raises(ValueError, match="only bfloat16 is rounded stochastically"):
        Adam(stochastic_rounding=True, backend="torch").update_([Batch(HYPER, [work])])


REFUSED: Mapping[str, tuple[Callable[[], Rule], type[Exception], str]] = {
    "order": (lambda: Adam(order="apex"), ValueError, "give 'torch' or 'te'"),
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
