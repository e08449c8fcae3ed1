"""`torch.compile`: the graph breaks at a step, which sees every new value."""

from functools import partial
from typing import Any

import pytest
import torch
from parity import roles_over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm
from opt_stack import get_optimizer


def linear(dtype: torch.dtype) -> nn.Module:
    model = nn.Linear(3, 2).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(param.numel()).view_as(param) / 4)
    return model


def train(comm: Comm, *, backend: str | None, **fields: Any) -> tuple[list[Tensor], list[Any]]:
    """Four steps, the third of which has no gradient of the bias; on several ranks of a ZeRO-1 chunk. The compiled
    function changes weights and gradients (in the buffer), and reads weights after the step."""
    config, roles, wraps = OptimizerConfig(lr=0.1, weight_decay=0.01, **fields), roles_over(comm), comm.size > 1
    model = net = linear(config.precision.params)
    if wraps:
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(ddp, net, groups=roles)
    optimizer = get_optimizer(config, [model], {}, pg_collection=roles)

    def run(x: Tensor) -> tuple[Tensor, Any]:
        with torch.no_grad():
            if wraps:
                net.bias.main_grad.mul_(2.0)
            else:
                net.weight.grad.mul_(2.0)
                if not config.fp16:  # whose main values are copies: a step refuses to undo other changes of weights
                    net.weight.mul_(0.5)
        result = optimizer.step()
        return net.weight.detach() * x, result

    step = run if backend is None else torch.compile(run, backend=backend)
    found, results = [], []
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        if wraps:
            model(torch.full((1, 3), 0.25 * (comm.rank + number + 1), dtype=net.weight.dtype)).sum().backward()
        else:
            for param in net.parameters():
                param.grad = torch.arange(param.numel(), dtype=param.dtype).view_as(param) * 0.25
            if number == 2:
                net.bias.grad = None
        product, result = step(torch.full((), float(number), dtype=net.weight.dtype))
        found += [product, *(bucket.result.clone() for bucket in (model.grad_sync.buckets if wraps else ()))]
        results.append(tuple(result))
        if wraps:
            optimizer.zero_grad()
    return [*found, *(param.detach().clone() for param in net.parameters())], results


MAINS_IN_24_BITS = {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}
MODES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks and fields
    "clipped": (1, {"clip_grad": 0.01, "log_num_zeros_in_grad": True}),
    "24-bit mains": (1, MAINS_IN_24_BITS),
    "fp16": (1, {"fp16": True, "loss_scale": 8.0}),
    "muon": (1, {"optimizer": "muon"}),
    "a wrapped chunk": (2, {"use_distributed_optimizer": True, "bf16": True, "clip_grad": 0.5}),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_step_has_the_weights_and_results_of_the_step(mode: str) -> None:
    torch._dynamo.reset()
    size, fields = MODES[mode]
    compiled, expected = (run_threads(size, partial(train, backend=on, **fields)) for on in ("aot_eager", None))
    for (tensors, results), (expected_tensors, expected_results) in zip(compiled, expected, strict=True):
        assert all(map(torch.equal, tensors, expected_tensors))
        assert results == expected_results


def test_errors_of_a_compiled_step_are_those_of_the_step() -> None:
    """Gradients stayed disabled in the whole process after such an error."""
    torch._dynamo.reset()
    model = linear(torch.float32)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.01), [model])
    step = torch.compile(optimizer.step, backend="eager")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    step()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises(ValueError, match="betas"):
        step()
    assert torch.is_grad_enabled()
    assert all(map(torch.equal, before, model.parameters()))
