"""Loads on some ranks only are refused in the next step, since replicas would differ; loads on all ranks reach all."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, over, weights
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_distributed.step import Written
from opt_stack import DistributedDataParallel, Optimizer, ReplicaError, get_optimizer
from opt_stack.state.live import SharedCopies

FP32 = OptimizerConfig(lr=1e-2)
FP16 = OptimizerConfig(lr=1e-2, fp16=True, initial_loss_scale=2.0**8)
ZERO1 = {"use_distributed_optimizer": True}
GATHERS = {**ZERO1, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # optimizer, wrapper
    "plain": ({}, None),
    "ZeRO-1": (ZERO1, None),
    "layer-wise": ({"use_layer_wise_distributed_optimizer": True}, None),
    "wrapped": ({}, {}),
    "wrapped ZeRO-1": (ZERO1, ZERO1),
    "overlapping": (GATHERS, {**GATHERS, "overlap_grad_reduce": True, "bucket_size": 20}),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
Load = Callable[[nn.Module, Optimizer], object]


def build(comm: ThreadComm, layout: str, config: OptimizerConfig = FP32) -> tuple[nn.Module, Optimizer]:
    of_optimizer, of_wrapper = LAYOUTS[layout]
    model = make_model(config.precision.params)
    if of_wrapper is not None:
        model = DistributedDataParallel(DistributedDataParallelConfig(**of_wrapper), model, groups=over(comm))
    return model, get_optimizer(replace(config, **of_optimizer), [model], {}, pg_collection=over(comm))


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


def load_state(model: nn.Module, optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for of_param in state["state"].values():
        of_param["step"] += 1
    optimizer.load_state_dict(state)


LOADS: list[tuple[str, Load]] = [(layout, load) for layout in LAYOUTS for load in (load_weights, write_weights)]
LOADS += [("plain", load_state), ("wrapped", load_state)]


def stepped(comm: ThreadComm, layout: str, num_steps: int, *config: OptimizerConfig) -> tuple[nn.Module, Optimizer]:
    model, optimizer = build(comm, layout, *config)
    for seed in range(num_steps):
        step(model, optimizer, seed)
    return model, optimizer


def settled(model: nn.Module) -> dict[str, Any]:
    if hasattr(model, "finish_param_sync"):
        model.finish_param_sync()
    return weights(model)


@pytest.mark.parametrize(("layout", "load"), LOADS)
@pytest.mark.parametrize(("num_steps", "halves"), [(0, False), (2, False), (2, True)], ids=["first", "later", "halves"])
def test_what_only_one_rank_loaded_is_refused(layout: str, load: Load, num_steps: int, halves: bool) -> None:
    """Replicas went on with different weights; shards of ZeRO-1 became a mixture of old and new ones."""

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout, num_steps)
        if comm.rank == 0:
            load(model, optimizer)
        before = settled(model)
        for _ in range(2 if num_steps else 1):  # a retry of a later step is refused, too
            optimizer.zero_grad()
            backward(model, 2)
            with pytest.raises(ReplicaError, match=r"ranks hold different values of"):
                optimizer.prepare_grads() if halves else optimizer.step()
        assert_equal(settled(model), before)
        if num_steps:
            if comm.rank > 0:
                load(model, optimizer)
            step(model, optimizer, 2)

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
@pytest.mark.parametrize("config", [FP32, replace(FP32, bf16=True)], ids=["fp32", "bf16"])
def test_ranks_that_restore_what_they_wrote_go_on(
    layout: str, config: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an evaluation of other weights, such as an average, on one rank or on both."""
    compare = SharedCopies.compare
    compared = list[SharedCopies]()

    def counted(copies: SharedCopies, written: Written) -> None:
        compared.append(copies)
        compare(copies, written)

    monkeypatch.setattr(SharedCopies, "compare", counted)

    def rank_main(comm: ThreadComm, *, writers: int) -> dict[str, Any]:
        model, optimizer = stepped(comm, layout, 2, config)
        if comm.rank < writers:
            trained = copy.deepcopy(model.state_dict())
            model.load_state_dict({name: value * 0.5 for name, value in trained.items()})
            model.load_state_dict(trained)
        step(model, optimizer, 2)
        step(model, optimizer, 3)
        return settled(model)

    expected = run_threads(2, partial(rank_main, writers=0))
    assert not compared
    for writers in (2, 1):
        compared.clear()
        assert_equal(run_threads(2, partial(rank_main, writers=writers)), expected)
        assert len(compared) == 2  # once on each rank


def write_own_values(comm: ThreadComm, model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(comm.rank)


def write_on_tp_rank_0(comm: ThreadComm, model: nn.Module) -> None:
    if comm.rank in (0, 2):
        write_own_values(comm, model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_different_writes_on_all_ranks_are_refused(layout: str) -> None:
    """Nothing was compared: replicas drifted apart, and shards of ZeRO-1 became a mixture."""

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, layout, 2)
        write_own_values(comm, model)
        before = settled(model)
        optimizer.zero_grad()
        backward(model, 2)
        with pytest.raises(ReplicaError, match=r"ranks hold different values of '0.weight'"):
            optimizer.step()
        assert_equal(settled(model), before)

    run_threads(2, rank_main)


@pytest.mark.parametrize("replicas", [1, 2])
def test_writes_on_some_tensor_parallel_ranks_are_refused(replicas: int) -> None:
    """Only data-parallel replicas were compared, so that the copies stayed apart."""
    worlds = [[World(2).comms() for _ in range(count)] for count in (replicas, 2)]  # over tp, over dp

    def rank_main(comm: ThreadComm) -> None:
        replica, part = divmod(comm.rank, 2)
        dp = worlds[1][part][replica] if replicas > 1 else Alone()
        axes = Axes(dp=dp, tp=worlds[0][replica][part])
        model = make_model()
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        optimizer = get_optimizer(FP32, [model], {}, pg_collection=roles)
        for seed in range(2):
            step(model, optimizer, seed)
        write_on_tp_rank_0(comm, model)
        backward(model, 2)
        with pytest.raises(ReplicaError, match=r"(?s)weights were loaded|ranks hold different values"):
            optimizer.step()

    run_threads(2 * replicas, rank_main)


def test_only_what_was_written_is_compared() -> None:
    """Clipping of one weight after each step costs a checksum of that weight; an evaluation costs none."""

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = stepped(comm, "plain", 1, replace(FP32, optimizer="schedule_free"))
        compared: list[list[str]] = []
        compare = optimizer._copies._compare_weights

        def counted(ids: Any) -> None:
            compared.append([id.name for id in ids])
            compare(ids)

        optimizer._copies._compare_weights = counted
        for seed in range(2):
            with torch.no_grad():
                model[2].bias.clamp_(-0.1, 0.1)  # type: ignore[index, union-attr, operator]
            step(model, optimizer, seed)
        assert compared == [["2.bias"]] * 2
        optimizer.eval()
        optimizer.train()
        step(model, optimizer, 3)
        assert len(compared) == 2

    run_threads(2, rank_main)


# --- loads on every rank ----------------------------------------------------------------------------------------------

SHARDED = ("ZeRO-1", "wrapped ZeRO-1", "overlapping")


UNFIT: dict[Any, str] = {
    ...: "state_dict lacks '0.weight' of model chunk 0",
    None: "state_dict's '0.weight' of model chunk 0 is a NoneType; it must be a tensor of shape (7, 5)",
    (3,): "state_dict's '0.weight' of model chunk 0 has shape (3,); the parameter's is (7, 5)",
    (5, 7): "state_dict's '0.weight' of model chunk 0 has shape (5, 7); the parameter's is (7, 5)",
}


@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.parametrize("config", [FP32, replace(FP32, bf16=True)], ids=["fp32", "bf16"])
def test_parameters_come_from_the_state_dict_of_the_main_values(layout: str, config: OptimizerConfig) -> None:
    """Each rank had the new values in its own shard and the old ones in all others. Of a state dict that did not fit, a
    rank that did not own the parameter took the rest; a transposed matrix was taken by all."""
    given: dict[str, Any] = {name: torch.full(p.shape, 1 / 3) for name, p in make_model().named_parameters()}

    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = build(comm, layout, config)

        def mains() -> list[Tensor]:
            return [main.detach().clone() for main in optimizer.get_parameters()]

        before = mains()
        for shape, message in UNFIT.items():
            value = torch.ones(shape) if isinstance(shape, tuple) else shape
            unfit = {n: v for n, v in {**given, "0.weight": value}.items() if v is not ...}
            with pytest.raises(ValueError, match=re.escape(message)):
                optimizer.reload_model_params(unfit)
            assert_equal(mains(), before)
        optimizer.reload_model_params({name: value.double() for name, value in given.items()})
        assert_equal(mains(), [torch.full_like(main, 1 / 3) for main in before])
        assert_equal([*weights(model).values()], [value.to(config.precision.params) for value in given.values()])

    run_threads(3, rank_main)


@pytest.mark.parametrize("layout", SHARDED)
def test_a_16_bit_state_loads_on_all_ranks_or_none(layout: str) -> None:
    def rank_main(comm: ThreadComm) -> None:
        trained, optimizer = stepped(comm, layout, 3, replace(FP32, bf16=True))
        model, other = build(comm, layout, replace(FP32, bf16=True))
        drawn = weights(model)
        state = copy.deepcopy(optimizer.state_dict())
        spoilt = copy.deepcopy(state)
        if comm.rank == 1:
            spoilt["param_groups"][0]["lr"] = "fast"
        with pytest.raises(ValueError, match="lr='fast' of the saved group"):
            other.load_state_dict(spoilt)
        assert_equal(weights(model), drawn)
        other.load_state_dict(state)
        assert_equal(weights(model), settled(trained))

    run_threads(3, rank_main)
