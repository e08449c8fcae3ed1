"""Muon's Triton sweeps against the reference, with a transformation that is as simple as can be: the matrix itself."""

from collections.abc import Sequence
from dataclasses import replace

import matrix_works
import pytest
import torch
from elementwise_works import KEPT, Kept, main_of, shifted, written
from matrix_works import tensor
from tiers import NIGHT
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.elements import LayoutError
from opt_kernels.codecs import codec_for
from opt_kernels.matrices import CoefficientType, Decay, MatmulPrecision, ScaleMode, TpMode
from opt_kernels.matrices.muon import Inputs, rounds
from opt_kernels.rules import MuonRule
from opt_kernels.works import Batch, Hyper, MatrixSpec, Task, TensorParallel, Work

pytestmark = pytest.mark.needs_extra

HYPER = Hyper(lr=1e-2, weight_decay=0.1, step=3, momentum=0.9)
# 1, 63 and 1025 elements, whole chunks with a rest, several matrices in one parameter, and fused rows.
SHAPES = ((1, 1), (7, 9), (25, 41), (48, 50), (3, 24, 40))
FUSED = (24, 128)
CROOKED = (24, 9)  # of its fused rows some begin at aligned addresses, others do not
HALF_UNIT = 2.0**-24  # of float32, relative
EXACT = MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST)
# One step of 1 x + 0 x³ + 0 x⁵: each matrix over its norm, each split part over its own; the smallest over eps.
ITSELF = replace(
    EXACT,
    coefficient_type=CoefficientType.CUSTOM,
    custom_coefficients=((1.0, 0.0, 0.0),),
    num_ns_steps=1,
    scale_mode=ScaleMode.SPECTRAL,
    eps=5.0,
)
NARROW = replace(ITSELF, fp32_matmul_prec=MatmulPrecision.MEDIUM, backend="triton")  # 16-bit inputs

# The formats of values, and the dtype of the momentum.
STORAGES: dict[str, tuple[Kept, torch.dtype]] = {
    "fp32": (KEPT["fp32"], torch.float32),
    "bf16-grads-bf16-out": (KEPT["fp32-out16-g16"], torch.float32),
    "fp16-out": (KEPT["fp32-gfp16"], torch.float32),
    "bf16-itself": (KEPT["bf16"], torch.float32),
    "remainder": (KEPT["remainder"], torch.float32),
    "remainder-all-16-bit": (KEPT["remainder-g16"], torch.bfloat16),
    "short-remainder": (KEPT["short-remainder"], torch.float32),
    "fp16-momentum": (KEPT["fp32"], torch.float16),
    "fp8-momentum": (KEPT["fp32"], torch.float8_e4m3fn),
    "int8-momentum-remainder": (KEPT["remainder-g16"], torch.int8),
}


def works_of(
    name: str, device: torch.device, shapes: Sequence[tuple[int, ...]] = (*SHAPES, FUSED, CROOKED)
) -> list[Work]:
    """Works with random contents, the same at every call."""
    generator = torch.Generator().manual_seed(5)
    (kept, momentum) = STORAGES[name]
    codec = codec_for("m", momentum, signed=True)
    rule = MuonRule(momentum_buffer_dtype=momentum)
    works = []
    for shape in shapes:
        if codec.block and shape in ((3, 24, 40), CROOKED):
            continue  # their matrices share blocks
        p, g, m = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
        spec = MatrixSpec(split_rows=(4, 1, 1)) if shape in (FUSED, CROOKED) else MatrixSpec()
        work = replace(kept.work(rule, p.double()), grad=g.to(kept.grad), matrix=spec)
        codec.encode_(work.state["momentum_buffer"].view(-1), work.state.get("momentum_buffer_scale"), m.view(-1))
        works.append(work)
    return works


def momentum_of(work: Work, momentum: torch.dtype) -> Tensor:
    values = torch.empty(work.grad.shape, dtype=torch.float64, device=work.grad.device)
    codes = work.state["momentum_buffer"]
    scales = work.state.get("momentum_buffer_scale")
    codec_for("m", momentum, signed=True).decode_(values.view(-1), codes.view(-1), scales)
    return values


def moved(rule: MuonRule, works: list[Work], **launch: float | Tensor) -> None:
    rule.update_([Batch(HYPER, works[:3]), Batch(replace(HYPER, lr=2e-2, momentum=0.5), works[3:])], **launch)


def assert_same_bytes(works: Sequence[Work], others: Sequence[Work]) -> None:
    for one, other in zip(works, others, strict=True):
        for a, b in zip([one.grad, *written(one)], [other.grad, *written(other)], strict=True):
            assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


@pytest.mark.parametrize("name", STORAGES)
def test_a_step_equals_its_reference_in_float64(name: str, kernel_device: torch.device) -> None:
    kept, momentum = STORAGES[name]
    # What the codec loses: a unit of its codes. Of directions a rounding relative to the longest of their matrix, and
    # what mains are stored in.
    unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(momentum, 2**-4)
    is_short = kept.main is None and kept.remainder is torch.int8
    stored = 2.0**-8 if kept.main is torch.bfloat16 else 2.0**-16 if is_short else 2 * HALF_UNIT
    variants = [(True, Decay.L2), (False, Decay.DECOUPLED), (True, Decay.INDEPENDENT)]
    for nesterov, decay in variants if NIGHT or name == "fp32" else variants[:1]:
        rule = replace(ITSELF, nesterov=nesterov, weight_decay_method=decay)
        works = works_of(name, kernel_device)
        before = [main_of(work) for work in works]
        exact = [
            Work(
                grad=work.grad.double().cpu(),
                main=old.clone(),
                matrix=work.matrix,
                state={"momentum_buffer": momentum_of(work, momentum).cpu()},
            )
            for work, old in zip(works, before)
        ]
        moved(replace(rule, backend="reference", momentum_buffer_dtype=torch.float64), exact, grad_scale=0.5)
        scale = torch.tensor(0.5, device=kernel_device)
        moved(replace(rule, backend="triton", momentum_buffer_dtype=momentum), works, grad_scale=scale)
        for work, true, old in zip(works, exact, before):
            largest = (main_of(true) - old).abs().max()
            error = (main_of(work) - main_of(true)).abs()
            allowed = 128 * HALF_UNIT * largest + stored * main_of(true).abs() + 4 * HALF_UNIT * old.abs() + 1e-37
            assert (error <= allowed).all(), (nesterov, decay)
            if work.out is not None and work.main is not None:
                assert torch.equal(work.out, work.main.to(work.out.dtype))
            found = momentum_of(work, momentum).cpu()
            expected = true.state["momentum_buffer"]
            torch.testing.assert_close(found, expected, rtol=unit, atol=max(unit * 0.3, 1e-6))


@pytest.mark.parametrize("name", ["bf16-grads-bf16-out", "int8-momentum-remainder"])
def test_a_skip_flag_keeps_every_byte_and_grads_are_read_only(name: str, kernel_device: torch.device) -> None:
    works, untouched = (works_of(name, kernel_device) for _ in range(2))
    rule = replace(NARROW, momentum_buffer_dtype=STORAGES[name][1])
    moved(rule, works, skip=torch.tensor(True, device=kernel_device))
    assert_same_bytes(works, untouched)
    moved(rule, works, grad_scale=0.5)
    assert all(torch.equal(old.grad, work.grad) for old, work in zip(untouched, works))


def test_alignment_rounds_company_and_order_make_no_difference(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("remainder", "bf16-grads-bf16-out")
    shapes = ((25, 41), (7, 9), (0, 7), CROOKED)
    usual, alone, unaligned, in_rounds, flagged, turned = (
        [work for name in names for work in works_of(name, kernel_device, shapes)] for _ in range(6)
    )
    NARROW.update_([Batch(HYPER, usual)])
    for work in alone:
        NARROW.update_([Batch(HYPER, [work])])
    unaligned = [shifted(work) for work in unaligned]
    NARROW.update_([Batch(HYPER, unaligned)])
    NARROW.update_([Batch(HYPER, [replace(work, grad=torch._neg_view(-work.grad)) for work in flagged])])
    NARROW.update_([Batch(HYPER, [replace(work, grad=work.grad.t().contiguous().t()) for work in turned])])
    monkeypatch.setattr(rounds, "ROUND_NUMEL", 3000)
    NARROW.update_([Batch(HYPER, in_rounds)])
    for others in (alone, unaligned, flagged, turned, in_rounds):
        assert_same_bytes(usual, others)


def test_a_momentum_of_zeros_leaves_the_weight_as_it_is(kernel_device: torch.device) -> None:
    # Its norm is zero: without a smallest norm every weight became NaN.
    for rule in (NARROW, replace(ITSELF, backend="triton")):
        [work] = works_of("fp32", kernel_device, shapes=((25, 41),))
        expected = main_of(work) * (1 - HYPER.lr * HYPER.weight_decay)
        work.grad.zero_()
        work.state["momentum_buffer"].zero_()
        rule.update_([Batch(HYPER, [work])])
        torch.testing.assert_close(main_of(work), expected, rtol=2**-22, atol=0)


def test_a_class_with_its_own_transform_steps_as_in_torch(kernel_device: torch.device) -> None:
    class Halved(MuonRule):
        def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
            return super().transform_(tasks, inputs, skip) / 2

    highest = MatmulPrecision.HIGHEST
    options = {"scale_mode": ScaleMode.UNIT_RMS_NORM, "num_ns_steps": 1, "eps": 5.0, "fp32_matmul_prec": highest}
    mains = []
    for rule in (Halved, MuonRule):
        for backend in ("torch", "triton"):
            works = works_of("fp32", kernel_device)
            moved(rule(**options, backend=backend), works)
            mains.append([main_of(work) for work in works])
    for own_in_torch, own, in_torch, _ in zip(*mains, strict=True):
        torch.testing.assert_close(own, own_in_torch, rtol=1e-5, atol=1e-6)
        assert not torch.equal(own_in_torch, in_torch)


def test_tiny_gradients_move_weights_as_in_torch(kernel_device: torch.device) -> None:
    """Until they are divided by their norm, 16 bits hold them only with scales."""
    main, *grads = (tensor(24, 40, seed=seed).to(kernel_device) for seed in range(3))
    found, expected = (
        matrix_works.moved(MuonRule(backend=backend, use_syrk=False), main, *(1e-9 * grad for grad in grads))
        for backend in ("triton", "torch")
    )
    assert (found - expected).norm() < 0.02 * (expected - main).norm()


def test_a_round_has_inputs_of_one_kind_and_aligned_stacks() -> None:
    works = works_of("fp32", torch.device("cpu"), shapes=((25, 41), (25, 9), (7, 9)))
    inputs = lambda work: Inputs(torch.float32, work.grad.shape[0] == 25)
    found = list(rounds.rounds([Batch(HYPER, works)], inputs, lambda work: (1.0,)))
    assert max(len(round_.stacks) for round_ in found) == 2
    for round_ in found:
        assert {stack.inputs.normalised for stack in round_.stacks} == {round_.inputs.normalised}
        assert not any(stack.begin % 64 for stack in round_.stacks)


def test_what_cannot_be_swept_is_refused_with_a_way_on(kernel_device: torch.device) -> None:
    wide = torch.zeros(4, 6, dtype=torch.float64, device=kernel_device)
    holes = torch.zeros(6, 4, device=kernel_device).t()
    odd = torch.zeros(2, 3, 5, device=kernel_device)
    plain = MuonRule(backend="triton")
    coded = MuonRule(backend="triton", momentum_buffer_dtype=torch.int8)
    for rule, main, reason in (
        (plain, wide, "backend='torch'"),
        (plain, holes, "contiguous"),
        (coded, odd, "share blocks of 128"),
    ):
        work = Work(grad=torch.ones_like(main), main=main, state=rule.init_state(main))
        with pytest.raises(LayoutError, match=reason):
            rule.update_([Batch(HYPER, [work])])


def test_rounds_of_the_same_tensors_may_differ_in_rule_and_split(kernel_device: torch.device) -> None:
    rules = (MuonRule(backend="triton", num_ns_steps=1, extra_scale_factor=factor) for factor in (1.0, 3.0))
    splits = (MatrixSpec(), MatrixSpec(split_rows=(2,), by_group=True))
    shared, fresh = (works_of("fp32", kernel_device, shapes=((4, 6),) * 3) for _ in range(2))
    for rule, matrix in [(rule, split) for rule in rules for split in splits] * 2:
        fresh = [shifted(work, 0) for work in fresh]
        for works in (shared, fresh):
            rule.update_([Batch(HYPER, [replace(work, matrix=matrix) for work in works])])
    assert_same_bytes(shared, fresh)


@pytest.mark.parametrize("mode", TpMode)
def test_cut_and_whole_matrices_update_together_as_in_torch(mode: TpMode, kernel_device: torch.device) -> None:
    # One rank that plays two, the other of which holds the same. Gathered matrices come without a norm.
    group = TensorParallel(rank=0, size=2, all_reduce=lambda x: 2 * x, all_gather=lambda x, dim: torch.cat((x, x), dim))
    specs = [MatrixSpec(partition_dim=1, tensor_parallel=group), MatrixSpec()]
    results = []
    for backend in ("triton", "torch"):
        rule = replace(EXACT, tp_mode=mode, backend=backend, use_syrk=False)
        mains = [tensor(16, 24, seed=seed).to(kernel_device) for seed in range(2)]
        grads = [tensor(16, 24, seed=2 + seed).to(kernel_device) for seed in range(2)]
        works = [Work(grad=g, main=m, state=rule.init_state(m), matrix=s) for g, m, s in zip(grads, mains, specs)]
        rule.update_([Batch(HYPER, works)])
        results.append(mains)
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)
