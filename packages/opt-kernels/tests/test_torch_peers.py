"""Drop-in optimizers beside the classes of the same names in torch.optim: steps, arguments, states, parameters."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from drop_ins import parameter, step
from elementwise_works import NEEDS_COMPILER
from torch import Tensor, nn

from opt_kernels import optim
from opt_kernels.matrices import ScaleMode
from opt_kernels.rules import Adam
from opt_kernels.works import Batch, Hyper, Work

NUMBERS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
ADAM: dict[str, Any] = NUMBERS | {"betas": (0.8, 0.99)}
SGD: dict[str, Any] = NUMBERS | {"momentum": 0.9}
PEERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", ADAM),
    "AdamW": ("AdamW", ADAM),
    "AdamW amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "AdamW maximize": ("AdamW", {"lr": 0.01, "maximize": True}),
    "Adam amsgrad, maximize": ("Adam", NUMBERS | {"amsgrad": True, "maximize": True}),
    "NAdam": ("NAdam", ADAM | {"momentum_decay": 0.2}),
    "NAdam decoupled": ("NAdam", NUMBERS | {"decoupled_weight_decay": True}),
    "NAdam, constant momentum": ("NAdam", {"lr": 0.01, "momentum_decay": 0.0}),
    "RAdam": ("RAdam", NUMBERS),
    "RAdam decoupled": ("RAdam", NUMBERS | {"decoupled_weight_decay": True}),
    "RAdam, short memory": ("RAdam", {"lr": 0.01, "betas": (0.8, 0.6)}),  # never rectified: r = 4
    "SGD": ("SGD", NUMBERS),
    "SGD momentum": ("SGD", SGD),
    "SGD nesterov": ("SGD", SGD | {"nesterov": True}),
    "SGD dampening": ("SGD", SGD | {"dampening": 0.3}),
    "SGD maximize": ("SGD", SGD | {"maximize": True}),
}
KINDS = [
    pytest.param(torch.float64, None, id="float64"),
    pytest.param(torch.float32, "reference", id="reference"),
    pytest.param(torch.float32, "torch", id="torch"),
    pytest.param(torch.float32, "cpp", id="cpp", marks=NEEDS_COMPILER),
]
PLAIN = ["Adam", "AdamW", "SGD"]


def both(name: str) -> tuple[Any, Any]:
    return getattr(optim, name), getattr(torch.optim, name)


@pytest.mark.parametrize(("dtype", "backend"), KINDS)
@pytest.mark.parametrize("name", PEERS)
def test_a_drop_in_takes_torchs_steps(name: str, dtype: torch.dtype, backend: str | None) -> None:
    cls, options = PEERS[name]
    ours, theirs = both(cls)
    steps = range(40 if backend is None else 12)
    optimizer = ours([parameter(9, 7, dtype=dtype), parameter(5, dtype=dtype)], backend=backend, **options)
    other = theirs([parameter(9, 7, dtype=dtype), parameter(5, dtype=dtype)], **options)
    # torch keeps NAdam's product in float32, 2^-24 of it a step; float32 moments of float64 were seven digits off.
    exact = 1e-6 if cls == "NAdam" else 1e-12
    tolerance = {"rtol": exact, "atol": exact} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(step(optimizer, *steps), step(other, *steps), **tolerance)
    states = {t.dtype for of in optimizer.state.values() for key, t in of.items() if key not in ("step", "mu_product")}
    assert states <= {dtype}


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpp", marks=NEEDS_COMPILER)])
def test_float32_adamw_has_the_operations_of_torchs_fused_adamw(backend: str) -> None:
    theirs = parameter(1025)
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    rule, main = Adam(backend=backend), theirs.detach().clone()
    state = rule.init_state(main)
    for number in range(1, 4):
        step(optimizer, number)
        assert theirs.grad is not None
        hyper = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), step=number)
        rule.update_([Batch(hyper, [Work(grad=theirs.grad, main=main, state=state)])])
    # In C++ equal bits where torch's own vectors have fused products; elsewhere a rounding of 2^-24 may differ.
    torch.testing.assert_close(
        main, theirs.detach(), rtol=0 if backend == "torch" else 2.5e-7, atol=0 if backend == "torch" else 1e-9
    )


@pytest.mark.parametrize("num_steps", [0, 1, 7])
@pytest.mark.parametrize("to_torch", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "SGD nesterov"])
def test_training_continues_with_the_other_class(name: str, to_torch: bool, num_steps: int) -> None:
    """Symptom: torch.optim.NAdam raised KeyError('mu_product') at its first step after loading ours."""
    cls, options = PEERS[name]
    first, second = both(cls)[:: 1 if to_torch else -1]
    one, other = first([parameter()], **options), second([parameter(seed=1)], **options)
    step(one, *range(num_steps))
    other.param_groups[0]["params"][0].data.copy_(one.param_groups[0]["params"][0])
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    # Steps of 0.01 in float32, whose operations torch has in another order.
    torch.testing.assert_close(step(one, *range(5)), step(other, *range(5)), rtol=1e-5, atol=1e-6)


POSITIONAL: Mapping[str, tuple[Any, ...]] = {
    "Adam": (0.1, (0.8, 0.9), 1e-6, 0.01, True),
    "AdamW": (0.1, (0.8, 0.9), 1e-6, 0.01, True),
    "SGD": (0.1, 0.9, 0.0, 0.01, True),
    "Muon": (0.01, 0.2, 0.8, False, (3.0, -4.0, 2.0), 1e-6, 3, "match_rms_adamw"),
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_positional_arguments_have_torchs_order(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip("torch 2.9 brought Muon")
    ours, theirs = (build([parameter()], *POSITIONAL[name]).defaults for build in both(name))
    flags = {"amsgrad", "foreach", "capturable", "differentiable", "fused", "maximize", "decoupled_weight_decay"}
    assert {key: ours[key] for key in theirs.keys() - flags} == {key: theirs[key] for key in theirs.keys() - flags}
    assert ours.get("amsgrad", None) == theirs.get("amsgrad", None)


FLAGS = ("foreach", "fused", "maximize", "differentiable", "capturable", "amsgrad")


@pytest.mark.parametrize("name", PLAIN)
def test_flags_that_ask_for_nothing_or_for_what_is_done_anyway_are_taken(name: str) -> None:
    ours, _ = both(name)
    expected = step(ours([parameter()]), 0, 1)
    for flag, value in [(flag, value) for flag in FLAGS for value in (None, False)] + [
        ("foreach", True),
        ("fused", True),
    ]:
        if name == "SGD" and flag == "amsgrad":
            with pytest.raises(TypeError, match=flag):  # as torch's SGD
                ours([parameter()], **{flag: value})
        else:
            assert torch.equal(step(ours([parameter()], **{flag: value}), 0, 1)[0], expected[0])


DENSE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(4, 3, 2).permute(2, 0, 1),
    "of one element": lambda x: x[:1, :1],
    "empty": lambda x: x[:0],
    "a shard without elements": lambda x: x[:, 4:],
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("arrange", DENSE.values(), ids=DENSE.keys())
def test_parameters_in_any_dense_order_move_as_torchs(name: str, arrange: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = (step(build([nn.Parameter(arrange(parameter().data.clone()))]), 0, 1, 2) for build in both(name))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_groups_of_sgd_have_their_own_momenta_and_dampenings_also_when_set_later_as_in_torch() -> None:
    results = []
    for build in both("SGD"):
        a, b, c = (parameter(seed=seed) for seed in range(3))
        groups = [{"params": [a]}, {"params": [b], "momentum": 0.8, "dampening": 0.5}, {"params": [c], "momentum": 0.0}]
        optimizer, without = build(groups, lr=0.1, momentum=0.9, dampening=0.25), build([parameter(seed=3)], lr=0.1)
        for number, momentum in enumerate((0.0, 0.9, 0.0, 0.5)):
            if number == 2:
                optimizer.param_groups[0]["dampening"] = 0.75
            without.param_groups[0]["momentum"] = momentum
            found = [*step(optimizer, number), *step(without, number)]
        results.append(found)
    torch.testing.assert_close(*results)


def test_a_dampened_momentum_that_is_set_after_the_first_step_is_refused() -> None:
    optimizer = optim.SGD([parameter()], lr=0.1, dampening=0.5)
    step(optimizer, 0)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="set the momentum before the first step"):
        step(optimizer, 1)


# --- Muon -------------------------------------------------------------------------------------------------------------

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brought Muon")
OF_MUON: dict[str, dict[str, Any]] = {
    "defaults": {},
    "original": {"adjust_lr_fn": "original"},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "no nesterov": {"nesterov": False},
    "other numbers": {"weight_decay": 0.5, "momentum": 0.5, "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0)},
    "large eps": {"eps": 1e3},
}


@needs_muon
@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 64)], ids=str)
@pytest.mark.parametrize("options", OF_MUON.values(), ids=OF_MUON.keys())
def test_a_step_at_equal_arguments_is_torchs(shape: tuple[int, int], options: dict[str, Any]) -> None:
    # It was 24 to 47 times as long by default.
    optimizers = [build([parameter(*shape)], **{"lr": 0.02, **options}) for build in both("Muon")]
    before, (ours, theirs) = parameter(*shape).detach(), (step(optimizer, 0, 1, 2)[0] for optimizer in optimizers)
    # Both iterate in bfloat16, whose unit is 0.4 %, rounding at other places; the steepest polynomials double errors.
    assert float((ours - theirs).norm() / (theirs - before).norm()) < 0.05
    assert float((ours - before).norm() / (theirs - before).norm()) == pytest.approx(1.0, abs=0.01)


@needs_muon
@pytest.mark.parametrize("ours_first", [True, False])
def test_state_dicts_of_muon_are_exchanged_with_torchs(ours_first: bool) -> None:
    builds = both("Muon") if ours_first else both("Muon")[::-1]
    one, other = (build([parameter(24, 16)], lr=0.02) for build in builds)
    (before,) = step(one, 3)
    step(other, 4)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    other.param_groups[0]["params"][0].data.copy_(before)
    (first,), (second,) = step(one, 0), step(other, 0)
    assert float((first - second).norm() / (first - before).norm()) < 0.05


MODES: list[tuple[dict[str, Any], ScaleMode]] = [
    ({}, ScaleMode.SHAPE_SCALING),
    ({"adjust_lr_fn": "original"}, ScaleMode.SHAPE_SCALING),
    ({"adjust_lr_fn": "match_rms_adamw"}, ScaleMode.MATCH_RMS_ADAMW),
    *(({"scale_mode": mode.value}, mode) for mode in ScaleMode),
]


@pytest.mark.parametrize(("options", "mode"), MODES, ids=str)
def test_megatrons_scales_are_chosen_by_name(options: dict[str, Any], mode: ScaleMode) -> None:
    rule = optim.Muon([parameter()], extra_scale_factor=0.2, **options).rule
    assert rule == replace(rule, scale_mode=mode, extra_scale_factor=0.2)  # type: ignore[type-var]


def test_the_eps_of_other_parameters_is_their_own() -> None:
    bias = nn.Parameter(torch.zeros(3))
    bias.grad = torch.full((3,), 1e-3)
    optim.Muon([bias], lr=1.0, weight_decay=0.0, scalar_optimizer="adam", scalar_eps=1e-3).step()
    torch.testing.assert_close(bias.detach(), torch.full((3,), -0.5))  # Adam's first step is g / (|g| + eps)
