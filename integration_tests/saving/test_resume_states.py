"""Each parameter's state and hyper-parameters between save and load, from `get_optimizer` to disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from partly_trained import (
    FROZEN,
    KINDS,
    UNUSED,
    ZERO,
    PartlyTrained,
    assert_same,
    begin,
    group_of,
    resume,
    state_of,
    states,
    train,
)

from opt_checkpoint import CheckpointKeyError, load, load_optimizer, save
from opt_checkpoint.convert.torch_files import checkpoint_to_torch_file
from opt_config import ParamKey

# --- parameters that did not all train --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tied_frozen_unused_and_zero_gradient_parameters_go_on_as_they_were(tmp_path: Path, kind: str) -> None:
    model, optimizer = begin(kind)
    train(model, optimizer, range(3))
    save(state_of(model, optimizer), tmp_path / "x")
    other, again = begin(kind, seed=1)
    train(other, again, range(5, 7))
    resume(other, again, tmp_path / "x")
    want, got = states(optimizer), states(again)
    assert_same(got, want)
    assert {name: int(state["step"]) for name, state in got.items() if state["step"] != 3} == {UNUSED: 0}
    assert not got[ZERO]["exp_avg"].any()
    assert FROZEN not in got
    assert torch.equal(other.frozen.weight, model.frozen.weight)
    assert train(other, again, range(3, 8)) == train(model, optimizer, range(3, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_never_stepped_is_loaded_as_such(tmp_path: Path, kind: str) -> None:
    """State exists from construction. Megatron-Core makes it in the first step, so an earlier save loads nowhere."""
    model, optimizer = begin(kind)
    save(state_of(model, optimizer), tmp_path / "x")
    other, again = begin(kind, seed=1)
    train(other, again, range(2))
    resume(other, again, tmp_path / "x")
    assert_same(states(again), states(optimizer))
    assert all(not state["step"] and not state["exp_avg"].any() for state in states(again).values())
    assert train(other, again, range(4)) == train(model, optimizer, range(4))


def test_a_parameter_that_is_unfrozen_later_starts_from_zero_and_is_reported(plain_run: Any) -> None:
    _, optimizer, path = plain_run
    model = PartlyTrained(seed=1)
    model.frozen.weight.requires_grad_(True)
    other, again = begin("replicated fp32", model=model)
    train(other, again, range(2))
    with pytest.raises(CheckpointKeyError, match=r"3 requested key\(s\) are not in .*exp_avg\.frozen\.weight"):
        load(state_of(other, again), path)
    report = resume(other, again, path, {"strict": "return_unexpected"})
    assert sorted(report.missing) == [f"optimizer.state.{s}.{FROZEN}" for s in ("exp_avg", "exp_avg_sq", "step")]
    got = states(again)
    fresh = got.pop(FROZEN)
    assert not any(value.any() for value in fresh.values())
    assert_same(got, states(optimizer))


def test_a_parameter_that_is_frozen_later_leaves_its_state_behind(plain_run: Any) -> None:
    _, optimizer, path = plain_run
    model = PartlyTrained(seed=1)
    model.first.weight.requires_grad_(False)
    other, again = begin("replicated fp32", model=model)
    report = resume(other, again, path)
    assert {key for key in report.unexpected if key.endswith("first.weight")} == {
        f"optimizer.state.{s}.first.weight" for s in ("exp_avg", "exp_avg_sq", "step")
    }
    assert_same(states(again), {n: s for n, s in states(optimizer).items() if n != "first.weight"})


# --- groups -----------------------------------------------------------------------------------------------------------

TWO_RATES = {ParamKey(name="first.*"): {"max_lr": 3e-3}, ParamKey(name="second.*"): {"max_lr": 5e-3}}


def test_the_saved_rate_is_used_unless_another_is_requested(plain_run: Any) -> None:
    _, _, path = plain_run
    other, again = begin("replicated fp32", seed=1, lr=0.25)
    resume(other, again, path)
    assert {group["lr"] for group in again.param_groups} == {1e-2}
    resume(other, again, path, override={"lr": 0.125})
    assert {group["lr"] for group in again.param_groups} == {0.125}
    before = other.zero.weight.detach().clone()
    train(other, again, range(3, 4))
    # Zero gradients since the first step: only the decay of 0.01 moves it, at the rate asked for.
    torch.testing.assert_close(other.zero.weight.detach(), before * (1 - 0.125 * 0.01), rtol=1e-6, atol=0)


def test_groups_that_were_joined_say_what_they_disagree_on(tmp_path: Path) -> None:
    model, optimizer = begin("replicated fp32", overrides=TWO_RATES)
    train(model, optimizer, range(2))
    save(state_of(model, optimizer), tmp_path / "x")
    other, again = begin("replicated fp32", seed=1, lr=0.5)
    with pytest.raises(ValueError, match=r"field 'max_lr': parameter .* was saved with .* on_conflict='saved'"):
        resume(other, again, tmp_path / "x")
    resume(other, again, tmp_path / "x", on_conflict="current")
    assert group_of(again, "first.weight")["lr"] == 0.5
    assert_same(states(again), states(optimizer))


def test_what_is_for_a_sharded_state_is_refused_with_another() -> None:
    _, optimizer = begin("replicated fp32")
    with pytest.raises(ValueError, match=r"override=\{'lr': 1.0\}: both are for a sharded state only"):
        optimizer.load_state_dict(optimizer.state_dict(), override={"lr": 1.0})


def test_torchs_adamw_goes_on_from_what_ours_saved(plain_run: Any, tmp_path: Path) -> None:
    model, optimizer, path = plain_run
    checkpoint_to_torch_file(path, tmp_path / "x.pt")
    state_dict = torch.load(tmp_path / "x.pt", weights_only=True)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    groups = [{"params": [by_name[name] for name in group["param_names"]]} for group in state_dict["param_groups"]]
    theirs = torch.optim.AdamW(groups, lr=1.0)
    theirs.load_state_dict(state_dict)
    want = states(optimizer)
    for name, param in by_name.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            if name in want and moment in theirs.state.get(param, {}):
                assert torch.equal(theirs.state[param][moment], want[name][moment])
    assert sum("exp_avg" in state for state in theirs.state.values()) == len(want) > 4
    assert [g["lr"] for g in theirs.param_groups] == [g["lr"] for g in optimizer.param_groups if g["params"]]
    directly = torch.optim.AdamW([{"params": group["params"]} for group in groups], lr=1.0)
    load_optimizer(model, directly, path)
    for param, state in theirs.state.items():
        assert all(torch.equal(directly.state[param][name], value) for name, value in state.items())
    theirs.step()


def test_a_part_of_a_state_is_refused_before_anything_is_set(tmp_path: Path) -> None:
    """Muon's momentum mapped to Adam's first moment leaves the second one out: bias corrections would be wrong."""
    model, optimizer = begin("replicated fp32", optimizer="muon")
    train(model, optimizer, range(3))
    save(state_of(model, optimizer), tmp_path / "muon")
    other, again = begin("replicated fp32", seed=1, lr=0.5)
    part = {"optimizer.state.exp_avg.": "optimizer.state.momentum_buffer."}
    with pytest.raises(ValueError, match="step, exp_avg was loaded and exp_avg_sq was not"):
        resume(other, again, tmp_path / "muon", {"aliases": part, "strict": "return_unexpected"})
    assert group_of(again, "first.bias")["lr"] == 0.5
