"""A step within a compiled function, where the graph breaks, does what the uncompiled one does, bit for bit."""

from typing import Any

import pytest
import torch
from drop_ins import built, parameter, states_of
from torch import Tensor

BUILDS: dict[str, dict[str, Any]] = {"AdamW": {"mains": "remainder", "max_norm": 0.5}, "Muon": {}}


def run(rule: str, *, is_compiled: bool) -> list[Tensor]:
    """Weights and states after steps, with changes before and within the function, which sees what the step wrote."""
    torch._dynamo.reset()
    dtype = torch.bfloat16 if "mains" in BUILDS[rule] else torch.float32
    params, found = [parameter(*shape, dtype=dtype) for shape in ((4, 6), (5,))], []
    optimizer = built(rule, params, lr=0.1, **BUILDS[rule])

    def step() -> Tensor:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        with torch.no_grad():
            params[0].mul_(2.0)
        return params[0].sum()

    for number in range(4):
        for seed, param in enumerate(params[: 1 if number == 3 else 2]):
            param.grad = parameter(*param.shape, seed=10 * number + seed, dtype=dtype).detach()
        found.append((torch.compile(step, backend="aot_eager") if is_compiled else step)())
        optimizer.zero_grad()
    return [*found, *params, *states_of(optimizer)]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="dynamo fails if a function writes to a dict before a break")
@pytest.mark.parametrize("rule", BUILDS)
def test_a_compiled_step_is_the_step(rule: str) -> None:
    assert all(map(torch.equal, run(rule, is_compiled=True), run(rule, is_compiled=False)))
