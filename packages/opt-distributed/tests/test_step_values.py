"""What a step keeps or gives back on its device: loss scale, counts of updates, clip coefficients, its result."""

import dataclasses
import itertools
import math
import pickle

import pytest
import torch

from opt_config import DynamicScale
from opt_distributed.comm.device import Host
from opt_distributed.step.clip import clip_coefficient, clip_coefficients
from opt_distributed.step.counts import StepCount
from opt_distributed.step.hyper import KeptHyper
from opt_distributed.step.result import StepResult
from opt_distributed.step.scaler import DynamicScaler
from opt_distributed.step.verdict import Decided, Objections, Terms, Verdict
from opt_kernels.works import Hyper

RULE = DynamicScale(initial=16.0, minimum=4.0, window=2, hysteresis=2, growth=2.0, backoff=0.5)


def scales_by_hand(overflows: tuple[bool, ...]) -> list[float]:
    """Megatron-Core's state machine, in Python."""
    scale, clean, forgiven, found = RULE.initial, 0, RULE.hysteresis, []
    for overflow in overflows:
        if overflow:
            clean, forgiven = 0, forgiven - 1
            if forgiven <= 0:
                scale = max(scale * RULE.backoff, RULE.minimum)
        else:
            clean += 1
            if clean == RULE.window:
                scale, clean, forgiven = scale * RULE.growth, 0, RULE.hysteresis
        found.append(scale)
    return found


@pytest.mark.parametrize("on_device", [False, True], ids=["bool", "tensor"])
def test_the_loss_scale_follows_every_sequence_of_overflows(on_device: bool) -> None:
    for overflows in itertools.product((False, True), repeat=6):
        scaler, found = DynamicScaler(RULE), []
        for overflow in overflows:
            scaler.update(torch.tensor(overflow) if on_device else overflow)
            found.append(scaler.scale)
        assert found == scales_by_hand(overflows)


def test_the_loss_scale_stays_where_a_step_is_an_error() -> None:
    scaler = DynamicScaler(RULE)
    before = scaler.state_dict()
    for overflow in (True, False):
        scaler.update(torch.tensor(overflow), unless=torch.tensor(True))
    assert scaler.state_dict() == before


def test_a_count_follows_what_the_device_decides() -> None:
    count = StepCount(3)
    for skip in (False, True, False):
        count.advance(torch.tensor(skip))
    assert count.known is None
    assert int(count.next()) == 6
    other = count.copy()
    other.advance(torch.tensor(False))
    assert (int(count), int(other), count.known) == (5, 6, 5)
    count.advance(None)
    assert int(count) == 6


def test_copies_of_a_count_on_the_device_are_separate() -> None:
    """Counts are written in place: a shared tensor would count for both."""
    count = StepCount(3)
    count.advance(torch.tensor(False))
    copied = count.copy()
    copied.advance(torch.tensor(False))
    assert (int(count), int(copied)) == (4, 5)


def test_a_count_of_replays_is_read_from_the_device_every_time() -> None:
    """A replay counts without the host."""
    count = StepCount(3)
    count.stay_on(torch.device("cpu"))
    for number in (3, 4, 5):
        assert int(count) == number
        next_number = count.next()
        assert isinstance(next_number, torch.Tensor)
        next_number.add_(1)


def test_a_count_that_began_in_inference_mode_goes_on_outside_of_it() -> None:
    count = StepCount()
    with torch.inference_mode():
        count.advance(torch.tensor(False))
        copied = count.copy()
    for one in (count, copied):
        one.advance(torch.tensor(False))
        assert int(one) == 2


def test_the_next_number_of_a_device_is_always_the_same_tensor() -> None:
    """A kept row of hyper-parameters holds it."""
    count = StepCount()
    count.advance(torch.tensor(False))
    number = count.next()
    count.advance(torch.tensor(False))
    assert int(count) == 2  # reading it on the host changes nothing
    assert count.next() is number
    assert int(number) == 3


GROUP = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "name": "", "params": []}


@pytest.mark.parametrize(
    ("change", "field"),
    [({"lr": 0.2}, "lr"), ({"betas": (0.8, 0.95)}, "betas"), ({"weight_decay": 0.3}, "weight_decay"), ({"k": 2}, "k")],
    ids=str,
)
def test_a_kept_row_follows_every_change_of_its_group(change: dict[str, object], field: str) -> None:
    group, rows, step = {**GROUP, "k": 1}, KeptHyper(["k"]), torch.tensor(1)
    before = rows.read(group, step=step)
    assert rows.read(group, step=step) is before
    group.update(change)
    after = rows.read(group, step=step)
    assert (after.own if field == "k" else vars_of(after))[field] == change[field]
    assert rows.read(group, step=torch.tensor(2)).step == 2


def test_a_row_with_a_list_is_not_kept() -> None:
    group, rows, step = {**GROUP, "betas": [0.9, 0.95]}, KeptHyper(), torch.tensor(1)
    before = rows.read(group, step=step)
    assert rows.read(group, step=step) is not before


def vars_of(row: Hyper) -> dict[str, object]:
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


def test_clip_coefficients_are_one_below_the_limit_and_a_quotient_above() -> None:
    norms = torch.tensor([0.0, 0.5, 1.0, 3.0, 7.0], dtype=torch.float64)
    assert clip_coefficients(norms, 1.0).tolist() == pytest.approx([1.0, 1.0, 1 / (1 + 1e-6), 1 / 3, 1 / 7], rel=1e-6)
    for limit in (1.0, 0.3, 0.0, math.inf):
        assert clip_coefficients(norms, limit).tolist() == [clip_coefficient(norm, limit) for norm in norms.tolist()]


NAN, INF = math.nan, math.inf

# Squares of two slots, and elements that are not finite.
SUMS = [
    ((9.0, 4.0), 0),
    ((0.0, 0.0), 0),
    ((NAN, 4.0), 0),
    ((9.0, INF), 0),
    ((9.0, 4.0), 3),
    ((NAN, 1.0), 1),
    ((-1.0, 1.0), 0),
]


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("limit", [INF, 2.0])
def test_host_and_device_reach_the_same_verdict(scale: float, limit: float) -> None:
    for squares, num_nonfinite in SUMS:
        numbers = torch.tensor([*squares, num_nonfinite, 5.0, 0.0, 0.0], dtype=torch.float64)
        terms = Terms(2, torch.tensor(scale, dtype=torch.float64), limit)
        host = Verdict(numbers, Objections(None, None, None, ()), terms, Host())
        device = Decided.of(numbers, None, terms)
        found = host.findings
        assert bool(device.overflow) == found.overflow
        assert bool(device.skip) == (found.overflow or found.is_refused)
        assert not device.has_error
        assert repr(tuple(device.norms.tolist())) == repr(found.norms)
        if not found.overflow:
            scales = [float(one) for one in device.scales(1.5, (True, False))]
            assert scales == list(host.scales(1.5, (True, False)))


def test_a_result_is_read_once_and_only_on_access() -> None:
    reads = []

    def read() -> tuple[bool, float, int | None]:
        reads.append(1)
        return True, 2.5, None

    result = StepResult.later(read)
    assert len(result) == 3
    assert not reads
    success, norm, zeros = result
    assert (success, norm, zeros) == (True, 2.5, None) == (result.success, result.grad_norm, result.num_zeros_in_grad)
    assert result == StepResult(True, 2.5, None) == (True, 2.5, None)
    assert result != (False, 2.5, None)
    assert pickle.loads(pickle.dumps(result)) == result
    assert repr(result) == "StepResult(success=True, grad_norm=2.5, num_zeros_in_grad=None)"
    assert len(reads) == 1
