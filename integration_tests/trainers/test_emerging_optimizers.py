"""Optimizers of the package emerging-optimizers, which needs Python 3.12: the same weights as ours after some steps."""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it compiles functions

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels import optim

ORTHOGONALISED = "emerging_optimizers.orthogonalized_optimizers"
SAME: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "fp32_matmul_prec": "highest"}
PLAIN: dict[str, Any] = {"nesterov": False, "coefficient_type": "quintic"}
# Their module and class, their options; our class and options for a matrix of these rows and columns.
PEERS: dict[str, tuple[str, dict[str, Any], type, Callable[[int, int], dict[str, Any]]]] = {
    "PolarGrad": (
        f"{ORTHOGONALISED}.polargrad",
        {"weight_decay": 0.1},
        optim.Muon,
        lambda rows, cols: {
            "weight_decay": 0.1,
            "nuclear_scale": True,
            "scale_mode": "spectral",
            **PLAIN,
            "extra_scale_factor": max(rows, cols) ** -0.5,
        },
    ),
    "Scion": (
        f"{ORTHOGONALISED}.scion",
        {"spectral_radius": 3.0},
        optim.Scion,
        lambda rows, cols: {"extra_scale_factor": 3.0},
    ),
    "Muown": (
        "emerging_optimizers.contrib.muown",  # not in 0.3.0
        {"weight_decay": 0.1},
        optim.Muown,
        lambda rows, cols: {"weight_decay": 0.1},
    ),
}


def trained(make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = make([weight], **SAME, **options)
    for _ in range(8):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
@pytest.mark.parametrize("name", PEERS)
def test_weights_are_those_of_the_authors_package(name: str, shape: tuple[int, int]) -> None:
    module, options, ours, options_of = PEERS[name]
    theirs = getattr(pytest.importorskip(module), name)
    wanted = trained(theirs, options, shape)
    torch.testing.assert_close(trained(ours, options_of(*shape), shape), wanted, rtol=1e-6, atol=2e-6)
