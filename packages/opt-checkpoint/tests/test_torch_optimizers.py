"""Optimizers as torch.distributed.checkpoint stores them, flattened or not: read here, and ours read there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import train, trained
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from opt_checkpoint import (
    CheckpointKeyError,
    CheckpointValueError,
    load,
    load_optimizer,
    save,
    sharded_model,
    sharded_optimizer,
    verify_checkpoint,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.dist_checkpointing import serialization

pytestmark = pytest.mark.filterwarnings("ignore")


def save_theirs(form: str, path: Path) -> list[float]:
    """Saves with stock DCP under a place in the state; the losses of the steps after it."""
    model, optimizer = trained()
    optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
    for param_state in optimizer.state.values():
        param_state["calls"] = 7
    options = StateDictOptions(flatten_optimizer_state_dict="flattened" in form)
    weights, states = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optim": states}
    if form.startswith("ours"):
        save(state, path)
    else:
        dcp_save(state, checkpoint_id=path)
    return train(model, optimizer, 2, 5)


@pytest.mark.parametrize("form", ["nested", "flattened", "ours", "ours, flattened"])
def test_the_losses_go_on_from_what_get_state_dict_gave(tmp_path: Path, form: str) -> None:
    losses = save_theirs(form, tmp_path / "x")
    again, other = trained(0)
    for group in other.param_groups:
        group["lr"] = 9.0
    load({"model": sharded_model(again)}, tmp_path / "x")
    report = load_optimizer(again, other, tmp_path / "x", at=("optim",))
    assert report.uninitialised == report.gone == report.groups.new == ()
    assert [(g["lr"], g["weight_decay"]) for g in other.param_groups] == [(0.05, 0.1), (0.5, 0.0)]
    assert {param_state["calls"] for param_state in other.state.values()} == {7}
    assert train(again, other, 2, 5) == losses


@pytest.mark.parametrize("flat", [False, True])
def test_stock_dcp_goes_on_from_a_checkpoint_of_ours(tmp_path: Path, flat: bool) -> None:
    model, optimizer = trained()
    state = {"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer), "step": 2}
    save(state, tmp_path / "ours")
    losses = train(model, optimizer, 2, 5)
    command = ["convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "dcp", "--name", "optim"]
    assert main(command) == 0
    assert verify_checkpoint(tmp_path / "theirs") == []
    again, other = trained(1)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(again, other, options=options)
    target = {"model": weights, "optim": states, "step": 0}
    dcp_load(target, checkpoint_id=tmp_path / "theirs")
    set_state_dict(again, other, model_state_dict=target["model"], optim_state_dict=target["optim"], options=options)
    assert target["step"] == 2
    assert train(again, other, 2, 5) == losses
    assert main(command) == 2  # it is there already


@pytest.mark.parametrize("options", [{}, {"content_metadata": {"a": 1}}], ids=["alone", "with metadata"])
def test_dist_checkpointing_refuses_an_optimizer_that_went_on(tmp_path: Path, options: dict[str, Any]) -> None:
    """Symptom: described once and saved after a step, it stored new moments with old numbers."""
    model, optimizer = trained()
    described = sharded_optimizer(model, optimizer)
    serialization.save(described, tmp_path / "at once", **options)
    train(model, optimizer, 2, 3)
    optimizer.param_groups[0]["lr"] = 0.25
    with pytest.raises(CheckpointValueError, match="have changed since sharded_optimizer described them"):
        serialization.save(described, tmp_path / "later", **options)


def test_one_of_two_models_optimizers_converts_to_a_torch_file(tmp_path: Path) -> None:
    model, optimizer = trained()
    parts = {"a": sharded_optimizer(*trained(1)), "b": sharded_optimizer(model, optimizer)}
    save(parts, tmp_path / "x")
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "b.pt"), "--to", "torch", "--at", "b"]) == 0
    states = torch.load(tmp_path / "b.pt", weights_only=True)["state"]
    assert torch.equal(states[0]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_the_message_says_where_the_optimizer_is(tmp_path: Path) -> None:
    save_theirs("nested", tmp_path / "x")
    again, other = trained(0)
    with pytest.raises(CheckpointKeyError, match=r"no optimizer at optimizer; .*There are states at \('optim',\)"):
        load_optimizer(again, other, tmp_path / "x")
    assert not other.state
    # A torch state dict goes by positions, which flattened groups do not keep.
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "x.pt"), "--to", "torch", "--at", "optim"]) == 2


@pytest.mark.parametrize("form", ["sharded_optimizer", "nested", "flattened", "ours", "by state"])
def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path, form: str) -> None:
    model, optimizer = trained()
    at = ("optimizer",)
    if form == "sharded_optimizer":
        save({"optimizer": sharded_optimizer(model, optimizer)}, tmp_path / "x")
    elif form == "by state":
        states = {f"optimizer.state.exp_avg.{name}": param for name, param in model.named_parameters()}
        dcp_save(states, checkpoint_id=tmp_path / "x")
    else:
        save_theirs(form, tmp_path / "x")
        at = ("optim",)
    other = nn.ModuleDict({"body": nn.Linear(3, 3)})
    unloaded = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointKeyError, match=r"holds nothing of this optimizer's parameters body\.weight"):
        load_optimizer(other, unloaded, tmp_path / "x", at=at)
    assert not unloaded.state


@pytest.mark.parametrize(
    "state", [[torch.ones(2), torch.ones(3)], {"a": torch.ones(2), "calls": 5}], ids=["list", "dict"]
)
def test_state_of_several_tensors_is_read_or_refused_never_lost(tmp_path: Path, state: Any) -> None:
    model, optimizer = trained()
    optimizer.state[model[0].weight]["several"] = state
    save({"optimizer": sharded_optimizer(model, optimizer)}, tmp_path / "x")
    again, other = trained(0)
    load_optimizer(again, other, tmp_path / "x")
    torch.testing.assert_close(other.state[again[0].weight]["several"], state, rtol=0, atol=0)
    for write in (lambda state, path: dcp_save(state, checkpoint_id=path), save):
        path = tmp_path / str(write is save)
        write({"optimizer": get_state_dict(model, optimizer)[1]}, path)
        with pytest.raises(CheckpointKeyError, match=r"states that are lists or dicts: 0\.weight\.several"):
            load_optimizer(model, optimizer, path)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_groups_with_several_tensors_are_never_lost(tmp_path: Path, ours: bool, flat: bool) -> None:
    model, optimizer = trained()
    for kind in (tuple, list):
        for group in optimizer.param_groups:
            group["betas"] = kind((torch.tensor(0.5), torch.tensor(0.75)))
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        path = tmp_path / kind.__name__
        state = {"optimizer": get_state_dict(model, optimizer, options=options)[1]}
        save(state, path) if ours else dcp_save(state, checkpoint_id=path)
        again, other = trained(0)
        if kind is list and not ours:
            with pytest.raises(CheckpointKeyError, match=r"groups with tensors in lists: .*betas\.0"):
                load_optimizer(again, other, path)
        else:
            load_optimizer(again, other, path)
            assert [list(group["betas"]) for group in other.param_groups] == [[0.5, 0.75]] * 2


def test_own_state_dicts_are_refused_but_not_params_named_state(tmp_path: Path) -> None:
    """The first has no names, and was loaded as an optimizer without a state."""
    model, optimizer = trained()
    save({"optimizer": optimizer.state_dict()}, tmp_path / "numbers")
    with pytest.raises(CheckpointKeyError, match="numbers in place of names"):
        load_optimizer(model, optimizer, tmp_path / "numbers")
    inner, trained_inner = trained()
    holder = nn.ModuleDict({"state": inner})
    weights, states = get_state_dict(holder, trained_inner)
    save({**weights, **states}, tmp_path / "root")
    _, other = fresh = trained(0)
    report = load_optimizer(nn.ModuleDict({"state": fresh[0]}), other, tmp_path / "root", at=())
    assert report.uninitialised == report.gone == ()
