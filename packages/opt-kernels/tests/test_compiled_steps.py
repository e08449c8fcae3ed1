"""A step within a compiled function, where the graph breaks, does what the uncompiled one does, bit for bit."""

import pytest
import torch
from drop_ins import parameter, states_of
from torch import Tensor

from opt_kernels.optim import AdamW


def run(*, is_compiled: bool) -> list[Tensor]:
    """Weights and states after steps, with changes before and within the function, which sees what the step wrote."""
    params = [parameter(*shape, dtype=torch.bfloat16) for shape in ((4, 6), (5,))]
    found = []
    optimizer = AdamW(params, lr=0.1, mains="remainder", max_norm=0.5)

    def step() -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        with torch.no_grad():
            params[0].mul_(2.0)
        return params[0].sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((param.float().square().sum() for param in params), torch.zeros(()))
        loss.backward()
        return loss

    compiled = torch.compile(step, backend="aot_eager") if is_compiled else step
    for number in range(3):
        for seed, param in enumerate(params[: 1 if number == 2 else 2]):
            param.grad = parameter(*param.shape, seed=10 * number + seed, dtype=torch.bfloat16).detach()
        found.append(compiled())
        optimizer.zero_grad()
    with_closure = torch.compile(optimizer.step, backend="eager") if is_compiled else optimizer.step
    return [*found, with_closure(closure).detach(), *params, *states_of(optimizer)]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="dynamo fails if a function writes to a dict before a break")
def test_a_compiled_step_is_the_step() -> None:
    torch._dynamo.reset()
    assert all(map(torch.equal, run(is_compiled=True), run(is_compiled=False)))
