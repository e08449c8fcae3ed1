"""Matrices cut over tensor-parallel ranks, ranks being threads: the same update as that of the whole matrix."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from matrix_works import tensor
from torch import Tensor

from opt_kernels import MatrixError
from opt_kernels.matrices import CoefficientType, MatmulPrecision, PostNorm, PreNorm, ScaleMode, TpMode
from opt_kernels.rules import AdaptiveMuonRule, Lines, MuonRule, Rule, SecondMoment, SOAPRule
from opt_kernels.works import NOT_SPLIT, Batch, Hyper, MatrixSpec, TensorParallel, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.9, 0.95))
TIMEOUT_S = 30.0  # of a rank that waits for one that failed


Calls = list[list[str]]  # by rank, in order


def threads_of(size: int) -> tuple[list[TensorParallel], Calls]:
    """What the rules of ranks that are threads are given, and a record of their calls, each a meeting of all."""
    barrier = threading.Barrier(size)
    slots = [torch.empty(0)] * size
    calls = [[] for _ in range(size)]

    def met(rank: int, call: str, tensor: Tensor) -> list[Tensor]:
        calls[rank].append(f"{call} {tuple(tensor.shape)}")
        slots[rank] = tensor.clone()
        barrier.wait(TIMEOUT_S)
        found = list(slots)
        barrier.wait(TIMEOUT_S)
        return found

    def of(rank: int) -> TensorParallel:
        reduce = lambda tensor: sum(met(rank, "all_reduce", tensor), torch.zeros(()))
        gather = lambda tensor, dim: torch.cat(met(rank, "all_gather", tensor), dim=dim)
        return TensorParallel(rank=rank, size=size, all_reduce=reduce, all_gather=gather)

    return list(map(of, range(size))), calls


def updated(rule: Rule, mains: list[Tensor], grads: list[list[Tensor]], spec: MatrixSpec) -> list[Tensor]:
    """`mains`, written, after a step for each of `grads`."""
    states = [rule.init_state(main) for main in mains]
    for of_step in grads:
        works = [Work(grad=g, main=m, state=s, matrix=spec) for g, m, s in zip(of_step, mains, states)]
        rule.update_([Batch(HYPER, works)])
    return mains


def whole_update(rule: Rule, mains: list[Tensor], grads: list[list[Tensor]], spec: Any = NOT_SPLIT) -> list[Tensor]:
    return updated(rule, [main.clone() for main in mains], grads, spec)


class Cut(NamedTuple):
    """How matrices are dealt to ranks."""

    size: int
    dim: int
    spec: MatrixSpec = NOT_SPLIT


def cut_update(rule: Rule, mains: list[Tensor], grads: list[list[Tensor]], cut: Cut) -> tuple[list[Tensor], Calls]:
    """The same on `cut.size` ranks, put together again; and the calls of the ranks."""
    groups, calls = threads_of(cut.size)

    def run(group: TensorParallel) -> list[Tensor]:
        def parts(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.chunk(cut.size, dim=cut.dim)[group.rank].clone() for tensor in tensors]

        spec = replace(cut.spec, partition_dim=cut.dim, tensor_parallel=group)
        return updated(rule, parts(mains), list(map(parts, grads)), spec)

    with ThreadPoolExecutor(cut.size) as pool:
        by_rank = list(pool.map(run, groups))
    return [torch.cat(parts, dim=cut.dim) for parts in zip(*by_rank)], calls


SHAPES = [(48, 16), (48, 96), (48, 48), (48, 16)]
MAINS = [tensor(*shape, seed=i) for i, shape in enumerate(SHAPES)]
GRADS = [[tensor(*shape, seed=10 * step + i) for i, shape in enumerate(SHAPES)] for step in (1, 2)]
MUON = MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST, scale_mode=ScaleMode.UNIT_RMS_NORM, nesterov=True)
FUSED = MatrixSpec(split_rows=(4, 1, 1))
ON_MODES = pytest.mark.parametrize("mode", [TpMode.DUPLICATED, TpMode.DISTRIBUTED])


@ON_MODES
@pytest.mark.parametrize("spec", [NOT_SPLIT, FUSED], ids=["whole", "fused"])
def test_the_update_does_not_depend_on_the_number_of_ranks(mode: TpMode, spec: MatrixSpec) -> None:
    rule = replace(MUON, tp_mode=mode)
    expected = whole_update(rule, MAINS, GRADS, spec)
    for size, dim in product((1, 2, 4), (0, 1)):
        got, calls = cut_update(rule, MAINS, GRADS, Cut(size, dim, spec))
        for a, b in zip(got, expected):
            if mode is TpMode.DUPLICATED:
                assert torch.equal(a, b), (size, dim)
            else:
                # Two steps of size 0.1 whose directions agree to a few units of fp32 times the steps' growth, 5e2.
                torch.testing.assert_close(a, b, rtol=0, atol=5e-4)
        assert all(of_rank == calls[0] for of_rank in calls)


LEVELS = [{"pre_norm": PreNorm.ROWS, "post_norm": post} for post in (PostNorm.FROBENIUS, PostNorm.COLS_ROWS)]
LEVELS += [{"nuclear_scale": True}]


@ON_MODES
@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_norms_are_those_of_whole_matrices(levels: Any, mode: TpMode) -> None:
    rule = replace(MUON, tp_mode=mode, **levels)
    for cut in (Cut(2, 0), Cut(2, 1), Cut(4, 1), Cut(2, 0, FUSED)):
        got, calls = cut_update(rule, MAINS, GRADS, cut)
        for a, b, main in zip(got, whole_update(rule, MAINS, GRADS, cut.spec), MAINS):
            if mode is TpMode.DUPLICATED:
                assert torch.equal(a, b), cut
            else:
                torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * float((b - main).abs().max()))
        assert all(of_rank == calls[0] for of_rank in calls)


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_blocks_have_norms_of_their_own(levels: Any) -> None:
    rule = replace(MUON, scale_mode=ScaleMode.SPECTRAL, **levels)  # the scale of the rows, which are whole
    mains = [MAINS[0]]
    grads = [of_step[:1] for of_step in GRADS]
    got, calls = cut_update(rule, mains, grads, Cut(2, 1))
    blocks = []
    for at in (0, 1):
        block = lambda tensors, at=at: [tensor.chunk(2, dim=1)[at].clone() for tensor in tensors]
        blocks += whole_update(rule, block(mains), list(map(block, grads)))
    torch.testing.assert_close(got[0], torch.cat(blocks, dim=1), rtol=0, atol=1e-5)
    assert calls == [[], []]


NORMUON = SecondMoment.NORMUON
OF_LINES = [*((method, Lines.ROWS) for method in SecondMoment), (NORMUON, Lines.COLS), (NORMUON, Lines.LONGER)]


@ON_MODES
@pytest.mark.parametrize(("method", "lines"), OF_LINES)
def test_adaptive_updates_do_not_depend_on_the_number_of_ranks(
    method: SecondMoment, lines: Lines, mode: TpMode
) -> None:
    rule = AdaptiveMuonRule(muon=replace(MUON, tp_mode=mode), second_moment=method, lines=lines)
    shapes = [(48, 16), (24, 96)]  # of which the longer side of a part is that of the whole
    mains = [tensor(*shape) for shape in shapes]
    grads = [[tensor(*shape, seed=step) for shape in shapes] for step in (1, 2)]
    for cut in (Cut(2, 0), Cut(2, 1), Cut(2, 0, FUSED)):
        got, _ = cut_update(rule, mains, grads, cut)
        for a, b in zip(got, whole_update(rule, mains, grads, cut.spec)):
            # AdaMuon's first steps divide each element by about its own size: 0.1 x sqrt(20) each.
            torch.testing.assert_close(a, b, rtol=2e-3, atol=5e-3 if method is SecondMoment.ADAMUON else 5e-4)


@pytest.mark.parametrize("mode", TpMode)
@pytest.mark.parametrize("dim", [0, 1])
def test_heads_do_not_depend_on_the_number_of_ranks(mode: TpMode, dim: int) -> None:
    # Twelve heads of four rows, whole on their ranks where rows are dealt: no rank asks for another's.
    rule = replace(MUON, tp_mode=mode)
    spec = MatrixSpec(split_rows=(4,), by_group=True)
    got, calls = cut_update(rule, MAINS, GRADS, Cut(2, dim, spec))
    assert dim == 1 or calls == [[], []]
    if dim == 0 or mode is not TpMode.BLOCKWISE:
        for a, b in zip(got, whole_update(rule, MAINS, GRADS, spec)):
            torch.testing.assert_close(a, b, rtol=0, atol=5e-4)


def test_parts_that_cannot_be_updated_alone_are_refused() -> None:
    longer = AdaptiveMuonRule(muon=MUON, second_moment=NORMUON, lines=Lines.LONGER)
    heads = MatrixSpec(split_rows=(32,), by_group=True)
    for rule, shape, cut, message in (
        (MUON, (48, 16), Cut(2, 0, heads), r"split_rows=\(32,\) does not divide the 24 rows"),
        (longer, (16, 24), Cut(2, 1), r"lines='longer': this rank has a part \(16, 12\) of a matrix \(16, 24\)"),
        (SOAPRule(), (8, 8), Cut(2, 0), "cut over 2 tensor-parallel ranks; gather it before the rule"),
    ):
        with pytest.raises(MatrixError, match=message):
            cut_update(rule, [tensor(*shape)], [[tensor(*shape)]], cut)


def test_blocks_are_orthogonalised_alone_but_scaled_as_the_whole() -> None:
    rule = replace(MUON, tp_mode=TpMode.BLOCKWISE, scale_mode=ScaleMode.SPECTRAL)
    main = MAINS[1]
    grad = GRADS[0][1]
    (got,), calls = cut_update(rule, [main], [[grad]], Cut(2, 1))
    assert calls == [[], []]
    # Half of 48 x 96 is square: alone its scale is sqrt(48), in the whole sqrt(96).
    alone = replace(rule, extra_scale_factor=2**0.5)
    expected = [whole_update(alone, [m], [[g]])[0] for m, g in zip(main.chunk(2, 1), grad.chunk(2, 1))]
    torch.testing.assert_close(got, torch.cat(expected, dim=1), rtol=0, atol=1e-5)


def test_stacks_of_matrices_are_cut_by_their_last_dims() -> None:
    """Dim 0 of a stack is not a dim of its matrices: experts that are dealt to ranks are whole."""
    mains = [tensor(4, 24, 16)]
    grads = [[tensor(4, 24, 16, seed=1)]]
    rule = replace(MUON, tp_mode=TpMode.DUPLICATED)
    for dim in range(3):
        got, calls = cut_update(rule, mains, grads, Cut(2, dim))
        assert dim or calls == [[], []]
        torch.testing.assert_close(got[0], whole_update(rule, mains, grads)[0], rtol=0, atol=0 if dim else 1e-5)


def test_equal_shapes_share_collectives_and_gram_sums() -> None:
    distributed = replace(MUON, tp_mode=TpMode.DISTRIBUTED)
    ten_steps = replace(distributed, coefficient_type=CoefficientType.DEEPSEEKV4, num_ns_steps=10)
    # Ranks that still hold long pieces work on the Gram matrix alone, two steps at a time: three sums for five steps,
    # and one for the norm.
    for rule, mains, dim, expected in (
        (replace(MUON, tp_mode=TpMode.DUPLICATED), [tensor(48, 16, seed=i) for i in range(7)], 0, 1),
        (distributed, [tensor(16, 256)], 1, 4),
        (ten_steps, [tensor(16, 256)], 1, 6),
    ):
        _, calls = cut_update(rule, mains, [[torch.ones_like(main) for main in mains]], Cut(2, dim))
        assert len(calls[0]) == expected
