"""A state that another rule, precision or program saved: converted, reported or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from partly_trained import (
    KINDS,
    UNUSED,
    ZERO,
    assert_same,
    begin,
    group_of,
    resume,
    state_of,
    states,
    train,
)

from opt_checkpoint import BucketSlot, CheckpointKeyError, load, save, sharded_like
from opt_checkpoint.convert.megatron import megatron_to_checkpoint
from opt_distributed.layout import ParamShape, flat_layout
from opt_paramgroups import ParamId

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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bf16" in kind])
def test_a_16_bit_run_takes_its_main_values_from_saved_fp32_weights(plain_run: Any, kind: str) -> None:
    model, _, path = plain_run
    other, again = begin(kind, seed=1)
    report = resume(other, again, path, {"dtype": "cast"})  # for the frozen parameter and narrow moments
    assert report.missing == ()
    for name, state in states(again).items():
        weight = model.get_parameter(name).detach()
        assert torch.equal(state["fp32_param"], weight)
        assert not torch.equal(weight, weight.bfloat16().float())
        assert torch.equal(other.get_parameter(name).detach(), weight.bfloat16())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bf16" in kind])
def test_an_fp32_run_takes_its_weights_from_saved_main_values(tmp_path: Path, kind: str) -> None:
    model, optimizer = begin(kind)
    train(model, optimizer, range(3))
    save(state_of(model, optimizer), tmp_path / "saved")
    other, again = begin("replicated fp32", seed=1)
    report = resume(other, again, tmp_path / "saved", {"dtype": "cast"})
    assert report.missing == ()
    for name, state in states(optimizer).items():
        assert torch.equal(other.get_parameter(name).detach(), state["fp32_param"])


# --- from Megatron-Core -----------------------------------------------------------------------------------------------


def test_buckets_of_megatron_core_continue_as_our_state(tmp_path: Path) -> None:
    """Its default directory holds whole buckets. The planner of flat shards knows where parameters are in them."""
    model, optimizer = begin("flat bf16 with mains")
    train(model, optimizer, range(3))
    want = states(optimizer)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    shapes = [ParamShape(id=ParamId(0, name), shape=tuple(param.shape)) for name, param in params.items()]
    layout = flat_layout(shapes, num_shards=2, bucket_size=1000, shard_multiple=1)
    slots, buckets = [], {}
    for number, bucket in enumerate(layout.buckets):
        key = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(bf16, fp32).bucket_idx_{number}"
        flat = {
            state: torch.zeros(bucket.slots[-1].stop - bucket.start) for state in ("param", "exp_avg", "exp_avg_sq")
        }
        for slot in bucket.slots:
            name, start = slot.id.name, slot.start - bucket.start
            slots.append(BucketSlot(name=name, shape=tuple(params[name].shape), start=start, bucket=number))
            for state, values in flat.items():
                held = want[name]["fp32_param" if state == "param" else state]
                values[start : start + slot.numel] = held.flatten()
        buckets.update({f"{key}.{state}": sharded_like(f"{key}.{state}", values) for state, values in flat.items()})
    assert len(layout.buckets) > 1
    save(buckets, tmp_path / "theirs")
    megatron_to_checkpoint(tmp_path / "theirs", tmp_path / "ours", slots=slots, step=3)
    other, again = begin("flat bf16 with mains", seed=1)
    train(other, again, range(2))
    other.load_state_dict(model.state_dict())
    loaded = load({"optimizer": state_of(other, again)["optimizer"]}, tmp_path / "ours", strict="return_unexpected")
    again.load_state_dict(loaded.state["optimizer"])
    del want[UNUSED]["step"]  # Megatron-Core counts steps once for all parameters
    got = states(again)
    del got[UNUSED]["step"]
    assert_same(got, want)
    assert train(other, again, range(3, 6)) == train(model, optimizer, range(3, 6))
