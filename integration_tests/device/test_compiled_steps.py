"""`torch.compile`: the graph breaks at a step, which sees every new value."""

from functools import partial
from typing import Any

import pytest
import torch
from on_device import zero
from parity import Net, grads_of, roles_over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm
from opt_stack import get_optimizer

SHAPES = {"embedding": (2, 3), "bias": (2,), "qkv": (12, 3), "scale": (1,)}


def train(comm: Comm, *, backend: str | None, **fields: Any) -> tuple[list[Tensor], list[Any]]:
    """Four steps, the third of which has no gradient of the bias; on several ranks of a ZeRO-1 chunk. The compiled
    function changes a weight and its gradient, and reads the weight after the step."""
    config = OptimizerConfig(lr=0.1, weight_decay=0.01, **fields)
    roles = roles_over(comm)
    wraps = comm.size > 1
    net = Net(config.precision.params, SHAPES)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model: nn.Module = DistributedDataParallel(ddp, net, groups=roles) if wraps else net
    optimizer = get_optimizer(config, [model], {}, pg_collection=roles)
    weight = net.qkv.weight

    @torch.no_grad()
    def run(x: Tensor) -> tuple[Tensor, Any]:
        (weight.main_grad if wraps else weight.grad).mul_(2.0)
        if not (wraps or config.fp16):  # whose main values are copies: a step refuses to undo other changes of weights
            weight.mul_(0.5)
        result = optimizer.step()
        return weight.detach() * x, result

    step = run if backend is None else torch.compile(run, backend=backend)
    found = []
    results = []
    for number in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        optimizer.scale_loss(model(grads_of(number, comm.rank, comm.size, SHAPES))).backward()
        if number == 2 and not wraps:
            net.bias.weight.grad = None
        product, result = step(torch.full((), float(number), dtype=weight.dtype))
        found.append(product)
        results.append(tuple(result))
        zero(model, optimizer)
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
    model = Net(torch.float32, SHAPES)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.01), [model])
    step = torch.compile(optimizer.step, backend="eager")
    model(grads_of(0, 0, 1, SHAPES)).backward()
    step()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises(ValueError, match="betas"):
        step()
    assert torch.is_grad_enabled()
    assert all(map(torch.equal, before, model.parameters()))
