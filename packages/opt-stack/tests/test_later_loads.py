"""A load or write on some replicas only, between steps: compared before the next update, and refused if they differ."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, weights
from test_loaded_replicas import LAYOUTS, Load, build, layouts, load_weights, step, trained_state, write_weights
from torch import nn

from opt_config import OptimizerConfig
from opt_distributed.buffers.replicas import ReplicaError
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_stack import Optimizer
from opt_stack.state.loaded_weights import LoadedReplicas

BF16 = OptimizerConfig(lr=1e-2, bf16=True)


def stepped(comm: ThreadComm, layout: str, *config: OptimizerConfig) -> tuple[nn.Module, Optimizer]:
    model, optimizer = build(comm, layout, *config)
    for seed in range(2):
        step(model, optimizer, seed)
    return model, optimizer


def settled(model: nn.Module) -> dict[str, Any]:
    if hasattr(model, "finish_param_sync"):
        model.finish_param_sync()
    return weights(model)


@layouts
@pytest.mark.parametrize("load", [load_weights, write_weights])
@pytest.mark.parametrize("halves", [False, True], ids=["step", "halves"])
def test_weights_that_only_one_rank_loaded_between_steps_are_refused(layout: str, load: Load, halves: bool) -> None:
    """Replicas went on with different weights; shards of ZeRO-1 became a mixture of old and new ones."""

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout)
        if comm.rank == 0:
            load(model, optimizer)
        before = settled(model)
        for _ in range(2):  # a retry is refused, too
            optimizer.zero_grad()
            backward(model, 2)
            with pytest.raises(ReplicaError, match=r"weights were loaded after .*: ranks hold different"):
                optimizer.prepare_grads() if halves else optimizer.step()
        assert_equal(settled(model), before)
        if comm.rank > 0:
            load(model, optimizer)
        step(model, optimizer, 2)

    run_threads(3, rank_main)


@pytest.mark.parametrize("layout", ["plain", "wrapped"])
@pytest.mark.parametrize("loaded", ["state", "step"])
def test_state_that_only_one_rank_loaded_between_steps_is_refused(layout: str, loaded: str) -> None:
    saved = trained_state()

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout)
        if comm.rank == 1:
            state = copy.deepcopy(saved if loaded == "state" else optimizer.state_dict())
            for of_param in state["state"].values():
                of_param["step"] += 1
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        backward(model, 2)
        with pytest.raises(ReplicaError, match="ranks hold different values of"):
            optimizer.step()

    run_threads(3, rank_main)


@torch.no_grad()
def swapped_and_back(model: nn.Module, optimizer: Optimizer) -> None:
    """An evaluation of other weights, such as an average, on one rank."""
    trained = copy.deepcopy(model.state_dict())
    for param in model.parameters():
        param.mul_(0.5)
    model.load_state_dict(trained)


def nothing(model: nn.Module, optimizer: Optimizer) -> None:
    return None


@layouts
@pytest.mark.parametrize("config", [OptimizerConfig(lr=1e-2), BF16], ids=["fp32", "bf16"])
def test_a_rank_that_restores_what_it_wrote_goes_on(layout: str, config: OptimizerConfig) -> None:
    def rank_main(comm: ThreadComm, disturb: Load) -> dict[str, Any]:
        model, optimizer = stepped(comm, layout, config)
        if comm.rank == 0:
            disturb(model, optimizer)
        step(model, optimizer, 2)
        step(model, optimizer, 3)
        return settled(model)

    found = [run_threads(2, partial(rank_main, disturb=disturb)) for disturb in (swapped_and_back, nothing)]
    assert_equal(found[0], found[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_are_compared_after_writes_of_some_ranks_only(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr(LoadedReplicas, "compare", lambda *given: compared.append(given))

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout)
        load_weights(model, optimizer)  # on all ranks
        step(model, optimizer, 2)
        assert not compared
        comm.gather_objects(None)
        if comm.rank == 0:
            swapped_and_back(model, optimizer)
        step(model, optimizer, 3)
        step(model, optimizer, 4)

    run_threads(2, rank_main)
    assert len(compared) == 2  # once on each rank
