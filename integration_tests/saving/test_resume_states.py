"""Each parameter's state and hyper-parameters between save and load, from `get_optimizer` to disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import roles_over
from torch import Tensor, nn

from opt_checkpoint import CheckpointKeyError, LoadReport, load, read_index, save, sharded_like, sharded_model
from opt_checkpoint.convert.megatron_buckets import BucketSlot, dp_reshardable_to_checkpoint
from opt_checkpoint.convert.torch_file import checkpoint_to_torch_file
from opt_config import OptimizerConfig, ParamKey
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_distributed.layout import ParamShape, flat_layout
from opt_paramgroups import ParamId
from opt_stack import Optimizer, get_optimizer

FLAT = {"use_distributed_optimizer": True}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}
KINDS = {
    "replicated fp32": ({}, torch.float32),
    "flat bf16 with mains": (FLAT | {"bf16": True}, torch.bfloat16),
    "flat bf16 with remainders, narrow moments": (FLAT | {"bf16": True} | NARROW, torch.bfloat16),
}
UNUSED, ZERO, FROZEN = "unused.weight", "zero.weight", "frozen.weight"


class Odd(nn.Module):
    """Tied embedding and head; a frozen matrix; one that the loss never reaches; one whose gradient is always zero."""

    def __init__(self, *, seed: int, backwards: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        parts = {
            "embedding": nn.Embedding(11, 16),
            "first": nn.Linear(16, 24),
            "second": nn.Linear(24, 16),
            "frozen": nn.Linear(16, 16, bias=False),
            "zero": nn.Linear(16, 8, bias=False),
            "unused": nn.Linear(16, 8, bias=False),
            "head": nn.Linear(16, 11, bias=False),
        }
        for name in reversed(parts) if backwards else parts:
            self.add_module(name, parts[name])
        self.head.weight = self.embedding.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes[:, :-1])
        x = x + self.frozen(self.second(torch.tanh(self.first(x)))) + (self.zero(x) * 0).sum()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), codes[:, 1:].flatten())


def begin(kind: str, *, seed: int = 0, model: Odd | None = None, overrides: Any = None, **changes: Any) -> Any:
    options, dtype = KINDS[kind]
    model = (Odd(seed=seed) if model is None else model).to(dtype)
    return model, get_optimizer(OptimizerConfig(**{"lr": 1e-2, **options, **changes}), [model], overrides)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def resume(model: nn.Module, optimizer: Optimizer, path: Path, load_options: Any = None, **options: Any) -> LoadReport:
    report = load(state_of(model, optimizer), path, **(load_options or {}))
    optimizer.load_state_dict(report.state["optimizer"], **options)
    return report


def states(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Copies, by parameter name; by one name of the tied one, which goes by the first of the model."""
    held = optimizer.state_dict()
    return {
        name.replace("head", "embedding"): {key: value.clone() for key, value in held["state"][index].items()}
        for group in held["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
    }


def assert_same(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> None:
    assert {name: set(state) for name, state in got.items()} == {name: set(state) for name, state in want.items()}
    for name, state in want.items():
        for key, value in state.items():
            assert torch.equal(got[name][key], value), f"{key} of {name}"


def group_of(optimizer: Optimizer, name: str) -> dict[str, Any]:
    return next(g for g in optimizer.param_groups if name in {id.name for id in g["param_ids"]})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Odd, Optimizer, Path]:
    """A plain run after three steps."""
    model, optimizer = begin("replicated fp32")
    train(model, optimizer, range(3))
    save(state_of(model, optimizer), tmp_path / "saved")
    return model, optimizer, tmp_path / "saved"


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


def test_a_tied_parameter_has_one_state_under_the_name_that_sorts_first(saved: Any) -> None:
    keys = {key.removeprefix("optimizer.state.exp_avg.") for key in read_index(saved[2]).tensors if "exp_avg." in key}
    assert "embedding.weight" in keys
    assert "head.weight" not in keys


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


def test_a_parameter_that_is_unfrozen_later_starts_from_zero_and_is_reported(saved: Any) -> None:
    _, optimizer, path = saved
    model = Odd(seed=1)
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


def test_a_parameter_that_is_frozen_later_leaves_its_state_behind(saved: Any) -> None:
    _, optimizer, path = saved
    model = Odd(seed=1)
    model.first.weight.requires_grad_(False)
    other, again = begin("replicated fp32", model=model)
    report = resume(other, again, path)
    assert {key for key in report.unexpected if key.endswith("first.weight")} == {
        f"optimizer.state.{s}.first.weight" for s in ("exp_avg", "exp_avg_sq", "step")
    }
    assert_same(states(again), {n: s for n, s in states(optimizer).items() if n != "first.weight"})


# --- groups -----------------------------------------------------------------------------------------------------------

TWO_RATES = {ParamKey(name="first.*"): {"max_lr": 3e-3}, ParamKey(name="second.*"): {"max_lr": 5e-3}}


def test_groups_and_parameters_in_another_order_keep_their_own(tmp_path: Path) -> None:
    """torch matches both by position, which would give each parameter another one's moments and learning rate."""
    model, optimizer = begin("replicated fp32", overrides=TWO_RATES)
    group_of(optimizer, "second.weight")["lr"] = 7e-3
    train(model, optimizer, range(3))
    save(state_of(model, optimizer), tmp_path / "x")
    backwards = dict(reversed(TWO_RATES.items()))
    other, again = begin("replicated fp32", model=Odd(seed=1, backwards=True), overrides=backwards, lr=0.5)
    names = [[str(id) for id in group["param_ids"]] for group in again.param_groups]
    assert names != [[str(id) for id in group["param_ids"]] for group in optimizer.param_groups]
    resume(other, again, tmp_path / "x")
    assert_same(states(again), states(optimizer))
    assert [group_of(again, n)["lr"] for n in ("first.weight", "second.weight", ZERO)] == [3e-3, 7e-3, 1e-2]
    assert train(other, again, range(3, 8)) == train(model, optimizer, range(3, 8))


def test_the_saved_rate_is_used_unless_another_is_requested(saved: Any) -> None:
    _, _, path = saved
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


# --- another rule, other numbers --------------------------------------------------------------------------------------

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
    assert "goes on from" not in caplog.text
    resume(*moved_to_muon(), path, {"strict": "return_unexpected"})  # starts from zero
    assert "goes on from" not in caplog.text
    resume(*begin("replicated fp32", seed=1, optimizer="lion"), path)
    assert "lion goes on from state that adam kept of" in caplog.text


def test_torchs_adamw_goes_on_from_what_ours_saved(saved: Any, tmp_path: Path) -> None:
    model, optimizer, path = saved
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


def test_the_loss_scale_and_its_counts_go_on_from_a_sharded_state(tmp_path: Path) -> None:
    """One overflow is left before a backoff, one clean step before the scale grows."""

    def scales(optimizer: Optimizer, net: nn.Module, gradients: str) -> list[float]:
        found = []
        for kind in gradients:
            net.weight.grad = torch.full_like(net.weight, torch.inf if kind == "x" else 1.0)
            optimizer.step()
            found.append(optimizer.get_loss_scale().item())
        return found

    def build() -> tuple[nn.Linear, Optimizer]:
        net = nn.Linear(4, 4, bias=False).half()
        config = OptimizerConfig(lr=1e-3, fp16=True, initial_loss_scale=64.0, loss_scale_window=3.0, hysteresis=2)
        return net, get_optimizer(config, [net])

    net, optimizer = build()
    assert scales(optimizer, net, "xx..") == [64, 32, 32, 32]
    save(optimizer.sharded_state_dict(sharded_model(net)), tmp_path / "saved")
    resumed_net, resumed = build()
    report = load(resumed.sharded_state_dict(sharded_model(resumed_net)), tmp_path / "saved")
    resumed.load_state_dict(report.state)
    assert resumed.get_loss_scale().item() == 32
    for gradients in (".", "x", "x"):
        assert scales(resumed, resumed_net, gradients) == scales(optimizer, net, gradients)
    assert resumed.get_loss_scale().item() == 32


def test_what_one_rank_refuses_all_ranks_refuse_and_none_has_set_anything(saved: Any) -> None:
    models = [Odd(seed=1) for _ in range(2)]  # not on the threads, which share torch's generator

    def rank_main(comm: ThreadComm) -> tuple[str, float]:
        model = models[comm.rank]
        optimizer = get_optimizer(OptimizerConfig(lr=0.5), [model], pg_collection=roles_over(comm))
        loaded = load(state_of(model, optimizer), saved[2]).state["optimizer"]
        if comm.rank == 1:
            del loaded["state"]["first.weight"]["exp_avg"]
        with pytest.raises(ValueError) as caught:
            optimizer.load_state_dict(loaded)
        return str(caught.value), group_of(optimizer, "first.weight")["lr"]

    for message, rate in run_threads(2, rank_main):
        assert "state of 'first.weight': step, exp_avg_sq was loaded and exp_avg was not" in message
        assert rate == 0.5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "bf16" in kind])
def test_a_16_bit_run_takes_its_main_values_from_saved_fp32_weights(saved: Any, kind: str) -> None:
    model, _, path = saved
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
    dp_reshardable_to_checkpoint(tmp_path / "theirs", slots, tmp_path / "ours", step=3)
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
