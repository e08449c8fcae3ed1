"""A step within a compiled function, where the graph breaks, does what the uncompiled one does, bit for bit."""

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.optim import SGD, AdamW, Lion, Muon

Within = Callable[[Any, list[nn.Parameter]], None]  # what a function does with optimizer and parameters
BUILDS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": lambda params: AdamW(params, lr=0.1),
    "adamw with remainders": lambda params: AdamW(params, lr=0.1, mains="remainder"),
    "adamw, clipped": lambda params: AdamW(params, lr=0.1, max_norm=0.5),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "lion": lambda params: Lion(params, lr=0.1),
    "muon": lambda params: Muon(params, lr=0.1, scalar_optimizer="adam"),
}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 6), (5,))]


def new_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def run(name: str, within: Within, between: Within, compiler: Any) -> list[Tensor]:
    """Weights and states after steps."""
    torch._dynamo.reset()
    params = parameters(torch.bfloat16 if "remainders" in name else torch.float32)
    optimizer = BUILDS[name](params)

    def step() -> Tensor:
        within(optimizer, params)
        return params[0].sum()  # sees the step

    compiled = step if compiler is None else torch.compile(step, backend=compiler)
    found = []
    for number in range(5):
        new_grads(params, number)
        if number == 2:
            between(optimizer, params)
        found.append(compiled())
    states = [tensor for param in params for tensor in optimizer.state[param].values()]
    return [*found, *params, *states]


def plain(optimizer: Any, _: list[nn.Parameter]) -> None:
    optimizer.step()


def nothing(_: Any, __: list[nn.Parameter]) -> None:
    return None


def a_new_rate(optimizer: Any, _: list[nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    optimizer.step()


def scaled_grads(optimizer: Any, params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.mul_(0.25)
    optimizer.step()


def new_gradients(optimizer: Any, params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = param.grad * 0.25
    optimizer.step()


def moved_weights(optimizer: Any, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        params[0].add_(1.0)
    optimizer.step()
    with torch.no_grad():
        params[0].mul_(2.0)


def no_gradients_after(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.step()
    for param in params:
        param.grad = None  # torch's own zero_grad breaks graphs


def twice(optimizer: Any, _: list[nn.Parameter]) -> None:
    optimizer.step()
    optimizer.step()


def a_gradient_dropped(optimizer: Any, params: list[nn.Parameter]) -> None:
    params[1].grad = None
    optimizer.step()


WITHIN: list[Within] = [
    plain, a_new_rate, scaled_grads, new_gradients, moved_weights, no_gradients_after, twice, a_gradient_dropped,
]  # fmt: skip


def group_added(optimizer: Any, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.ones(3, 3)))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.3})
    new_grads(params, 9)


def loaded(optimizer: Any, _: list[nn.Parameter]) -> None:
    saved = deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"].mul_(3)
    optimizer.load_state_dict(saved)


def gradient_gone(_: Any, params: list[nn.Parameter]) -> None:
    params[1].grad = None


def betas_changed(optimizer: Any, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)


def weight_replaced(_: Any, params: list[nn.Parameter]) -> None:
    params[0].data = torch.ones_like(params[0])


@pytest.mark.parametrize("name", BUILDS)
def test_a_compiled_step_is_the_step(name: str) -> None:
    found, expected = (run(name, plain, nothing, compiler) for compiler in ("aot_eager", None))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("within", WITHIN[1:])
def test_a_compiled_step_sees_what_comes_before_it_in_the_same_function(within: Within) -> None:
    found, expected = (run("adamw", within, nothing, compiler) for compiler in ("aot_eager", None))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("between", [group_added, loaded, gradient_gone, betas_changed, weight_replaced])
def test_a_compiled_step_sees_what_happens_between_calls(between: Within) -> None:
    found, expected = (run("adamw", plain, between, compiler) for compiler in ("eager", None))
    assert all(map(torch.equal, found, expected))


def test_imports_do_not_load_dynamo() -> None:
    """It takes longer to import than this package."""
    program = (
        "import sys, torch; loaded = 'torch._dynamo' in sys.modules; import opt_kernels.optim; "
        "assert loaded or 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_compiled_step_with_a_closure_is_the_step() -> None:
    def trained(*, is_compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        params = parameters(torch.float32)
        optimizer = AdamW(params, lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum((param.square().sum() for param in params), torch.zeros(()))
            loss.backward()
            return loss

        step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        return [*(step(closure).detach() for _ in range(3)), *params]

    assert all(map(torch.equal, trained(is_compiled=True), trained(is_compiled=False)))


def test_a_copy_of_an_optimizer_steps_itself() -> None:
    params = parameters(torch.float32)
    optimizer = AdamW(params, lr=0.1)
    copies, copied = deepcopy((params, optimizer))
    before = [param.detach().clone() for param in params]
    new_grads(copies, 0)
    torch._dynamo.reset()
    torch.compile(copied.step, backend="aot_eager")()
    assert all(map(torch.equal, params, before))
    assert not any(map(torch.equal, copies, before))
