"""Muon as a drop-in takes torch.optim.Muon's steps, and Megatron-Core's where it is asked to."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.optim import Muon

TorchMuon = getattr(torch.optim, "Muon", None)
needs_muon = pytest.mark.skipif(TorchMuon is None, reason="torch 2.9 brought Muon")
SHAPES = [(32, 128), (128, 32), (64, 64)]
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "original": {"adjust_lr_fn": "original"},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "no nesterov": {"nesterov": False},
    "other numbers": {"weight_decay": 0.5, "momentum": 0.5, "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0)},
    "large eps": {"eps": 1e3},
}


def moved(build: Any, shape: tuple[int, int], steps: int = 3, **options: Any) -> tuple[Tensor, Tensor]:
    """The weight before and after."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator))
    before = param.detach().clone()
    optimizer = build([param], **{"lr": 0.02, **options})
    for _ in range(steps):
        param.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return before, param.detach()


@needs_muon
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_step_at_equal_arguments_is_torchs(shape: tuple[int, int], options: dict[str, Any]) -> None:
    # It was 24 to 47 times as long by default.
    (before, ours), (_, theirs) = moved(Muon, shape, **options), moved(TorchMuon, shape, **options)
    # Both iterate in bfloat16, whose unit is 0.4 %, rounding at other places; the steepest polynomials double errors.
    assert float((ours - theirs).norm() / (theirs - before).norm()) < 0.05
    assert float((ours - before).norm() / (theirs - before).norm()) == pytest.approx(1.0, abs=0.01)


@needs_muon
def test_positional_arguments_have_torchs_order() -> None:
    arguments = (0.01, 0.2, 0.8, False, (3.0, -4.0, 2.0), 1e-6, 3, "match_rms_adamw")
    defaults = [build([nn.Parameter(torch.ones(2, 2))], *arguments).defaults for build in (Muon, TorchMuon)]
    assert {name: defaults[0][name] for name in defaults[1]} == defaults[1]


@needs_muon
@pytest.mark.parametrize("ours_first", [True, False])
def test_state_dicts_are_exchanged_with_torchs(ours_first: bool) -> None:
    builds = (Muon, TorchMuon) if ours_first else (TorchMuon, Muon)
    generator = torch.Generator().manual_seed(0)
    first, second = (nn.Parameter(torch.ones(24, 16)) for _ in range(2))
    one, other = (build([param], lr=0.02) for build, param in zip(builds, (first, second)))
    for optimizer, param in ((one, first), (other, second)):
        param.grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(3))
        optimizer.step()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    with torch.no_grad():
        second.copy_(first)
    before = first.detach().clone()
    grad = torch.randn(24, 16, generator=generator)
    for optimizer, param in ((one, first), (other, second)):
        param.grad = grad.clone()
        optimizer.step()
    assert float((first - second).detach().norm() / (first - before).detach().norm()) < 0.05


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"scale_mode": "spectral"}, 128**0.5),
        ({"scale_mode": "spectral", "extra_scale_factor": 0.2}, 0.2 * 128**0.5),
        ({"scale_mode": "unit_rms_norm"}, 2.0),
        ({"scale_mode": "shape_scaling"}, 2.0),
        ({"adjust_lr_fn": "match_rms_adamw", "extra_scale_factor": 2.0}, 0.4 * 128**0.5),
    ],
    ids=str,
)
def test_megatrons_scales_are_chosen_by_name(options: dict[str, Any], scale: float) -> None:
    polar = {"coefficient_type": "deepseekv4", "ns_steps": 10, "fp32_matmul_prec": "highest"}
    before, after = moved(Muon, (128, 32), steps=1, weight_decay=0.0, **polar, **options)
    # An orthogonal (128, 32) has norm sqrt(32); the ten steps leave singular values within 1e-3 of one.
    assert float((after - before).norm()) == pytest.approx(0.02 * scale * 32**0.5, rel=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjust_lr_fn": "spectral"}, "'original', 'match_rms_adamw' or None"),
        ({"adjust_lr_fn": "original", "scale_mode": "spectral"}, "set only one of them"),
        ({"ns_coefficients": (1.0, 2.0, 3.0), "coefficient_type": "quintic"}, "pass one of them"),
        ({"ns_steps": 0}, "at least 1 step"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(2, 2))], **options)


def test_the_eps_of_other_parameters_is_their_own() -> None:
    bias = nn.Parameter(torch.zeros(3))
    bias.grad = torch.full((3,), 1e-3)
    Muon([bias], lr=1.0, weight_decay=0.0, scalar_optimizer="adam", scalar_eps=1e-3).step()
    # Adam's first step is g / (|g| + eps).
    torch.testing.assert_close(bias.detach(), torch.full((3,), -0.5))


@needs_muon
def test_a_group_may_not_have_other_options_of_the_iteration() -> None:
    with pytest.raises(ValueError, match="build it with ns_steps=7"):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "ns_steps": 7}])
