"""Drop-in optimizers whose steps are Triton sweeps: on a GPU where there is one, else under Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels import optim

pytestmark = pytest.mark.needs_extra

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], float]] = {  # tolerances beside float32's roundings
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 1.0}, 1e-5),
    # Codes that fall on the other side of a tie, and Muon's 16-bit products, move a weight by some of its lr.
    "adamw-8-bit": ("AdamW", {"lr": 1e-2, "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}, 2e-3),
    "lion": ("Lion", {"lr": 1e-3}, 1e-5),
    "sgd": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, 1e-5),
    "muon": ("Muon", {"lr": 1e-2}, 2e-3),
}


def trained(name: str, device: torch.device, backend: str, *, resumed: bool = False, **more: Any) -> Tensor:
    """The weights after four steps; with `resumed` by another optimizer that loaded the state after two."""
    rule, options, _ = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if "mains" in more else torch.float32
    values = [torch.randn(shape, generator=generator) for shape in ((24, 40), (40, 24), (13, 7))]
    params = [nn.Parameter(value.bfloat16().to(device, dtype)) for value in values]
    optimizer = getattr(optim, rule)(params, backend=backend, **{**options, **more})
    for step in range(4):
        if resumed and step == 2:
            before, optimizer = optimizer, getattr(optim, rule)(params, backend=backend, **{**options, **more})
            optimizer.load_state_dict(before.state_dict())
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return torch.cat([param.detach().float().flatten().cpu() for param in params])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_sweeps_are_those_of_the_reference_and_resume(name: str, kernel_device: torch.device) -> None:
    found = trained(name, kernel_device, "triton")
    torch.testing.assert_close(found, trained(name, CPU, "reference"), rtol=1e-5, atol=OPTIMIZERS[name][2])
    assert torch.equal(found, trained(name, kernel_device, "triton", resumed=True))


def test_remainders_follow_a_model_in_bfloat16(kernel_device: torch.device) -> None:
    narrow = trained("adamw", kernel_device, "triton", mains="remainder", max_norm=None)
    wide = trained("adamw", kernel_device, "triton", max_norm=None)
    # The weight is its float32 main, rounded: half a unit in the last place of bfloat16.
    torch.testing.assert_close(narrow, wide, rtol=2**-8, atol=0)
