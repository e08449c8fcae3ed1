"""`Spikes` against numpy in float64, on drawn series of gradient norms and losses."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opt_distributed.step import Spikes

CPU = torch.device("cpu")


def entered(spikes: Spikes, norm: float, loss: float = math.nan) -> list[bool]:
    """Whether the norm and the loss are spikes; they enter."""
    values = torch.tensor([norm, loss], dtype=torch.float64)
    limits = spikes.judge_(values)
    spikes.append_judged_(unless=torch.tensor(False))
    return (values.isfinite() & (values > limits)).tolist()


def limit(spikes: Spikes) -> float:
    """The limit of norms; nothing enters."""
    nothing = torch.full((2,), math.nan, dtype=torch.float64)
    return float(spikes.judge_(nothing)[0])


def in_numpy(series: np.ndarray, sigma: float, window: int) -> list[bool]:
    kept: list[float] = []
    num_above = 0
    found = []
    for value in series:
        if not math.isfinite(value):
            found.append(False)
            continue
        least = max(2, window // 2)
        bound = math.inf
        if len(kept) >= least:
            mean = np.mean(kept)
            deviation = max(np.std(kept, ddof=1), 0.01 * abs(mean))
            bound = mean + sigma * deviation if deviation > 0 else math.inf
        cap = bound if num_above < least else math.inf
        found.append(bool(value > cap))
        num_above = num_above + 1 if value > bound else 0
        kept = [*kept, min(value, cap)][-window:]
    return found


def drawn(length: int, seed: int) -> np.ndarray:
    """Norms that drift, jump for good, spike, repeat, and are sometimes NaN or infinite."""
    generator = np.random.default_rng(seed)
    series = np.exp(np.cumsum(generator.normal(0, 0.02, length)) + generator.normal(0, 0.1, length))
    for at in generator.integers(0, length, 8):
        series[at:] *= np.exp(generator.normal(0, 2))
    series[length // 3 : length // 3 + 300] = 0.1
    spiked = generator.random(length) < 0.01
    series[spiked] *= np.exp(generator.exponential(3, spiked.sum()))
    series[generator.random(length) < 0.003] = math.nan
    series[generator.random(length) < 0.003] = math.inf
    return series


@pytest.mark.parametrize(("sigma", "window"), [(6.0, 128), (3.0, 32), (1.5, 9), (0.5, 2)])
def test_decisions_are_those_of_numpy_on_long_series(sigma: float, window: int) -> None:
    norms = drawn(5000, seed=1)
    losses = 2 - drawn(5000, seed=2)  # also negative
    spikes = Spikes(sigma, window, CPU)
    found = [entered(spikes, norm, loss) for norm, loss in zip(norms, losses, strict=True)]
    assert [norm for norm, _ in found] == in_numpy(norms, sigma, window)
    assert [loss for _, loss in found] == in_numpy(losses, sigma, window)
    assert any(norm for norm, _ in found)


RISES = {"0.1 %": 1.001, "twice": 2.0, "1e3": 1e3, "1e30": 1e30}


@pytest.mark.parametrize("base", [lambda at: 1.0, lambda at: 1 + 0.1 * math.sin(at), lambda at: 0.0, lambda at: 1e-30])
@pytest.mark.parametrize("sigma", [0.5, 2.0, 6.0, 1e3])
def test_a_lasting_rise_is_followed_within_the_window(base: Callable[[int], float], sigma: float) -> None:
    for rise in RISES.values():
        spikes = Spikes(sigma, 32, CPU)
        for at in range(64):
            entered(spikes, base(at))
        level = rise * max(base(0), 1.0)
        refused = [entered(spikes, level)[0] for _ in range(200)]
        assert not any(refused[32:]), (rise, refused)
        assert base(0) or not refused[0]  # zeros have no spread to compare with


def test_a_single_spike_is_refused_and_leaves_the_limit_low() -> None:
    spikes = Spikes(6.0, 128, CPU)
    for at in range(128):
        entered(spikes, 1 + 0.1 * math.sin(at))
    before = limit(spikes)
    assert entered(spikes, 1e6) == [True, False]
    assert before < limit(spikes) < 1.2 * before
    assert entered(spikes, 100.0) == [True, False]


def test_nothing_enters_a_step_that_a_guard_refuses() -> None:
    spikes = Spikes(6.0, 8, CPU)
    for _ in range(8):
        entered(spikes, 1.0)
    state = spikes.state_dict()
    values = torch.tensor([5.0, 5.0], dtype=torch.float64)
    spikes.judge_(values)
    assert spikes.state_dict() == state  # it is not taken yet
    spikes.append_judged_(unless=torch.tensor(True))
    assert spikes.state_dict() == state


def test_a_saved_window_continues_in_others_of_any_length() -> None:
    norms = drawn(400, seed=3)
    first = Spikes(3.0, 32, CPU)
    for norm in norms[:300]:
        entered(first, norm)
    state = first.state_dict()
    assert len(state["grad_norms"]["values"]) == 32
    assert state["losses"] == {"values": [], "num_above": 0}
    same = Spikes(3.0, 32, CPU)
    entered(same, 1e9, 1e9)  # what was there is replaced
    same.load_state_dict(state)
    assert [entered(same, norm) for norm in norms[300:]] == [entered(first, norm) for norm in norms[300:]]
    for window in (16, 64):
        other = Spikes(3.0, window, CPU)
        other.load_state_dict(state)
        assert other.state_dict()["grad_norms"]["values"] == state["grad_norms"]["values"][-window:]


MALFORMED = [
    {"values": [1.0, math.nan]},
    {"values": 3},
    [3.0],
    {"values": [1.0], "num_above": "x"},
    {"values": [10**400]},
    {"num_above": math.inf},
    {"num_above": -1},
]


@pytest.mark.parametrize("saved", MALFORMED)
def test_a_malformed_state_is_refused_and_changes_nothing(saved: object) -> None:
    spikes = Spikes(6.0, 8, CPU)
    entered(spikes, 1.0, 2.0)
    before = spikes.state_dict()
    with pytest.raises(ValueError, match="losses="):
        spikes.load_state_dict({"grad_norms": {"values": [3.0]}, "losses": saved})
    assert spikes.state_dict() == before


@pytest.mark.parametrize("saved", [[1.0], 3, "losses"])
def test_a_state_that_is_not_a_mapping_is_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match="spikes="):
        Spikes(6.0, 8, CPU).load_state_dict(saved)
