"""Drop-in optimizers whose steps are Triton sweeps: on a GPU where there is one, else under Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels import optim

pytestmark = pytest.mark.needs_extra

Build = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Build, dict[str, Any]]] = {
    "adamw": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 1.0}),
    "adamw-8-bit": (optim.AdamW, {"lr": 1e-2, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}),
    "lion": (optim.Lion, {"lr": 1e-3}),
    "sgd": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "muon": (optim.Muon, {"lr": 1e-2}),
}
ON_OPTIMIZERS = pytest.mark.parametrize(("build", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (13, 7)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def trained(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], *, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def weights(params: list[torch.nn.Parameter]) -> Tensor:
    return torch.cat([param.detach().float().flatten().cpu() for param in params])


@ON_OPTIMIZERS
def test_a_step_of_sweeps_is_the_step_of_the_reference(
    build: Build, options: dict[str, Any], kernel_device: torch.device
) -> None:
    found, expected = parameters(kernel_device), parameters(torch.device("cpu"))
    trained(build(found, backend="triton", **options), found, first=0, steps=3)
    trained(build(expected, backend="reference", **options), expected, first=0, steps=3)
    # Codes of 8 bits that fall on the other side of a tie, and Muon's 16-bit products, move a weight by some of its lr.
    atol = 2e-3 if build is optim.Muon or "exp_avg_dtype" in options else 1e-5
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-5, atol=atol)


@ON_OPTIMIZERS
def test_a_run_resumes_on_the_device_with_the_same_weights(
    build: Build, options: dict[str, Any], kernel_device: torch.device
) -> None:
    straight, interrupted = parameters(kernel_device), parameters(kernel_device)
    trained(build(straight, backend="triton", **options), straight, first=0, steps=4)
    before = build(interrupted, backend="triton", **options)
    trained(before, interrupted, first=0, steps=2)
    after = build(interrupted, backend="triton", **options)
    after.load_state_dict(before.state_dict())
    trained(after, interrupted, first=2, steps=2)
    assert torch.equal(weights(straight), weights(interrupted))


def test_remainders_follow_a_model_in_bfloat16(kernel_device: torch.device) -> None:
    params = parameters(kernel_device, torch.bfloat16)
    exact = [torch.nn.Parameter(param.detach().float()) for param in params]
    trained(optim.AdamW(params, lr=1e-3, mains="remainder", backend="triton"), params, first=0, steps=3)
    optimizer = optim.AdamW(exact, lr=1e-3, backend="triton")
    for step in range(3):
        generator = torch.Generator().manual_seed(100 + step)
        for param in exact:
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(kernel_device, torch.bfloat16).float()
        optimizer.step()
    # The weight is its float32 main, rounded: half a unit in the last place of bfloat16.
    torch.testing.assert_close(weights(params), weights(exact), rtol=2**-8, atol=0)
