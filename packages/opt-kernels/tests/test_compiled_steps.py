"""A step within a compiled function, where the graph breaks, does what the uncompiled one does, bit for bit."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from drop_ins import built, parameter, states_of
from torch import Tensor

BUILDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw with remainders, clipped": ("AdamW", {"mains": "remainder", "max_norm": 0.5}),
    "sgd": ("SGD", {"momentum": 0.9}),
    "muon": ("Muon", {}),
}


def between(number: int, optimizer: Any, params: list[Any]) -> None:
    """What happens before a step of this number."""
    match number:
        case 2:
            params[0].data = torch.ones_like(params[0])
        case 3:
            params.append(parameter(3, 3, dtype=params[0].dtype))
            optimizer.add_param_group({"params": params[-1:], "lr": 0.3})
        case 4:
            saved = deepcopy(optimizer.state_dict())
            next(value for name, value in saved["state"][0].items() if name != "step").mul_(3)
            optimizer.load_state_dict(saved)
    for seed, param in enumerate(params):
        param.grad = parameter(*param.shape, seed=10 * number + seed, dtype=param.dtype).detach()
    if number == 5:
        params[1].grad = None


def run(name: str, compiler: str | None) -> list[Tensor]:
    """Weights and states after steps, with changes before, within and after the compiled function."""
    torch._dynamo.reset()
    rule, options = BUILDS[name]
    params = [
        parameter(*shape, dtype=torch.bfloat16 if "mains" in options else torch.float32) for shape in ((4, 6), (5,))
    ]
    optimizer = built(rule, params, lr=0.1, **options)

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
        between(number, optimizer, params)
        found.append(compiled())
    return [*found, *params, *states_of(optimizer)]


@pytest.mark.parametrize("name", BUILDS)
def test_a_compiled_step_is_the_step(name: str) -> None:
    found, expected = (run(name, compiler) for compiler in ("aot_eager", None))
    assert all(map(torch.equal, found, expected))


def test_a_compiled_step_with_a_closure_is_the_step() -> None:
    def trained(*, is_compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        params = [parameter(4, 6), parameter(5)]
        optimizer = built("AdamW", params, lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum((param.square().sum() for param in params), torch.zeros(()))
            loss.backward()
            return loss

        step = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
        return [*(step(closure).detach() for _ in range(3)), *params]

    assert all(map(torch.equal, trained(is_compiled=True), trained(is_compiled=False)))
