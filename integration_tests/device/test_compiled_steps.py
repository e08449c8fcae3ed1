"""`torch.compile`: the graph breaks at a step, which sees every new value."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from parity import roles_over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm.threads import ThreadComm
from opt_stack import get_optimizer


def made(build: Callable[[nn.Module], Any], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    return model, build(model)


MODES = {
    "clipped": {"clip_grad": 0.01, "log_num_zeros_in_grad": True},
    "24-bit mains": {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.int8},
    "fp16": {"fp16": True, "loss_scale": 8.0},
    "muon": {"optimizer": "muon"},
}
WITH_COPIES = ("fp16",)  # of weights, as main values: a step refuses to undo other changes of weights


def of_mode(mode: str) -> tuple[nn.Module, Any]:
    config = OptimizerConfig(lr=0.1, weight_decay=0.01, **MODES[mode])
    dtype = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32
    return made(lambda model: get_optimizer(config, [model], {}), dtype)


def steps_of(
    model: nn.Module, optimizer: Any, *, backend: Any = None, changes_weights: bool = True
) -> tuple[list[Tensor], list[Any]]:
    """Weights and results of four steps, the third of which has no gradient of the bias. The
    function changes weights and gradients, and reads weights after the step."""

    def run(x: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad():
            if changes_weights:
                model.weight.mul_(0.5)
            model.weight.grad.mul_(2.0)
        result = optimizer.step()
        return model.weight.detach() * x, result

    step = run if backend is None else torch.compile(run, backend=backend)
    found, results = [], []
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        for param in model.parameters():
            param.grad = torch.arange(param.numel(), dtype=param.dtype).view_as(param) * 0.25
        if number == 2:
            model.bias.grad = None
        product, result = step(torch.full((), float(number), dtype=model.weight.dtype))
        found.append(product)
        results.append(result)
    return [*found, *(param.detach().clone() for param in model.parameters())], list(map(tuple, results))


@pytest.mark.parametrize("mode", MODES)
def test_the_stacks_compiled_step_has_the_weights_and_results_of_the_step(mode: str) -> None:
    torch._dynamo.reset()
    changes_weights = mode not in WITH_COPIES
    weights, results = steps_of(*of_mode(mode), backend="aot_eager", changes_weights=changes_weights)
    expected, expected_results = steps_of(*of_mode(mode), changes_weights=changes_weights)
    assert all(map(torch.equal, weights, expected))
    assert results == expected_results


def test_errors_of_a_compiled_step_are_those_of_the_step() -> None:
    """Gradients stayed disabled in the whole process after such an error."""
    torch._dynamo.reset()
    model, optimizer = made(lambda model: get_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.01), [model]))
    compiled = torch.compile(optimizer.step, backend="eager")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    compiled()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises(ValueError, match="betas"):
        compiled()
    assert torch.is_grad_enabled()
    assert all(map(torch.equal, before, model.parameters()))


WRAPPED = {
    "ZeRO-1": {"use_distributed_optimizer": True},
    "16-bit gradients": {"param_name_patterns_for_fp32_local_accumulation": ("*bias",)},
}


def of_wrapped(comm: ThreadComm, *, wrapping: str, backend: Any) -> tuple[list[Tensor], list[Any]]:
    """Weights, gradients and results of three steps, with a backward pass before each. The function changes
    gradients in the buffer, and reads weights and gradients after the step."""
    model, roles = nn.Linear(3, 2).bfloat16(), roles_over(comm)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view_as(param) / 4)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=False, **WRAPPED[wrapping])
    chunk = DistributedDataParallel(config, model, groups=roles)
    shards = config.use_distributed_optimizer
    of_step = OptimizerConfig(lr=0.1, clip_grad=0.5, bf16=True, use_distributed_optimizer=shards)
    optimizer = get_optimizer(of_step, [chunk], {}, pg_collection=roles)

    def run(x: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad():
            model.bias.main_grad.mul_(2.0)
        result = optimizer.step()
        return model.weight.detach() * x, result

    step = run if backend is None else torch.compile(run, backend=backend)
    found, results = [], []
    for number in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        chunk(torch.full((1, 3), 0.25 * (comm.rank + number + 1), dtype=torch.bfloat16)).sum().backward()
        product, result = step(torch.full((), float(number), dtype=torch.bfloat16))
        found += [product, *(part.clone() for buffer in chunk.synced_buffers for part in buffer.results())]
        results.append(result)
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
    return [*found, *(param.detach().clone() for param in model.parameters())], list(map(tuple, results))


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_compiled_step_of_a_wrapped_chunk_is_the_step(wrapping: str) -> None:
    expected = run_threads(2, partial(of_wrapped, wrapping=wrapping, backend=None))
    torch._dynamo.reset()
    found = run_threads(2, partial(of_wrapped, wrapping=wrapping, backend="aot_eager"))
    for (tensors, results), of_step in zip(found, expected, strict=True):
        assert all(map(torch.equal, tensors, of_step[0]))
        assert results == of_step[1]
