"""Drop-in optimizers whose steps are Triton sweeps: on a GPU where there is one, else under Triton's interpreter."""

import pytest
import torch
from drop_ins import parameter, params_of, step
from elementwise_works import on
from torch import nn

from opt_kernels import optim

OPTIMIZERS = {  # tolerances beside float32's roundings
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 1.0}, 1e-5),
    # Codes that fall on the other side of a tie, and Muon's 16-bit products, move a weight by some of its lr.
    "adamw-8-bit": ("AdamW", {"lr": 1e-2, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}, 2e-3),
    "lion": ("Lion", {"lr": 1e-3}, 1e-5),
    "sgd": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, 1e-5),
    "muon": ("Muon", {"lr": 1e-2}, 2e-3),
}


@on("triton")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_sweeps_are_those_of_the_reference_and_resume(name, backend, kernel_device):
    rule, options, tolerance = OPTIMIZERS[name]

    def built(device, backend):
        values = [parameter(*shape, seed=shape[0]).data.bfloat16().float() for shape in ((24, 40), (40, 24), (13, 7))]
        return getattr(optim, rule)([nn.Parameter(value.to(device)) for value in values], backend=backend, **options)

    optimizer, resumed = built(kernel_device, backend), built(kernel_device, backend)
    for param, value in zip(params_of(resumed), step(optimizer, 0, 1)):
        param.data.copy_(value)
    resumed.load_state_dict(optimizer.state_dict())
    found = step(optimizer, 2, 3)
    assert all(map(torch.equal, found, step(resumed, 2, 3)))
    wanted = step(built("cpu", "reference"), 0, 1, 2, 3)
    torch.testing.assert_close([value.cpu() for value in found], wanted, rtol=1e-5, atol=tolerance)
