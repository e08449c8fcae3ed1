"""Muon's Triton sweeps against the reference, with a transformation that is as simple as can be: the matrix itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from elementwise_works import main_of
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.elements import LayoutError
from opt_kernels.codecs import Plain, codec_for, split_
from opt_kernels.matrices import Decay, MatmulPrecision, TpMode
from opt_kernels.matrices import muon as slow
from opt_kernels.matrices.access import join as joined
from opt_kernels.matrices.access import split
from opt_kernels.matrices.muon import Inputs, MuonStep, rounds
from opt_kernels.matrices.muon import triton as fast
from opt_kernels.rules import AdaptiveMuonRule, MuonRule, SecondMoment
from opt_kernels.works import Batch, Hyper, MatrixSpec, Task, TensorParallel, Work

pytestmark = pytest.mark.needs_extra

HYPER = Hyper(lr=1e-2, weight_decay=0.1, step=3, momentum=0.9)
# 0, 1, 63 and 1025 elements, whole chunks with a rest, several matrices in one parameter, and fused rows.
SHAPES = ((0, 7), (1, 1), (7, 9), (25, 41), (48, 50), (3, 24, 40))
FUSED = (24, 128)
CROOKED = (24, 9)  # of its fused rows some begin at aligned addresses, others do not
ALL = (*SHAPES, FUSED, CROOKED)
FP32, FP16 = Inputs(torch.float32, True), Inputs(torch.float16, True)
FACTORS = (0.5, 2.0, 1.0)
HALF_UNIT = 2.0**-24  # of float32, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The dtypes in which a work is stored."""

    grad: torch.dtype = torch.float32
    main: torch.dtype | None = torch.float32  # None: remainder
    out: torch.dtype | None = None
    momentum: torch.dtype = torch.float32
    remainder: torch.dtype = torch.int16  # of works without a main


STORAGES = {
    "fp32": Storage(),
    "bf16-grads-bf16-out": Storage(grad=torch.bfloat16, out=torch.bfloat16),
    "fp16-out": Storage(grad=torch.float16, out=torch.float16),
    "bf16-itself": Storage(grad=torch.bfloat16, main=torch.bfloat16),
    "remainder": Storage(main=None, out=torch.bfloat16),
    "remainder-all-16-bit": Storage(grad=torch.bfloat16, main=None, out=torch.bfloat16, momentum=torch.bfloat16),
    "short-remainder": Storage(main=None, out=torch.bfloat16, remainder=torch.int8),
    "fp16-momentum": Storage(momentum=torch.float16),
    "fp8-momentum": Storage(momentum=torch.float8_e4m3fn),
    "int8-momentum-remainder": Storage(
        grad=torch.bfloat16, main=None, out=torch.bfloat16, momentum=torch.int8
    ),
}  # fmt: skip


def make_works(
    storage: Storage, device: torch.device, *, offset: int = 0, shapes: tuple[tuple[int, ...], ...] = ALL
) -> list[Work]:
    """Works with random contents, the same at every call; `out` is NaN until it is written."""
    generator = torch.Generator().manual_seed(5)
    codec = codec_for("momentum_buffer", storage.momentum, signed=True)
    works = []
    for shape in shapes:
        if codec.block and shape in ((3, 24, 40), CROOKED):
            continue  # their matrices share blocks

        def empty(dtype: torch.dtype, shape: tuple[int, ...] = shape) -> Tensor:
            numel = torch.Size(shape).numel()
            return torch.empty(numel + offset, dtype=dtype, device=device)[offset:].view(shape)

        p, g, m = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
        codes = empty(codec.dtype)
        state = {"momentum_buffer": codes}
        scales = torch.empty(-(-p.numel() // codec.block), device=device) if codec.block else None
        codec.encode_(codes.view(-1), scales, m.view(-1))
        if scales is not None:
            state["momentum_buffer_scale"] = scales
        out = None if storage.out is None else empty(storage.out).fill_(torch.nan)
        main, remainder = None, None
        if storage.main is None:
            remainder = empty(storage.remainder)
            assert out is not None
            split_(out, remainder, p)
        else:
            main = empty(storage.main).copy_(p)
        spec = MatrixSpec(split_rows=(4, 1, 1)) if shape in (FUSED, CROOKED) else MatrixSpec()
        grad = empty(storage.grad).copy_(g)
        works.append(Work(grad=grad, main=main, out=out, remainder=remainder, state=state, matrix=spec))
    return works


def in_float64(work: Work, momentum: torch.dtype) -> Work:
    codec = codec_for("momentum_buffer", momentum, signed=True)
    values = torch.empty(work.grad.shape, dtype=torch.float64, device=work.grad.device)
    codes = work.state["momentum_buffer"]
    codec.decode_(values.view(-1), codes.view(-1), work.state.get("momentum_buffer_scale"))
    state = {"momentum_buffer": values}
    return replace(work, main=main_of(work), out=None, remainder=None, state=state, grad=work.grad.double())


def itself(tasks: Sequence[Task], matrices: Tensor, normalised: bool) -> Tensor:
    """Each matrix over its norm, each split part over its own: what every transformation begins with."""
    if normalised:
        return matrices
    spec = tasks[0].work.matrix
    parts = [part / part.square().sum((-2, -1), keepdim=True).sqrt() for part in split(matrices, spec)]
    return joined(parts, spec, matrices.shape)


def step_of(momentum: Any, inputs: Inputs = FP32, **more: Any) -> MuonStep:
    codec = codec_for("momentum_buffer", momentum, signed=True)
    factors = lambda work: FACTORS[: len(work.matrix.split_rows) or 1]
    return MuonStep(itself, lambda work: inputs, factors, True, Decay.DECOUPLED, codec)._replace(**more)


def moved(version: Any, works: list[Work], momentum: Any, inputs: Inputs = FP32, **more: Any) -> None:
    launch = {name: more.pop(name) for name in ("grad_scale", "skip") if name in more}
    batches = [Batch(HYPER, works[:3]), Batch(replace(HYPER, lr=2e-2, momentum=0.5), works[3:])]
    version.muon_(batches, step_of(momentum, inputs, **more), **launch)


def tensors(work: Work) -> list[Tensor]:
    named = (work.grad, work.main, work.out, work.remainder, *work.state.values())
    return [tensor for tensor in named if tensor is not None]


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_close(work: Work, true: Work, old: Tensor, *, unit: float, main: torch.dtype | None) -> None:
    """`unit` is the rounding of a direction, relative to the longest of its matrix; then a few of float32's."""
    assert true.main is not None
    largest = float((true.main - old).abs().max()) if old.numel() else 0.0
    is_short = work.remainder is not None and work.remainder.dtype is torch.int8
    stored = 2.0**-8 if main is torch.bfloat16 else 2.0**-16 if is_short else 2 * HALF_UNIT
    error = (main_of(work) - true.main).abs()
    assert (error <= 2 * unit * largest + stored * true.main.abs() + 4 * HALF_UNIT * old.abs() + 1e-37).all()


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES.keys())
@pytest.mark.parametrize(
    ("nesterov", "decay"),
    [(False, Decay.DECOUPLED), (True, Decay.L2), (True, Decay.INDEPENDENT)],
    ids=["plain", "nesterov-l2", "nesterov-independent"],
)
def test_a_step_equals_its_float64_reference(
    storage: Storage, nesterov: bool, decay: Decay, kernel_device: torch.device
) -> None:
    works = make_works(storage, kernel_device)
    exact = [in_float64(work, storage.momentum) for work in works]
    before = [main_of(work) for work in works]
    how = {"nesterov": nesterov, "decay": decay}
    moved(slow, exact, torch.float32, grad_scale=0.5, codec=Plain(dtype=torch.float64), **how)
    moved(fast, works, storage.momentum, grad_scale=torch.tensor(0.5, device=kernel_device), **how)
    codec = codec_for("momentum_buffer", storage.momentum, signed=True)
    for work, true, old in zip(works, exact, before):
        assert_close(work, true, old, unit=64 * HALF_UNIT, main=storage.main)
        if work.out is not None and work.main is not None:
            assert torch.equal(work.out, work.main.to(work.out.dtype))
        values = torch.empty(work.grad.numel(), device=kernel_device)
        codec.decode_(values, work.state["momentum_buffer"].view(-1), work.state.get("momentum_buffer_scale"))
        # What the codec itself loses: a unit of its codes.
        unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(storage.momentum, 2**-4)
        expected = true.state["momentum_buffer"].view(-1).float()
        torch.testing.assert_close(values, expected, rtol=unit, atol=max(unit * 0.3, 1e-6))


@pytest.mark.parametrize("name", ["bf16-grads-bf16-out", "int8-momentum-remainder"])
def test_a_skip_flag_leaves_every_byte_and_gradients_are_never_written(name: str, kernel_device: torch.device) -> None:
    storage = STORAGES[name]
    works = make_works(storage, kernel_device)
    before = [[tensor.clone() for tensor in tensors(work)] for work in works]
    moved(fast, works, storage.momentum, skip=torch.tensor(True, device=kernel_device))
    for old, work in zip(before, works):
        assert all(map(same_bytes, old, tensors(work)))
    moved(fast, works, storage.momentum, FP16, grad_scale=0.5)
    assert all(same_bytes(old[0], work.grad) for old, work in zip(before, works))


@pytest.mark.parametrize("name", ["fp32", "remainder-all-16-bit"])
def test_alignment_and_rounds_make_no_difference(
    name: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = STORAGES[name]
    usual, shifted, cut = (make_works(storage, kernel_device, offset=offset) for offset in (0, 3, 0))
    for works in (usual, shifted):
        moved(fast, works, storage.momentum, FP16)
    monkeypatch.setattr(rounds, "ROUND_NUMEL", 3000)
    moved(fast, cut, storage.momentum, FP16)
    for a, *others in zip(usual, shifted, cut):
        for b in others:
            assert all(map(same_bytes, tensors(a), tensors(b)))


def test_a_gradient_whose_sign_is_a_flag_or_that_is_transposed_is_read_as_it_is(kernel_device: torch.device) -> None:
    plain, flagged, turned = (make_works(Storage(), kernel_device, shapes=((25, 41), (7, 9))) for _ in range(3))
    moved(fast, plain, torch.float32)
    moved(fast, [replace(work, grad=torch._neg_view(-work.grad)) for work in flagged], torch.float32)
    moved(fast, [replace(work, grad=work.grad.t().contiguous().t()) for work in turned], torch.float32)
    for a, b, c in zip(plain, flagged, turned):
        assert same_bytes(main_of(a), main_of(b))
        assert same_bytes(main_of(a), main_of(c))


@pytest.mark.parametrize("inputs", [FP32, FP16], ids=["fp32", "fp16"])
def test_a_momentum_of_zeros_leaves_the_weight_as_it_is(inputs: Inputs, kernel_device: torch.device) -> None:
    # Its norm is zero: without a smallest norm every weight became NaN.
    works = make_works(Storage(), kernel_device, shapes=((25, 41),))
    before = main_of(works[0]).clone()
    works[0].grad.zero_()
    works[0].state["momentum_buffer"].zero_()
    moved(fast, works, torch.float32, inputs)
    torch.testing.assert_close(main_of(works[0]), before * (1 - HYPER.lr * HYPER.weight_decay), rtol=2**-22, atol=0)


def test_matrices_that_come_normalised_and_not_are_never_held_together(kernel_device: torch.device) -> None:
    together, alone = (make_works(Storage(), kernel_device, shapes=((25, 41), (7, 9), (25, 9))) for _ in range(2))
    seen: list[tuple[int, bool]] = []

    def transform(tasks: Sequence[Task], matrices: Tensor, normalised: bool) -> Tensor:
        seen.append((matrices.shape[-2], normalised))
        return itself(tasks, matrices, normalised)

    def move(works: list[Work]) -> None:
        inputs = lambda work: Inputs(torch.float32, work.grad.shape[0] == 25)
        fast.muon_([Batch(HYPER, works)], step_of(torch.float32, transform=transform)._replace(inputs=inputs))

    move(together)
    assert sorted(seen) == [(7, False), (25, True), (25, True)]
    for work in alone:
        move([work])
    for a, b in zip(together, alone):
        assert same_bytes(main_of(a), main_of(b))


def test_storages_may_be_mixed_within_a_stack(kernel_device: torch.device) -> None:
    names = ("fp32", "bf16-grads-bf16-out", "remainder")
    mixed, alone = (
        [make_works(STORAGES[name], kernel_device, shapes=((25, 41),))[0] for name in names] for _ in range(2)
    )
    moved(fast, mixed, torch.float32)
    for work in alone:
        moved(fast, [work], torch.float32)
    for a, b in zip(mixed, alone):
        assert all(map(same_bytes, tensors(a), tensors(b)))


def test_what_cannot_be_swept_is_refused_with_a_way_on(kernel_device: torch.device) -> None:
    rule = MuonRule(backend="triton")
    wide = torch.zeros(4, 6, dtype=torch.float64, device=kernel_device)
    holes = torch.zeros(6, 4, device=kernel_device).t()
    for main, reason in ((wide, "backend='torch'"), (holes, "contiguous")):
        work = Work(grad=torch.ones_like(main), main=main, state=rule.init_state(main))
        with pytest.raises(LayoutError, match=reason):
            rule.update_([Batch(HYPER, [work])])
    coded = MuonRule(backend="triton", momentum_buffer_dtype=torch.int8)
    odd = torch.zeros(2, 3, 5, device=kernel_device)
    with pytest.raises(LayoutError, match="share blocks of 128"):
        coded.update_([Batch(HYPER, [Work(grad=odd.clone(), main=odd, state=coded.init_state(odd))])])


EXACT = MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST)
RULES = {
    "muon": EXACT,
    "muon-16-bit": MuonRule(nesterov=True),
    "muon-16-bit-tiny": MuonRule(nesterov=True),
    "muon-large-eps": replace(EXACT, eps=1e2),
    "namo": AdaptiveMuonRule(second_moment=SecondMoment.NAMO, muon=EXACT),
    "adamuon": AdaptiveMuonRule(muon=EXACT),
    "normuon": AdaptiveMuonRule(muon=EXACT, second_moment=SecondMoment.NORMUON),
}


def with_backend(rule: MuonRule | AdaptiveMuonRule, backend: str) -> MuonRule | AdaptiveMuonRule:
    muon = rule if isinstance(rule, MuonRule) else rule.muon
    # Products by torch on both sides: only what is around them differs.
    chosen = replace(muon, backend=backend, use_syrk=False)
    return chosen if isinstance(rule, MuonRule) else replace(rule, muon=chosen)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_moves_as_it_does_in_torch(name: str, kernel_device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = [(48, 64), (64, 32), (48, 64), (2, 24, 40), (36, 40), (20, 40)]
    mains = [torch.randn(shape, generator=generator).to(kernel_device) for shape in shapes]
    size = 1e-9 if "tiny" in name else 1.0  # what 16 bits cannot hold before it is normalised
    grads = [[size * torch.randn(shape, generator=generator).to(kernel_device) for shape in shapes] for _ in range(2)]
    results = []
    for backend in ("triton", "torch"):
        rule = with_backend(RULES[name], backend)
        fused = {(36, 40): MatrixSpec(split_rows=(4, 1, 1)), (20, 40): MatrixSpec(split_rows=(4, 1), by_group=True)}
        specs = [fused.get(tuple(main.shape), MatrixSpec()) for main in mains]
        states = [rule.init_state(main) for main in mains]
        moving = [main.clone() for main in mains]
        for step, of_step in enumerate(grads, 1):
            works = [Work(grad=g, main=m, state=s, matrix=x) for g, m, s, x in zip(of_step, moving, states, specs)]
            rule.update_([Batch(replace(HYPER, step=step, lr=0.1), works)], grad_scale=0.5)
        results.append((moving, states))
    # 16-bit products pull apart what differs in the last bit of their inputs; adamuon divides small ones by small ones.
    tolerance = {"muon-16-bit": 0.02, "muon-16-bit-tiny": 0.02, "adamuon": 1e-4}.get(name, 1e-5)
    for i in range(len(shapes)):
        start, (a, b) = mains[i], (moving[i] for moving, _ in results)
        assert float((a - b).norm() / (b - start).norm()) < tolerance
        for key, state in results[0][1][i].items():
            torch.testing.assert_close(state, results[1][1][i][key], rtol=1e-3, atol=1e-3 if "16" in name else 1e-5)


@pytest.mark.parametrize("mode", TpMode)
def test_a_matrix_that_is_cut_moves_as_it_does_in_torch(mode: TpMode, kernel_device: torch.device) -> None:
    # One rank that plays two, the other of which holds the same.
    group = TensorParallel(rank=0, size=2, all_reduce=lambda x: 2 * x, all_gather=lambda x, dim: torch.cat((x, x), dim))
    spec = MatrixSpec(partition_dim=1, tensor_parallel=group)
    moving = []
    for backend in ("triton", "torch"):
        rule = MuonRule(tp_mode=mode, fp32_matmul_prec=MatmulPrecision.HIGHEST, use_syrk=False, backend=backend)
        main, grad = (
            torch.randn(16, 24, generator=torch.Generator().manual_seed(i)).to(kernel_device) for i in range(2)
        )
        work = Work(grad=grad, main=main, state=rule.init_state(main), matrix=spec)
        rule.update_([Batch(replace(HYPER, lr=0.1), [work])])
        moving.append(main)
    torch.testing.assert_close(*moving, rtol=0, atol=2e-5)


def test_rounds_of_the_same_tensors_may_differ_in_rule_and_split(kernel_device: torch.device) -> None:
    """Two rules and two splits take turns on the same memory."""
    plain = MuonRule(backend="triton", num_ns_steps=1)
    splits = (MatrixSpec(), MatrixSpec(split_rows=(2,), by_group=True))
    turns = [(rule, split) for split in splits for rule in (plain, replace(plain, extra_scale_factor=3.0))] * 2
    shared, fresh = (make_works(Storage(), kernel_device, shapes=((4, 6),) * 3) for _ in range(2))
    for rule, matrix in turns:
        rule.update_([Batch(HYPER, [replace(work, matrix=matrix) for work in shared])])
        fresh = [
            replace(work, grad=work.grad.clone(), main=work.main.clone(), matrix=matrix,  # type: ignore[union-attr]
                    state={name: tensor.clone() for name, tensor in work.state.items()})
            for work in fresh
        ]  # fmt: skip
        rule.update_([Batch(HYPER, fresh)])
    assert all(same_bytes(a, b) for one, other in zip(shared, fresh) for a, b in zip(tensors(one), tensors(other)))
