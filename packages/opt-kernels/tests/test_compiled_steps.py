"""A step within a compiled function, where the graph breaks, does what the uncompiled one does, bit for bit."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.optim import SGD, AdamW, Lion, Muon

BUILDS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": lambda params: AdamW(params, lr=0.1),
    "adamw with remainders": lambda params: AdamW(params, lr=0.1, mains="remainder"),
    "adamw, clipped": lambda params: AdamW(params, lr=0.1, max_norm=0.5),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "lion": lambda params: Lion(params, lr=0.1),
    "muon": lambda params: Muon(params, lr=0.1, scalar_optimizer="adam"),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 6), (5,))]


def new_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def group_added(optimizer: Any, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.ones(3, 3, dtype=params[0].dtype)))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.3})
    new_grads(params, 9)


def loaded(optimizer: Any, _: list[nn.Parameter]) -> None:
    saved = deepcopy(optimizer.state_dict())
    next(value for name, value in saved["state"][0].items() if name != "step").mul_(3)
    optimizer.load_state_dict(saved)


def gradient_gone(_: Any, params: list[nn.Parameter]) -> None:
    params[1].grad = None


def weight_replaced(_: Any, params: list[nn.Parameter]) -> None:
    params[0].data = torch.ones_like(params[0])


BETWEEN = {2: weight_replaced, 3: group_added, 4: loaded, 5: gradient_gone}  # by step


def run(name: str, compiler: str | None) -> list[Tensor]:
    """Weights and states after steps, with changes before, within and after the compiled function."""
    torch._dynamo.reset()
    params = parameters(torch.bfloat16 if "remainders" in name else torch.float32)
    optimizer = BUILDS[name](params)

    def step() -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
        optimizer.step()
        for param in params:
            if param.grad is not None:
                param.grad = param.grad * 0.25
        optimizer.step()
        with torch.no_grad():
            params[0].mul_(2.0)
        return params[0].sum()  # sees the step

    compiled = step if compiler is None else torch.compile(step, backend=compiler)
    found = []
    for number in range(6):
        new_grads(params, number)
        BETWEEN.get(number, lambda *_: None)(optimizer, params)
        found.append(compiled())
    return [*found, *params, *(tensor for param in params for tensor in optimizer.state[param].values())]


@pytest.mark.parametrize("name", BUILDS)
def test_a_compiled_step_is_the_step(name: str) -> None:
    found, expected = (run(name, compiler) for compiler in ("aot_eager", None))
    assert all(map(torch.equal, found, expected))


def test_a_compiled_step_with_a_closure_is_the_step() -> None:
    def trained(*, is_compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        params = parameters()
        optimizer = AdamW(params, lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum((param.square().sum() for param in params), torch.zeros(()))
            loss.backward()
            return loss

        step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        return [*(step(closure).detach() for _ in range(3)), *params]

    assert all(map(torch.equal, trained(is_compiled=True), trained(is_compiled=False)))
