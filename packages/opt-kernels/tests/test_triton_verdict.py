"""The kernels of a verdict against the same arithmetic in torch operations: the bits are equal."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton.grad_stats import StatsSweep, grad_stats
from opt_kernels.backends.triton.verdict import Decisions, RowOfSums, Summand

pytestmark = pytest.mark.needs_extra

NAN, INF = math.nan, math.inf


def gradients(device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(numel, generator=generator).to(dtype).to(device) for numel in (3, 1025, 0, 4096)]
    made[1][::7] = 0
    return made


def sweep(grads: list[Tensor]) -> StatsSweep:
    found = StatsSweep.of(grads)
    assert found is not None
    return found


@pytest.mark.parametrize("count_zeros", [False, True])
@pytest.mark.parametrize("num_known", [2, 11])
def test_a_row_has_the_sums_of_every_part_and_the_numbers_of_the_host(
    num_known: int, count_zeros: bool, kernel_device: torch.device
) -> None:
    """Two sources in one norm slot, another slot without gradients, and copies that another rank counts."""
    first, second, copies = (gradients(kernel_device, seed) for seed in range(3))
    second[3][:2], copies[0][0] = torch.inf, torch.nan
    known = torch.arange(num_known, dtype=torch.float64, device=kernel_device) + 0.5
    parts = [Summand(sweep(first), 2, 0.3), Summand(sweep(second), 2, 1.0), Summand(sweep(copies), None, 1.0)]
    row = RowOfSums(parts, num_slots=3, num_known=num_known, device=kernel_device)
    stats = [grad_stats(grads) for grads in (first, second, copies)]
    zeros = stats[0].zeros + stats[1].zeros if count_zeros else 0
    expected = [0.0, 0.0, stats[0].sum_of_squares * 0.3 + stats[1].sum_of_squares, 3.0, float(zeros), *known.tolist()]
    for _ in range(2):  # in the same memory
        found = row.write_(known, count_zeros=count_zeros)
        assert found.tolist() == [float(number) for number in expected]


def test_a_row_follows_gradients_that_are_written_in_place(kernel_device: torch.device) -> None:
    grads = gradients(kernel_device, 0)
    row = RowOfSums([Summand(sweep(grads), 0, 1.0)], num_slots=1, num_known=2, device=kernel_device)
    known = torch.zeros(2, dtype=torch.float64, device=kernel_device)
    before = row.write_(known, count_zeros=True)[0].item()
    torch._foreach_mul_(grads, 2.0)
    assert row.write_(known, count_zeros=True)[0].item() == 4 * before


def in_torch(
    row: Tensor, inv_scale: Tensor | float, max_norm: float, skip_above: float, num_slots: int
) -> list[Tensor]:
    norms = torch.where(row[num_slots] > 0, row[:num_slots].sqrt() + torch.inf, row[:num_slots].sqrt())
    overflow = ~(norms < torch.inf).all()
    has_error = (row[num_slots + 2] + row[num_slots + 3]) > 0
    count, total, squares = row[num_slots + 4 :].to(torch.int64).view(-1, 3).unbind(1)
    has_error = has_error | (count * squares != total * total).any()
    norms = norms * inv_scale
    clipped = torch.full_like(norms, max_norm).div_(norms + 1e-6).clamp_(max=1.0)
    if max_norm == 0:
        clipped = torch.ones_like(norms)
    return [norms, clipped * inv_scale, overflow, has_error, overflow | has_error | (norms[0] > skip_above)]


ROWS = [
    [9.0, 0.04, 0.0, 5.0, 0.0, 0.0],
    [7.77e-9, 3e300, 0.0, 5.0, 0.0, 0.0],
    [9.0, 4.0, 3.0, 5.0, 0.0, 0.0],
    [9.0, 4.0, 0.0, 5.0, 1.0, 0.0],
    [9.0, 4.0, 0.0, 5.0, 0.0, 2.0],
    [NAN, 4.0, 0.0, 0.0, 0.0, 0.0],
    [4.0, INF, 0.0, 0.0, 0.0, 0.0],
    [NAN, 4.0, 1.0, 0.0, 0.0, 0.0],
]
GROUPS: list[list[float]] = [[], [2.0, 6.0, 18.0], [2.0, 6.0, 18.0, 2.0, 7.0, 25.0, 1.0, 5.0, 25.0]]


@pytest.mark.parametrize("groups", GROUPS, ids=["alone", "equal", "different"])
@pytest.mark.parametrize("max_norm", [0.0, 1.7])
@pytest.mark.parametrize("skip_above", [INF, 0.6])
@pytest.mark.parametrize("scale", [1.0, 0.3, "tensor"])
def test_decisions_are_those_of_torch_operations(
    groups: list[float], max_norm: float, skip_above: float, scale: float | str, kernel_device: torch.device
) -> None:
    inv_scale = torch.tensor(1 / 3, dtype=torch.float64, device=kernel_device) if scale == "tensor" else scale
    assert not isinstance(inv_scale, str)
    decisions = Decisions(
        num_slots=2, num_groups=len(groups) // 3, max_norm=max_norm, clips=(True, True), skip_above=skip_above,
        device=kernel_device,
    )  # fmt: skip
    for sums in ROWS:
        row = torch.tensor([*sums, *groups], dtype=torch.float64, device=kernel_device)
        decisions.write_(row, inv_scale)
        norms, scales, *flags = in_torch(row, inv_scale, max_norm, skip_above, 2)
        assert repr(decisions.norms.tolist()) == repr(norms.tolist())
        assert [bool(flag) for flag in (decisions.overflow, decisions.has_error, decisions.skip)] == list(
            map(bool, flags)
        )
        if not decisions.skip:
            assert [one.item() for one in decisions.scales] == scales.tolist()


def test_slots_that_are_not_clipped_keep_their_scale(kernel_device: torch.device) -> None:
    row = torch.tensor([100.0, 100.0, 100.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64, device=kernel_device)
    decisions = Decisions(
        num_slots=3, num_groups=0, max_norm=1.0, clips=(False, True, False), skip_above=INF, device=kernel_device
    )
    decisions.write_(row, 0.25)
    assert [one.item() for one in decisions.scales] == [0.25, 0.25 / (2.5 + 1e-6), 0.25]
