"""A state that another rule, precision or program saved: converted, reported or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from partly_trained import UNUSED, ZERO, assert_same, begin, group_of, resume, state_of, states, train

from opt_checkpoint import CheckpointKeyError, save

MOVED = ("first.weight", "second.weight", ZERO, UNUSED)
TO_MOMENTUM = {"optimizer.state.momentum_buffer.": "optimizer.state.exp_avg."}


def moved_to_muon() -> Any:
    other, again = begin("replicated fp32", seed=1, optimizer="muon", lr=0.05)
    train(other, again, range(2))
    assert {n for n, state in states(again).items() if "momentum_buffer" in state} == set(MOVED)
    return other, again


@pytest.fixture
def saved_by_adam(tmp_path: Path) -> Any:
    model, optimizer = begin("replicated fp32")
    train(model, optimizer, range(3))
    save(state_of(model, optimizer), tmp_path / "adam")
    return optimizer, tmp_path / "adam"


def test_a_parameter_that_another_rule_moves_now_is_refused_with_what_there_is(saved_by_adam: Any) -> None:
    with pytest.raises(CheckpointKeyError, match=r"saved by another rule, with exp_avg, exp_avg_sq, step; reset"):
        resume(*moved_to_muon(), saved_by_adam[1])


@pytest.mark.parametrize("mapped", [False, True], ids=["reset", "mapped"])
def test_state_starts_from_zero_or_from_aliases_and_the_rate_is_kept(saved_by_adam: Any, mapped: bool) -> None:
    optimizer, path = saved_by_adam
    other, again = moved_to_muon()
    resume(other, again, path, {"aliases": TO_MOMENTUM} if mapped else {"strict": "return_unexpected"})
    want, got = states(optimizer), states(again)
    for name in MOVED:
        assert int(got[name]["step"]) == (int(want[name]["step"]) if mapped else 0)
        momentum = want[name]["exp_avg"] if mapped else torch.zeros_like(want[name]["exp_avg"])
        assert torch.equal(got[name]["momentum_buffer"], momentum)
    assert_same({"b": got["first.bias"]}, {"b": want["first.bias"]})
    assert group_of(again, "first.weight")["lr"] == 0.05
    assert "betas" not in group_of(again, "first.weight")
    assert group_of(again, "first.bias")["lr"] == 1e-2
    train(other, again, range(3, 5))


def test_state_of_the_same_name_from_another_rule_is_reported(
    saved_by_adam: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = saved_by_adam
    resume(*begin("replicated fp32", seed=1), path)
    assert "continues from the state" not in caplog.text
    resume(*moved_to_muon(), path, {"strict": "return_unexpected"})  # starts from zero
    assert "continues from the state" not in caplog.text
    resume(*begin("replicated fp32", seed=1, optimizer="lion"), path)
    assert "lion continues from the state that adam kept for" in caplog.text
