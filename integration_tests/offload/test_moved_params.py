"""Parameters that other code moves away and back between steps, as for the rollouts of an RL loop, and `reset_state`.

FSDP2: `ranks/test_laid_out.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_accelerator import DeferredComm
from on_device import FLAT, STEPS, Trained, assert_bits_of_a_cpu, built, iterate, launched, outcome
from parity import Case, Numbers, Spread, Wrapping
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, ReplicaError, StorageError
from opt_distributed.comm import Alone, Comm
from opt_stack import Optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)

FP32 = replace(FLAT, numbers=Numbers.FP32, clips=False)
OVERLAP = replace(FP32, wrapping=Wrapping.OVERLAP)
LAYER_WISE = replace(FP32, rule="muon", spread=Spread.WHOLE)
CASES = [
    FP32,
    OVERLAP,
    LAYER_WISE,
    replace(FLAT, numbers=Numbers.BF16),
    replace(OVERLAP, numbers=Numbers.REMAINDER),
    replace(LAYER_WISE, numbers=Numbers.BF16, wrapping=Wrapping.OVERLAP),
]


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def move(model: nn.Module, way: str) -> None:
    """Move the parameters, and back."""
    if way == "module":
        model._apply(torch.clone)
    else:
        for param in list(model.parameters()):
            param.data = param.data.clone()


@pytest.mark.parametrize("way", ["module", "data"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_params_have_the_same_bits_after_a_move(case: Case, way: str) -> None:
    def train(comm: Comm, *, moves: bool) -> Trained:
        model, optimizer = built(case, comm)
        results = []
        for step in range(STEPS):
            results.append(iterate(model, optimizer, step, comm))
            if moves:
                move(model if step % 2 else inner(model), way)
            if moves and step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
        return outcome(model, optimizer, results)

    moved = run_threads(case.size, lambda comm: train(comm, moves=True))
    unmoved = run_threads(case.size, lambda comm: train(comm, moves=False))
    for found, want in zip(moved, unmoved, strict=True):
        assert all(map(torch.equal, found.weights, want.weights))
        assert found[1:] == want[1:]


def rollouts(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """Between steps, parameters and state are on the host, and none of their memory is left on the device."""
    results = []
    for step in range(STEPS):
        results.append(iterate(model, optimizer, step, comm, may_read=step > 0))  # it compares what was moved
        if not isinstance(comm, DeferredComm):
            continue
        params = list(model.parameters())
        for param in params:
            param.data = comm.device.to_host(param.data)
        with patch.object(comm.device, "release_", wraps=comm.device.release_) as release_:
            optimizer.offload_to_cpu()
        released = [call.args[0] for call in release_.call_args_list]
        assert sum(map(Tensor.numel, released)) >= sum(map(Tensor.numel, params))
        for param in params:
            param.data = comm.device.upload(param.data)
        optimizer.restore_from_cpu()
        memories = {memory.untyped_storage().data_ptr() for memory in released}
        assert {param.untyped_storage().data_ptr() for param in params} == memories
    return outcome(model, optimizer, results)


@pytest.mark.parametrize("case", [FP32, replace(OVERLAP, numbers=Numbers.BF16), LAYER_WISE], ids=str)
def test_memory_that_params_have_left_is_free_meanwhile(case: Case) -> None:
    assert_bits_of_a_cpu(case, rollouts, num_orders=4)


def scaled(params: list[nn.Parameter], factor: float) -> None:
    for param in params:
        param.data = param.data * factor


def after_a_write(case: Case, write: Callable[[Comm, list[nn.Parameter]], None]) -> list[Any]:
    """The weights of each rank after a step, a write by `write` and one more step, or the error."""

    def rank_main(comm: Comm) -> Any:
        model, optimizer = built(case, comm)
        iterate(model, optimizer, 0, comm)
        if isinstance(model, DistributedDataParallel):
            model.finish_param_sync()
        write(comm, list(model.parameters()))
        try:
            iterate(model, optimizer, 2, comm)
        except (ValueError, RuntimeError) as error:
            return error
        return [param.detach().clone() for param in model.parameters()]

    return run_threads(case.size, rank_main)


@torch.no_grad()
def scaled_in_place(comm: Comm, params: list[nn.Parameter]) -> None:
    for param in params:
        param.mul_(0.5)


def test_values_that_come_back_changed_count_as_a_write() -> None:
    found = after_a_write(FP32, lambda comm, params: scaled(params, 0.5))
    for got, want in zip(found, after_a_write(FP32, scaled_in_place), strict=True):
        assert all(map(torch.equal, got, want))
    errors = after_a_write(replace(FP32, numbers=Numbers.BF16), lambda comm, params: scaled(params, 0.5))
    assert all("call optimizer.reload_model_params() after a load" in str(error) for error in errors)
    errors = after_a_write(FP32, lambda comm, params: scaled(params, 0.5 + comm.rank))
    assert [type(error) for error in errors] == [ReplicaError] * 2


def converted(comm: Comm, params: list[nn.Parameter]) -> None:
    params[1].data = params[1].data.bfloat16()


def test_a_step_is_refused_until_params_are_as_they_were() -> None:
    for error in after_a_write(FP32, converted):
        assert type(error) is StorageError
        assert str(error).startswith("parameter 'first.weight' has left the memory that the optimizer updates: the mod")


def test_params_may_not_be_moved_while_they_are_gathered() -> None:
    """From a list, whose reads do not wait. They would have old values of the other ranks."""

    def rank_main(comm: Comm) -> str:
        model, optimizer = built(OVERLAP, comm)
        params = list(model.parameters())
        iterate(model, optimizer, 0, comm)
        for param in params:
            param.data = param.data.clone()
        with pytest.raises(StorageError) as caught:
            model.finish_param_sync()
        return str(caught.value)

    for message in run_threads(2, rank_main):
        assert "was moved while its new values were gathered, so that it has old ones; call finish_param" in message


# --- reset_state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["adam", "muon", "soap", "schedule_free"])
def test_after_a_reset_rules_begin_anew_from_the_weights(rule: str) -> None:
    case = replace(FP32, spread=Spread.REPLICATED if rule in ("muon", "soap") else Spread.FLAT, rule=rule)

    def rank_main(comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer = built(case, comm)
        for step in range(2):
            iterate(model, optimizer, step, comm, bad_steps=())
        optimizer.reset_state()
        fresh, other = built(case, comm)
        fresh.load_state_dict(model.state_dict())
        other.reload_model_params()
        for step in range(2, STEPS):
            iterate(model, optimizer, step, comm)
            iterate(fresh, other, step, comm)
        assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
        return [p.detach() for p in model.parameters()], [p.detach() for p in fresh.parameters()]

    for found, want in run_threads(2, rank_main):
        assert all(map(torch.equal, found, want))


def test_a_reset_keeps_main_values_wherever_they_are() -> None:
    def rank_main(comm: Comm) -> None:
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
        model, optimizer = built(replace(FLAT, numbers=Numbers.BF16), comm, **offload)
        iterate(model, optimizer, 0, comm)
        pieces = [piece for unit in optimizer.stepper.units for piece in unit.pieces]
        before = [piece.main.value().clone() for piece in pieces]
        optimizer.reset_state()
        assert all(torch.equal(piece.main.value(), value) for piece, value in zip(pieces, before, strict=True))
        assert not any(state.any() for piece in pieces for state in piece.state.values())
        assert iterate(model, optimizer, 2, comm).success

    run_threads(2, rank_main)


def test_a_reset_of_one_rank_only_is_noticed_by_the_next_step() -> None:
    def rank_main(comm: Comm) -> str:
        model, optimizer = built(replace(FP32, spread=Spread.REPLICATED), comm)
        iterate(model, optimizer, 0, comm)
        if comm.rank == 0:
            optimizer.reset_state()
        with pytest.raises(ReplicaError) as caught:
            iterate(model, optimizer, 2, comm)
        return str(caught.value)

    assert all("optimizer state: ranks hold different values" in message for message in run_threads(2, rank_main))


def test_a_reset_needs_the_state() -> None:
    _, optimizer = built(replace(FP32, size=1), Alone())
    optimizer.offload_to_cpu()
    with pytest.raises(RuntimeError, match=r"reset_state\(\) while the state is on the host"):
        optimizer.reset_state()
