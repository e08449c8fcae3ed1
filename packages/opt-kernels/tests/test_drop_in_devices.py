"""Drop-in optimizers whose steps are Triton sweeps: on a GPU where there is one, else under Triton's interpreter."""

from typing import Any

import pytest
import torch
from drop_ins import parameter, step
from elementwise_works import on

from opt_kernels import optim

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], float]] = {  # tolerances beside float32's roundings
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 1.0}, 1e-5),
    # Codes that fall on the other side of a tie, and Muon's 16-bit products, move a weight by some of its lr.
    "adamw-8-bit": ("AdamW", {"lr": 1e-2, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}, 2e-3),
    "lion": ("Lion", {"lr": 1e-3}, 1e-5),
    "sgd": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, 1e-5),
    "muon": ("Muon", {"lr": 1e-2}, 2e-3),
}


@on("triton")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_sweeps_are_those_of_the_reference_and_resume(
    name: str, backend: str, kernel_device: torch.device
) -> None:
    rule, options, tolerance = OPTIMIZERS[name]

    def built(device: torch.device, backend: str) -> torch.optim.Optimizer:
        values = [parameter(*shape, seed=shape[0]).data.bfloat16().float() for shape in ((24, 40), (40, 24), (13, 7))]
        made: torch.optim.Optimizer = getattr(optim, rule)(
            [torch.nn.Parameter(value.to(device)) for value in values], backend=backend, **options
        )
        return made

    optimizer, resumed, reference = (
        built(kernel_device, backend),
        built(kernel_device, backend),
        built(CPU, "reference"),
    )
    for param, value in zip(resumed.param_groups[0]["params"], step(optimizer, 0, 1)):
        param.data.copy_(value)
    resumed.load_state_dict(optimizer.state_dict())
    found = step(optimizer, 2, 3)
    assert all(map(torch.equal, found, step(resumed, 2, 3)))
    wanted = step(reference, 0, 1, 2, 3)
    torch.testing.assert_close([value.cpu() for value in found], wanted, rtol=1e-5, atol=tolerance)
