"""A load or write on some ranks only is refused in the next step, the first or a later one: replicas would differ."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, train, weights
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import DistributedDataParallel, Optimizer, ReplicaError, get_optimizer

FP32 = OptimizerConfig(lr=1e-2)
FP16 = OptimizerConfig(lr=1e-2, fp16=True, initial_loss_scale=2.0**8)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # optimizer, wrapper
    "plain": ({}, None),
    "ZeRO-1": ({"use_distributed_optimizer": True}, None),
    "layer-wise": ({"use_layer_wise_distributed_optimizer": True}, None),
    "wrapped": ({}, {}),
    "wrapped ZeRO-1": ({"use_distributed_optimizer": True}, {"use_distributed_optimizer": True}),
    "overlapping": (
        {"use_distributed_optimizer": True, "overlap_param_gather": True},
        {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True},
    ),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
Load = Callable[[nn.Module, Optimizer], object]


def build(comm: ThreadComm, layout: str, config: OptimizerConfig = FP32) -> tuple[nn.Module, Optimizer]:
    of_optimizer, of_wrapper = LAYOUTS[layout]
    axes = Axes(dp=comm, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=comm)
    model = make_model(config.precision.params)
    if of_wrapper is not None:
        model = DistributedDataParallel(DistributedDataParallelConfig(**of_wrapper), model, groups=roles)
    return model, get_optimizer(replace(config, **of_optimizer), [model], {}, pg_collection=roles)


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    backward(model, seed, scale=optimizer.scale_loss)
    optimizer.step()


def load_weights(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    optimizer.reload_model_params()


@torch.no_grad()
def write_weights(model: nn.Module, optimizer: Optimizer) -> None:
    next(model.parameters()).mul_(2)


def trained_state() -> dict[str, Any]:
    model = make_model()
    optimizer = get_optimizer(FP32, [model], {})
    train(model, optimizer, range(3))
    return optimizer.state_dict()


def stepped(comm: ThreadComm, layout: str, num_steps: int, *config: OptimizerConfig) -> tuple[nn.Module, Optimizer]:
    model, optimizer = build(comm, layout, *config)
    for seed in range(num_steps):
        step(model, optimizer, seed)
    return model, optimizer


def settled(model: nn.Module) -> dict[str, Any]:
    if hasattr(model, "finish_param_sync"):
        model.finish_param_sync()
    return weights(model)


@layouts
@pytest.mark.parametrize("load", [load_weights, write_weights])
@pytest.mark.parametrize(("num_steps", "halves"), [(0, False), (2, False), (2, True)], ids=["first", "later", "halves"])
def test_weights_that_only_one_rank_loaded_are_refused(layout: str, load: Load, num_steps: int, halves: bool) -> None:
    """Replicas went on with different weights; shards of ZeRO-1 became a mixture of old and new ones."""

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout, num_steps)
        if comm.rank == 0:
            load(model, optimizer)
        before = settled(model)
        for _ in range(2 if num_steps else 1):  # a retry of a later step is refused, too
            optimizer.zero_grad()
            backward(model, 2)
            with pytest.raises(ReplicaError, match=r"weights were loaded after .*: ranks hold different"):
                optimizer.prepare_grads() if halves else optimizer.step()
        assert_equal(settled(model), before)
        if comm.rank > 0 and num_steps:
            load(model, optimizer)
            step(model, optimizer, 2)
        elif num_steps:
            step(model, optimizer, 2)

    run_threads(3, rank_main)


@pytest.mark.parametrize("layout", ["plain", "wrapped"])
@pytest.mark.parametrize("loaded", ["state", "step"])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_state_that_only_one_rank_loaded_is_refused(layout: str, loaded: str, num_steps: int) -> None:
    saved = trained_state()

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout, num_steps)
        if comm.rank == 1:
            state = copy.deepcopy(saved if loaded == "state" else optimizer.state_dict())
            for of_param in state["state"].values():
                of_param["step"] += 1
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        backward(model, 2)
        with pytest.raises(ReplicaError, match=r"ranks hold different values of"):
            optimizer.prepare_grads()

    run_threads(3, rank_main)


def test_different_loss_scales_are_refused() -> None:
    """Each rank divided the sum of all gradients by its own scale."""

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = build(comm, "plain", FP16)
        state = copy.deepcopy(optimizer.state_dict())
        state["grad_scaler"]["scale"] *= 1 + comm.rank
        optimizer.load_state_dict(state)
        backward(model, 0, scale=optimizer.scale_loss)
        with pytest.raises(ValueError, match="ranks have different loss scales"):
            optimizer.step()

    run_threads(2, rank_main)


@layouts
@pytest.mark.parametrize("config", [FP32, replace(FP32, bf16=True), FP16], ids=["fp32", "bf16", "fp16"])
def test_ranks_that_load_alike_go_on(layout: str, config: OptimizerConfig) -> None:
    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        model, optimizer = build(comm, layout, config)
        for seed in range(3):
            step(model, optimizer, seed)
        resumed = build(comm, layout, config)
        resumed[0].load_state_dict(model.state_dict())
        resumed[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for seed in range(3, 5):
            step(model, optimizer, seed)
            step(*resumed, seed)
        assert_equal(weights(resumed[0]), weights(model))
        return weights(model)

    found = run_threads(2, rank_main)
    assert_equal(found[0], found[1])


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
@pytest.mark.parametrize("config", [FP32, replace(FP32, bf16=True)], ids=["fp32", "bf16"])
def test_a_rank_that_restores_what_it_wrote_goes_on(layout: str, config: OptimizerConfig) -> None:
    def rank_main(comm: ThreadComm, disturb: Load) -> dict[str, Any]:
        model, optimizer = stepped(comm, layout, 2, config)
        if comm.rank == 0:
            disturb(model, optimizer)
        step(model, optimizer, 2)
        step(model, optimizer, 3)
        return settled(model)

    found = [run_threads(2, partial(rank_main, disturb=disturb)) for disturb in (swapped_and_back, nothing)]
    assert_equal(found[0], found[1])


@layouts
def test_replicas_are_compared_after_writes_of_some_ranks_only(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr(Optimizer, "compare_replicas", lambda optimizer: compared.append(optimizer.is_stub_optimizer))

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout, 2)
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
