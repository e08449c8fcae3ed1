"""`offload_to_cpu` and `restore_from_cpu`: where the state is, that it is complete afterwards, and what must wait."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import on_device
import pytest
import torch
from fake_accelerator import DeferredComm, DeferredRank, run_deferred
from on_device import FLAT, SHAPES, SIZE, STEPS, LaunchedRule, Trained, assert_bits_of_a_cpu, built, iterate, launched
from parity import Net, Numbers, grads_of, roles_over
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.comm import Alone, Comm
from opt_kernels.quantized import QuantizedTensor
from opt_kernels.works import Batch, Works
from opt_stack import Optimizer, get_optimizer
from opt_stack.state.live import StateOffload

pytestmark = pytest.mark.usefixtures(launched.__name__)

BF16 = replace(FLAT, numbers=Numbers.BF16)


class LaunchedOnMemory(LaunchedRule):
    """A kernel is launched on memory; moving its tensors later does not affect it."""

    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        columns = [
            {name: getattr(works, name) for name in ("grads", "mains", "states", "outs", "remainders")}
            for _, works in batches
        ]

        def kernel(*held: Any) -> None:
            launched = [Batch(hyper, Works(matrices=None, **of)) for (hyper, _), of in zip(batches, held, strict=True)]
            self._rule.update_(launched, grad_scale=grad_scale, skip=skip)

        on_device.queued("update", kernel, *columns)


def launch_on_memory(optimizer: Optimizer) -> None:
    on_device.launch_rules_(optimizer, LaunchedOnMemory)


def state_of(optimizer: Optimizer) -> list[Tensor]:
    pieces = [piece for unit in optimizer.stepper.units for piece in unit.pieces]
    return [tensor for piece in pieces for tensor in (*piece.state.values(), *piece.main.kept())]


def moving(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """The state goes to the host and comes back between every two steps, and nothing waits for that."""
    results = []
    for step in range(STEPS):
        results.append(iterate(model, optimizer, step, comm))
        if not isinstance(comm, DeferredComm):
            continue
        is_on_host = comm.device.memory.is_on_host
        with comm.device.host_reads_forbidden():
            optimizer.offload_to_cpu()
            assert all(map(is_on_host, state_of(optimizer)))
            torch.zeros(64).add_(1.0)  # others use the memory meanwhile
            optimizer.restore_from_cpu()
        assert not any(map(is_on_host, state_of(optimizer)))
    return on_device.outcome(model, optimizer, results)


@pytest.mark.parametrize("numbers", Numbers)
def test_training_goes_on_with_the_same_bits(numbers: Numbers) -> None:
    assert_bits_of_a_cpu(replace(FLAT, numbers=numbers), moving, num_orders=4, prepare=launch_on_memory)


def after_a_step(run: Callable[[DeferredRank, nn.Module, Optimizer], Any], size: int = 1, **fields: Any) -> Any:
    """What `run` returns, on rank 0, of a model that has made one step on a device."""

    def rank_main(one: DeferredRank) -> Any:
        model, optimizer = built(replace(BF16, size=size), one.comm, **fields)
        launch_on_memory(optimizer)
        iterate(model, optimizer, 0, one.comm)
        return run(one, model, optimizer)

    return run_deferred(size, rank_main, seed=0)[0]


def test_device_memory_is_given_back_and_no_parameter_moves() -> None:
    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        storages = [tensor.untyped_storage() for tensor in state_of(optimizer)]
        params = [param.data_ptr() for param in model.parameters()]
        optimizer.offload_to_cpu()
        one.device.synchronize()
        assert {torch._C._storage_Use_Count(storage._cdata) for storage in storages} == {1}  # that of `storages`
        assert [param.data_ptr() for param in model.parameters()] == params

    after_a_step(run)


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    """Of two dtypes, at odd places and up to an odd end, and transposed."""

    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        piece = next(p for unit in optimizer.stepper.units for p in unit.pieces if p.id.name.startswith("qkv"))
        tensors = [piece.state["exp_avg"], piece.state["exp_avg_sq"], piece.main.copy]
        memory = torch.arange(257).to(torch.uint8)
        flat = memory[:256].view(torch.float32)
        flat.copy_(torch.arange(64.0))
        views = [flat[3:51].view(4, 12).T, flat[1:49].view(12, 4), memory[209:].view(12, 4)]
        for tensor, view in zip(tensors, views, strict=True):
            tensor.data = view
        del memory, flat, views, view
        before = [tensor.clone() for tensor in tensors]
        for move in (optimizer.offload_to_cpu, optimizer.restore_from_cpu):
            move()
            one.device.synchronize()
            assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
            assert [tensor.stride() for tensor in tensors] == [(1, 12), (4, 1), (4, 1)]
        assert all(map(torch.equal, tensors, before))

    after_a_step(run)


def test_main_values_of_parameters_in_fp8_move_too() -> None:
    model = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    values = torch.linspace(-1, 1, 96 * 64).view(96, 64)
    model.weight = nn.Parameter(QuantizedTensor.of(values, "blockwise", dtype=torch.bfloat16, keep_initial=True))
    config = OptimizerConfig(lr=0.1, bf16=True, fp8_recipe="blockwise")
    optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(Alone()))

    def rank_main(one: DeferredRank) -> list[bool]:
        offload = StateOffload(optimizer.stepper)
        offload.offload_()
        found = [one.device.memory.is_on_host(tensor) for tensor in state_of(optimizer)]
        offload.restore_()
        return [*found, torch.equal(optimizer.get_parameters()[0], values)]

    assert run_deferred(1, rank_main, seed=0) == [[True] * 4]  # two moments, mains; the values after it


def test_calls_may_come_twice_and_in_any_order() -> None:
    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        before = [tensor.clone() for tensor in state_of(optimizer)]
        for goes in (False, True, True, False, False, True, False):
            optimizer.offload_to_cpu() if goes else optimizer.restore_from_cpu()
            assert all(map(one.device.memory.is_on_host, state_of(optimizer))) is goes
        assert all(map(torch.equal, state_of(optimizer), before))

    after_a_step(run)


def test_memory_that_runs_out_leaves_the_state_where_it_is() -> None:
    """The call may be made again."""

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise MemoryError

    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        before = [tensor.clone() for tensor in state_of(optimizer)]
        for where, name, move, goes in (
            (one.device, "host_empty", optimizer.offload_to_cpu, True),
            (torch, "empty", optimizer.restore_from_cpu, False),
        ):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(where, name, full)
                with pytest.raises(MemoryError):
                    move()
            assert [one.device.memory.is_on_host(tensor) for tensor in state_of(optimizer)] == [not goes] * len(before)
            move()
            assert [one.device.memory.is_on_host(tensor) for tensor in state_of(optimizer)] == [goes] * len(before)
        assert all(map(torch.equal, state_of(optimizer), before))

    after_a_step(run)


def test_what_is_on_the_host_already_stays_as_it_is() -> None:
    """Half of the state belongs to units of the host."""

    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        is_on_host = one.device.memory.is_on_host
        hosts = [tensor for tensor in state_of(optimizer) if is_on_host(tensor)]
        addresses = [tensor.data_ptr() for tensor in hosts]
        optimizer.offload_to_cpu()
        assert all(map(is_on_host, state_of(optimizer)))
        optimizer.restore_from_cpu()
        one.device.synchronize()
        assert [tensor.data_ptr() for tensor in hosts] == addresses
        assert 0 < len(hosts) == sum(map(is_on_host, state_of(optimizer)))

    after_a_step(run, SIZE, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)


REFUSED: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "prepare_grads": lambda model, optimizer: optimizer.prepare_grads(),
    "step_with_ready_grads": lambda model, optimizer: optimizer.step_with_ready_grads(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict({}),
    "sharded_state_dict": lambda model, optimizer: optimizer.sharded_state_dict({}),
    "reload_model_params": lambda model, optimizer: optimizer.reload_model_params(),
    "get_parameters": lambda model, optimizer: optimizer.get_parameters(),
    "eval": lambda model, optimizer: optimizer.eval(),
    "reading state": lambda model, optimizer: optimizer.state[next(model.parameters())],
    "writing state": lambda model, optimizer: optimizer.state.update({next(model.parameters()): {}}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_state_is_refused_until_it_is_back(name: str) -> None:
    """Also on a CPU, where offloading copies nothing."""
    net = Net(torch.bfloat16, SHAPES)
    optimizer = get_optimizer(BF16.config, [net], {}, pg_collection=roles_over(Alone()))
    net(grads_of(0, 0, 1, SHAPES)).backward()
    before = [param.detach().clone() for param in net.parameters()]
    optimizer.offload_to_cpu()
    with pytest.raises(RuntimeError, match=r"call optimizer.restore_from_cpu\(\) first"):
        REFUSED[name](net, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    optimizer.restore_from_cpu()
    assert optimizer.step().success


def test_a_captured_steps_state_stays_where_it_is() -> None:
    optimizer = get_optimizer(BF16.config, [Net(torch.bfloat16, SHAPES)], {}, pg_collection=roles_over(Alone()))
    optimizer.config.optimizer_cuda_graph = True
    with pytest.raises(ConfigError, match="optimizer_cuda_graph=True: a captured step holds the addresses"):
        optimizer.offload_to_cpu()
