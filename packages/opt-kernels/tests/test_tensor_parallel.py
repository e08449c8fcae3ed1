"""Matrices cut over tensor-parallel ranks, ranks being threads: the same update as that of the whole matrix."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from matrix_works import tensor
from torch import Tensor

from opt_kernels import MatrixError
from opt_kernels.matrices import CoefficientType, MatmulPrecision, ScaleMode, TpMode
from opt_kernels.rules import AdaptiveMuonRule, Lines, MuonRule, Rule, SecondMoment, SOAPRule
from opt_kernels.works import Batch, Hyper, MatrixSpec, TensorParallel, Work

HYPER = Hyper(lr=0.1, weight_decay=0.3, momentum=0.9, betas=(0.9, 0.95))
TIMEOUT_S = 30.0  # of a rank that waits for one that failed


@dataclass(slots=True)
class Threads:
    """A group whose ranks are threads: each call is a meeting of all."""

    size: int
    calls: list[list[str]] = field(default_factory=list)  # by rank, in order
    _slots: list[Tensor] = field(default_factory=list)
    _barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.calls = [[] for _ in range(self.size)]
        self._slots = [torch.empty(0)] * self.size
        self._barrier = threading.Barrier(self.size)

    def of(self, rank: int) -> TensorParallel:
        """What the rule of `rank` is given."""
        return TensorParallel(
            rank=rank,
            size=self.size,
            all_reduce=lambda tensor: sum(self._met(rank, "all_reduce", tensor), torch.zeros(())),
            all_gather=lambda tensor, dim: torch.cat(self._met(rank, "all_gather", tensor), dim=dim),
        )

    def _met(self, rank: int, call: str, tensor: Tensor) -> list[Tensor]:
        self.calls[rank].append(f"{call} {tuple(tensor.shape)}")
        self._slots[rank] = tensor.clone()
        self._barrier.wait(TIMEOUT_S)
        met = list(self._slots)
        self._barrier.wait(TIMEOUT_S)
        return met


def whole_update(
    rule: Rule, mains: list[Tensor], grads: list[list[Tensor]], split_rows: tuple[int, ...], *, by_group: bool = False
) -> list[Tensor]:
    """The mains after a step for each of `grads`, on one rank."""
    mains = [main.clone() for main in mains]
    states = [rule.init_state(main) for main in mains]
    for of_step in grads:
        works = [
            Work(grad=grad, main=main, state=state, matrix=MatrixSpec(split_rows=split_rows, by_group=by_group))
            for grad, main, state in zip(of_step, mains, states)
        ]
        rule.update_([Batch(HYPER, works)])
    return mains


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How matrices are dealt to ranks."""

    size: int
    dim: int
    split_rows: tuple[int, ...] = ()
    by_group: bool = False


def cut_update(rule: Rule, mains: list[Tensor], grads: list[list[Tensor]], cut: Cut) -> tuple[list[Tensor], Threads]:
    """The same on `cut.size` ranks, put together again; and the group, with its record of calls."""
    group = Threads(cut.size)

    def part(tensor: Tensor, rank: int) -> Tensor:
        return tensor.chunk(cut.size, dim=cut.dim)[rank].clone()

    def run(rank: int) -> list[Tensor]:
        parts = [part(main, rank) for main in mains]
        states = [rule.init_state(main) for main in parts]
        spec = MatrixSpec(
            split_rows=cut.split_rows, by_group=cut.by_group, partition_dim=cut.dim, tensor_parallel=group.of(rank)
        )
        for of_step in grads:
            works = [
                Work(grad=part(grad, rank), main=main, state=state, matrix=spec)
                for grad, main, state in zip(of_step, parts, states)
            ]
            rule.update_([Batch(HYPER, works)])
        return parts

    with ThreadPoolExecutor(cut.size) as pool:
        by_rank = list(pool.map(run, range(cut.size)))
    return [torch.cat(parts, dim=cut.dim) for parts in zip(*by_rank)], group


@pytest.fixture(autouse=True)
def _one_thread_per_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CUTS = [
    Cut(size=size, dim=dim, split_rows=split_rows)
    for size in (1, 2, 4)
    for dim in (0, 1)
    for split_rows in ((), (4, 1, 1))
]
SHAPES = [(48, 16), (48, 96), (48, 48), (48, 16)]
MAINS = [tensor(*shape, seed=i) for i, shape in enumerate(SHAPES)]
GRADS = [[tensor(*shape, seed=10 * step + i) for i, shape in enumerate(SHAPES)] for step in (1, 2)]
MUON = MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST, scale_mode=ScaleMode.UNIT_RMS_NORM, nesterov=True)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("mode", [TpMode.DUPLICATED, TpMode.DISTRIBUTED])
def test_the_update_does_not_depend_on_the_number_of_ranks(mode: TpMode, cut: Cut) -> None:
    rule = replace(MUON, tp_mode=mode)
    got, group = cut_update(rule, MAINS, GRADS, cut)
    expected = whole_update(rule, MAINS, GRADS, cut.split_rows)
    for a, b in zip(got, expected):
        if mode is TpMode.DUPLICATED:
            assert torch.equal(a, b)
        else:
            # Two steps of size 0.1 whose directions agree to a few units of fp32 times the growth of the steps, 5e2;
            # the coupling with the other side's Gram matrix, where ranks hold rows of a wide matrix, costs no more.
            torch.testing.assert_close(a, b, rtol=0, atol=5e-4)
    assert all(calls == group.calls[0] for calls in group.calls)


@pytest.mark.parametrize("method", SecondMoment)
@pytest.mark.parametrize("mode", [TpMode.DUPLICATED, TpMode.DISTRIBUTED])
@pytest.mark.parametrize(
    "cut", [Cut(size=4, dim=0), Cut(size=4, dim=1), Cut(size=2, dim=0, split_rows=(4, 1, 1))], ids=str
)
def test_adaptive_updates_do_not_depend_on_the_number_of_ranks(method: SecondMoment, mode: TpMode, cut: Cut) -> None:
    rule = AdaptiveMuonRule(muon=replace(MUON, tp_mode=mode), second_moment=method)
    got, _ = cut_update(rule, MAINS, GRADS, cut)
    for a, b in zip(got, whole_update(rule, MAINS, GRADS, cut.split_rows)):
        # AdaMuon's first steps divide each element by about its own size: 0.1 x sqrt(20) each.
        torch.testing.assert_close(a, b, rtol=2e-3, atol=5e-3 if method is SecondMoment.ADAMUON else 5e-4)


@pytest.mark.parametrize("lines", [Lines.COLS, Lines.LONGER])
@pytest.mark.parametrize("cut", [Cut(size=2, dim=0), Cut(size=2, dim=1)], ids=str)
def test_lines_of_either_kind_are_those_of_the_whole(lines: Lines, cut: Cut) -> None:
    rule = AdaptiveMuonRule(
        muon=replace(MUON, tp_mode=TpMode.DUPLICATED), second_moment=SecondMoment.NORMUON, lines=lines
    )
    # Cut so that the longer side of a part is that of the whole.
    mains = [tensor(48, 16), tensor(16, 48)]
    grads = [[tensor(48, 16, seed=step), tensor(16, 48, seed=step)] for step in (1, 2)]
    got, _ = cut_update(rule, mains, grads, cut)
    for a, b in zip(got, whole_update(rule, mains, grads, ())):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=5e-4)


@pytest.mark.parametrize("mode", TpMode)
@pytest.mark.parametrize("dim", [0, 1])
def test_heads_do_not_depend_on_the_number_of_ranks(mode: TpMode, dim: int) -> None:
    # Twelve heads of four rows, whole on their ranks where rows are dealt: no rank asks for another's.
    rule, spec = replace(MUON, tp_mode=mode), {"split_rows": (4,), "by_group": True}
    got, group = cut_update(rule, MAINS, GRADS, Cut(size=2, dim=dim, **spec))
    assert dim == 1 or group.calls == [[], []]
    if dim == 1 and mode is TpMode.BLOCKWISE:
        return
    for a, b in zip(got, whole_update(rule, MAINS, GRADS, (4,), by_group=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-4)


def test_parts_that_cannot_be_updated_alone_are_refused() -> None:
    with pytest.raises(MatrixError, match=r"split_rows=\(32,\) does not divide the 24 rows"):
        cut_update(MUON, [tensor(48, 16)], [[tensor(48, 16)]], Cut(size=2, dim=0, split_rows=(32,), by_group=True))
    rule = AdaptiveMuonRule(muon=MUON, second_moment=SecondMoment.NORMUON, lines=Lines.LONGER)
    with pytest.raises(MatrixError, match=r"lines='longer': this rank has a part \(16, 12\) of a matrix \(16, 24\)"):
        cut_update(rule, [tensor(16, 24)], [[tensor(16, 24)]], Cut(size=2, dim=1))


def test_blocks_are_orthogonalised_alone_but_scaled_as_the_whole() -> None:
    rule = replace(MUON, tp_mode=TpMode.BLOCKWISE, scale_mode=ScaleMode.SPECTRAL)
    main, grad = MAINS[1], GRADS[0][1]
    (got,), group = cut_update(rule, [main], [[grad]], Cut(size=2, dim=1))
    assert group.calls == [[], []]
    # Half of 48 x 96 is square: alone its scale is sqrt(48), in the whole sqrt(96).
    alone = replace(rule, extra_scale_factor=2**0.5)
    expected = [whole_update(alone, [m], [[g]], ())[0] for m, g in zip(main.chunk(2, 1), grad.chunk(2, 1))]
    torch.testing.assert_close(got, torch.cat(expected, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", range(3))
def test_stacks_of_matrices_are_cut_by_their_last_dims(dim: int) -> None:
    """Dim 0 of a stack is not a dim of its matrices: experts that are dealt to ranks are whole."""
    mains, grads = [tensor(4, 24, 16)], [[tensor(4, 24, 16, seed=1)]]
    rule = replace(MUON, tp_mode=TpMode.DUPLICATED)
    got, group = cut_update(rule, mains, grads, Cut(size=2, dim=dim))
    assert dim or group.calls == [[], []]
    torch.testing.assert_close(got[0], whole_update(rule, mains, grads, ())[0], rtol=0, atol=0 if dim else 1e-5)


def collectives(rule: MuonRule, mains: list[Tensor], cut: Cut) -> int:
    grads = [[torch.ones_like(main) for main in mains]]
    return len(cut_update(rule, mains, grads, cut)[1].calls[0])


def test_equal_shapes_share_their_collectives_and_a_gram_matrix_is_summed_once_a_segment() -> None:
    rule = replace(MUON, tp_mode=TpMode.DUPLICATED)
    assert collectives(rule, [tensor(48, 16, seed=i) for i in range(7)], Cut(size=2, dim=0)) == 1
    # Ranks that still hold long pieces work on the Gram matrix alone, two steps at a time: three sums for five steps,
    # and one for the norm.
    rule = replace(MUON, tp_mode=TpMode.DISTRIBUTED)
    assert collectives(rule, [tensor(16, 256)], Cut(size=2, dim=1)) == 4
    ten_steps = replace(rule, coefficient_type=CoefficientType.DEEPSEEKV4, num_ns_steps=10)
    assert collectives(ten_steps, [tensor(16, 256)], Cut(size=2, dim=1)) == 6


def test_soap_refuses_a_part_of_a_matrix() -> None:
    with pytest.raises(MatrixError, match="cut over 2 tensor-parallel ranks; gather it before the rule"):
        cut_update(SOAPRule(), [tensor(8, 8)], [[tensor(8, 8)]], Cut(size=2, dim=0))
