"""States and names of other optimizers that are refused: on every rank, with the optimizer as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import RankPool
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from trained_networks import (
    STEPS,
    Holder,
    assert_same_state,
    grouped,
    mesh_of,
    network,
    save_optimizer,
    state_of,
    train,
    two_linears,
    wrap,
)

from opt_checkpoint import (
    CheckpointingException,
    CheckpointKeyError,
    CheckpointMismatchError,
    GroupMismatchError,
    load_optimizer,
    save,
    sharded_like,
    sharded_model,
    sharded_optimizer,
)


def refuse_runs(rank: int, size: int) -> str:
    weight = two_linears(mesh_of(size))[0].weight
    placements = [weight.placements[0], Replicate()]
    options = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    with pytest.raises(CheckpointingException) as caught:
        sharded_like("w", DTensor.from_local(torch.zeros(4, 5), weight.device_mesh, placements, **options))
    return str(caught.value)


def test_rows_in_several_runs_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(4, refuse_runs):
        assert "w of shape (8, 5) is placed as" in message
        assert "its local values (4, 5) may not be one block of it. Make every cut" in message


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    model = network()
    optimizer = grouped(model)
    train(model, optimizer, 0, STEPS)
    return model, optimizer


def test_when_loading_fails_the_optimizer_is_as_it_was(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    path = save_optimizer(model, optimizer, tmp_path / "x")
    before, groups = copy.deepcopy(state_of(model, optimizer)), copy.deepcopy(optimizer.param_groups[0]["lr"])
    train(model, optimizer, 0, 1)
    after = copy.deepcopy(state_of(model, optimizer))
    joined = torch.optim.AdamW(list(model.parameters()), lr=3.0)
    joined.state.update(optimizer.state)
    with pytest.raises(GroupMismatchError, match="'weight_decay'"):
        load_optimizer(model, joined, path)
    assert_same_state(state_of(model, joined), after)
    assert joined.param_groups[0]["lr"] == 3.0
    load_optimizer(model, joined, path, on_conflict="current", override={"lr": 0.5})
    assert_same_state(state_of(model, joined), before)
    assert joined.param_groups[0]["lr"] == 0.5
    assert groups == 0.05


def test_states_that_were_lost_are_named(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    state = sharded_optimizer(model, optimizer)
    del state["state"]["0.weight"]["exp_avg_sq"], state["state"]["0.bias"]["step"]
    save({"optimizer": state}, tmp_path / "x")
    with pytest.raises(CheckpointKeyError, match=r"saved with: (exp_avg_sq of 0.weight|, |step of 0.bias){3}$"):
        load_optimizer(model, optimizer, tmp_path / "x")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_parameter_of_another_shape_is_refused(ranks: RankPool, tmp_path: Path, trained: Any, sharded: bool) -> None:
    model, optimizer = trained
    path = save_optimizer(model, optimizer, tmp_path / "x")
    found = ranks.run(2, load_into_another_shape, str(path)) if sharded else [load_into_another_shape(0, 1, str(path))]
    for message, states in found:
        assert "0.weight has shape [4, 5], but its state was saved for shape [7, 5]" in message
        assert states == 0


def load_into_another_shape(rank: int, size: int, path: str) -> tuple[str, int]:
    model = wrap("fsdp2" if size > 1 else "alone", nn.Sequential(nn.Linear(5, 4)), size)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointMismatchError) as caught:
        load_optimizer(model, optimizer, path, on_conflict="saved")
    return str(caught.value), len(optimizer.state)


def test_state_of_another_class_of_optimizer_is_reported(
    tmp_path: Path, trained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained
    path = save_optimizer(model, optimizer, tmp_path / "x")
    load_optimizer(model, optimizer, path)
    assert "another optimizer" not in caplog.text
    load_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), path, on_conflict="saved")
    assert "was saved by a different optimizer than SGD: it has amsgrad, betas" in caplog.text
    assert "the states exp_avg, exp_avg_sq, step" in caplog.text


def test_what_one_rank_cannot_load_no_rank_loads(ranks: RankPool, tmp_path: Path, trained: Any) -> None:
    path = save_optimizer(*trained, tmp_path / "x")
    message, again = ranks.run(2, load_with_a_strange_model_on_rank_1, str(path))
    assert message == again
    assert "rank 1: CheckpointValueError: a parameter of shape (7, 5) of the optimizer is not in the model" in message


def load_with_a_strange_model_on_rank_1(rank: int, size: int, path: str) -> str:
    model = network()
    optimizer = grouped(model)
    with pytest.raises(CheckpointingException) as caught:
        load_optimizer(model if rank == 0 else network(), optimizer, path)
    assert not optimizer.state
    return str(caught.value)


def test_names_that_would_become_one_are_refused() -> None:
    model = Holder("_orig_mod", nn.Linear(2, 2, bias=False), weight=True)
    for describe in (sharded_model, lambda m: sharded_optimizer(m, torch.optim.SGD(m.parameters(), momentum=0.9))):
        with pytest.raises(CheckpointingException, match=r"weight.* would both be stored as weight; rename one"):
            describe(model)
