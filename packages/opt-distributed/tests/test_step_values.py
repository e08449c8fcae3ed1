"""What a step keeps or gives back on its device: loss scale, counts of updates, clip coefficients, its result."""

import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch

from opt_config import DynamicScale
from opt_distributed.step import Limits, StepResult, scaler_of
from opt_distributed.step.verdict import Report, clip_coefficients, decide
from opt_kernels.params import Count

RULE = DynamicScale(initial=16.0, minimum=4.0, window=2, hysteresis=2, growth=2.0, backoff=0.5)
NAN = math.nan
INF = math.inf


def scales_by_hand(overflows: tuple[bool, ...]) -> list[float]:
    """Megatron-Core's state machine, in Python."""
    scale = RULE.initial
    clean = 0
    forgiven = RULE.hysteresis
    found = []
    for overflow in overflows:
        if overflow:
            clean = 0
            forgiven = forgiven - 1
            if forgiven <= 0:
                scale = max(scale * RULE.backoff, RULE.minimum)
        else:
            clean += 1
            if clean == RULE.window:
                scale = scale * RULE.growth
                clean = 0
                forgiven = RULE.hysteresis
        found.append(scale)
    return found


@pytest.mark.parametrize("on_device", [False, True], ids=["bool", "tensor"])
def test_the_loss_scale_follows_overflows_but_not_failed_steps(on_device: bool) -> None:
    for overflows in itertools.product((False, True), repeat=6):
        scaler = scaler_of(RULE)
        found = []
        for overflow in overflows:
            scaler.update(torch.tensor(overflow) if on_device else overflow)
            scaler.update(torch.tensor(True), unless=torch.tensor(True)) if on_device else None
            found.append(scaler.state[0])
        assert found == scales_by_hand(overflows)


@pytest.mark.parametrize("on_device", [False, True], ids=["bool", "tensor"])
@pytest.mark.parametrize("growth", [2.0, 3.0, 1e30])
def test_a_loss_scale_stops_growing_where_one_skip_undoes_it(growth: float, on_device: bool) -> None:
    scaler = scaler_of(replace(RULE, window=1, growth=growth))
    for _ in range(1100):
        scaler.update(torch.tensor(False) if on_device else False)
    largest = scaler.state[0]
    assert largest <= torch.finfo(torch.float32).max < largest * growth
    again = scaler_of(RULE)
    again.load_state_dict(scaler.state_dict())
    for _ in range(RULE.hysteresis):
        again.update(True)
    assert again.state[0] == largest * RULE.backoff


def test_a_count_follows_what_the_device_decides() -> None:
    """Copies are separate, because counts are written in place. The next number is always in the tensor that a captured
    graph reads."""
    count = Count(3)
    for skip in (False, True, False):
        count.advance(torch.tensor(skip))
    number = count.next()
    assert (count.known, int(number)) == (None, 6)
    other = count.copy()
    other.advance(torch.tensor(False))
    assert (int(count), int(other), count.known) == (5, 6, 5)  # reading it on the host changes nothing else
    count.advance(None)
    assert count.next() is number
    assert (int(count), int(number)) == (6, 7)


def test_a_count_of_replays_is_read_from_the_device_every_time() -> None:
    """A replay counts without the host."""
    count = Count(3)
    count.stay_on(torch.device("cpu"))
    for number in (3, 4, 5):
        assert int(count) == number
        next_number = count.next()
        assert isinstance(next_number, torch.Tensor)
        next_number.add_(1)


def test_a_count_begun_in_inference_mode_continues_outside_it() -> None:
    count = Count()
    with torch.inference_mode():
        count.advance(torch.tensor(False))
        copied = count.copy()
    for each in (count, copied):
        each.advance(torch.tensor(False))
        assert int(each) == 2


def test_clip_coefficients_are_capped_at_1() -> None:
    norms = [0.0, 0.5, 1.0, 3.0, 7.0]
    for limit in (1.0, 0.3, 0.0, math.inf):
        expected = [min(limit / (norm + 1e-6), 1.0) if limit else 1.0 for norm in norms]
        assert clip_coefficients(torch.tensor(norms, dtype=torch.float64), limit).tolist() == expected


class Limit:
    """A guard of two flags whose second sum must not exceed 1."""

    num_flags = 2

    def flags(self, groups: object) -> list[float]:
        return [7.0, 0.0]

    def is_wrong(self, sums: torch.Tensor) -> torch.Tensor:
        return sums[1:] > 1

    def error(self, sums: object) -> Exception:
        return ValueError(f"{sums}")


# Squares of two slots, and elements that are not finite: the norms, and whether the step overflows.
SUMS = [
    ((9.0, 4.0), 0, [3.0, 2.0], False),
    ((0.0, 0.0), 0, [0.0, 0.0], False),
    ((NAN, 4.0), 0, [NAN, 2.0], True),
    ((9.0, INF), 0, [3.0, INF], True),
    ((9.0, 4.0), 3, [INF, INF], True),
    ((NAN, 1.0), 1, [NAN, INF], True),
    ((-1.0, 1.0), 0, [NAN, 1.0], True),
]


def test_a_verdict_keeps_overflow_error_and_refusal_apart() -> None:
    cases = itertools.product(SUMS, (1.0, 0.25), (INF, 0.6), (False, True))
    for (squares, num_nonfinite, norms, overflow), scale, limit, wrong in cases:
        numbers = torch.tensor([*squares, num_nonfinite, 5.0, 6.0, 4.0, 7.0, 2.0 * wrong], dtype=torch.float64)
        limits = Limits(slots=("", "b"), clips=(True, False), skip_above=limit)
        inv_scale = torch.tensor(scale, dtype=torch.float64)
        verdict = decide(numbers, [Limit()], inv_scale=inv_scale, limits=limits)
        report = Report.of(verdict.report.tolist(), [Limit()], num_slots=2)
        refused = norms[0] * scale > limit
        reason = "overflow" if overflow else "norm above the limit" * refused
        expected = ([norm * scale for norm in norms], 5, reason, [wrong], [[7.0, 2.0 * wrong]], 1.5, [INF, INF])
        assert repr(tuple(report)) == repr(expected)
        assert (bool(verdict.overflow), bool(verdict.is_wrong)) == (overflow, wrong)
        assert bool(verdict.skip) == (overflow or refused or wrong) == (not report.success)
        if not overflow:
            clipped = scale * min(1.5 / (norms[0] * scale + 1e-6), 1.0)
            assert [float(factor) for factor in verdict.scales(1.5, limits.clips)] == [clipped, scale]


def test_a_result_is_read_once_and_only_on_access() -> None:
    reads: list[None] = []
    result = StepResult.later(lambda: (reads.append(None), (True, 2.5, None))[1])
    assert len(result) == 3
    assert not reads
    assert (*result,) == (True, 2.5, None) == (result.success, result.grad_norm, result.num_zeros_in_grad)
    assert result == StepResult(True, 2.5, None) == (True, 2.5, None)
    assert result != (False, 2.5, None)
    assert pickle.loads(pickle.dumps(result)) == result
    assert repr(result) == "StepResult(success=True, grad_norm=2.5, num_zeros_in_grad=None)"
    assert len(reads) == 1
