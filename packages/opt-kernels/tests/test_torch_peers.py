"""Drop-in optimizers beside the classes of the same names in torch.optim: steps, arguments, states, parameters."""

import copy
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from drop_ins import parameter, step
from elementwise_works import ON_FAST, device_of, on
from torch import Tensor, nn

from opt_kernels import optim

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
PLAIN = ["Adam", "AdamW", "SGD"]


def both(name: str) -> tuple[Any, Any]:
    return getattr(optim, name), getattr(torch.optim, name)


@on("float64", "reference", "torch", "cpp")
@pytest.mark.parametrize("name", PEERS)
def test_a_drop_in_takes_torchs_steps(name: str, backend: str) -> None:
    cls, options = PEERS[name]
    ours, theirs = both(cls)
    if backend == "float64":
        dtype = torch.float64
        steps = range(40)
    else:
        dtype = torch.float32
        steps = range(12)
    made = {"backend": None if backend == "float64" else backend, **options}
    optimizer = ours([parameter(9, 7, dtype=dtype), parameter(5, dtype=dtype)], **made)
    has_bits = backend == "torch" and name == "AdamW"  # it runs torch's fused operations
    fused = {"fused": True} if has_bits else {}
    other = theirs([parameter(9, 7, dtype=dtype), parameter(5, dtype=dtype)], **options, **fused)
    # torch keeps NAdam's product in float32, 2^-24 of it a step; float32 moments of float64 were seven digits off.
    exact = 1e-6 if cls == "NAdam" else 1e-12
    tolerance = {"rtol": exact, "atol": exact} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 2e-6}
    tolerance = {"rtol": 0, "atol": 0} if has_bits else tolerance
    torch.testing.assert_close(step(optimizer, *steps), step(other, *steps), **tolerance)
    states = {t.dtype for of in optimizer.state.values() for key, t in of.items() if key not in ("step", "mu_product")}
    assert states <= {dtype}


@pytest.mark.parametrize("to_torch", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "SGD nesterov"])
def test_training_continues_with_the_other_class(name: str, to_torch: bool) -> None:
    cls, options = PEERS[name]
    for num_steps in (0, 1, 7):
        one, other = (build([parameter()], **options) for build in both(cls)[:: 1 if to_torch else -1])
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
FLAGS = {"foreach", "fused", "maximize", "differentiable", "capturable", "amsgrad"}


@pytest.mark.parametrize("name", POSITIONAL)
def test_positional_arguments_have_torchs_order(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip("torch 2.9 brought Muon")
    ours, theirs = (build([parameter()], *POSITIONAL[name]).defaults for build in both(name))
    compared = theirs.keys() - (FLAGS - {"amsgrad"}) - {"decoupled_weight_decay"}
    assert {key: ours.get(key) for key in compared} == {key: theirs[key] for key in compared}


@pytest.mark.parametrize("name", PLAIN)
def test_flags_without_effect_or_always_on_are_accepted(name: str) -> None:
    ours, _ = both(name)
    expected = step(ours([parameter()]), 0, 1)
    flags = FLAGS - {"amsgrad"} if name == "SGD" else FLAGS
    for flag, value in [*product(flags, (None, False)), ("foreach", True), ("fused", True)]:
        assert torch.equal(step(ours([parameter()], **{flag: value}), 0, 1)[0], expected[0]), flag
    if name == "SGD":
        with pytest.raises(TypeError, match="amsgrad"):  # as torch's SGD
            ours([parameter()], amsgrad=False)


DENSE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x.reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    lambda x: x.reshape(4, 3, 2).permute(2, 0, 1),
    lambda x: x.reshape(1, 24, 1).transpose(0, 2),
    lambda x: x[:1, :1],
    lambda x: x[:0],
    lambda x: x[:, 4:],  # a shard without elements
]


@ON_FAST
def test_parameters_in_any_dense_order_move_as_torchs(backend: str) -> None:
    for name in PLAIN:
        results = []
        options = {"backend": backend}
        for build in both(name):
            params = [nn.Parameter(arrange(parameter().data.clone().to(device_of(backend)))) for arrange in DENSE]
            results.append(step(build(params, **options), 0, 1, 2))
            options = {}
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_sgd_groups_have_own_momentum_and_dampening_as_in_torch() -> None:
    results = []
    for build in both("SGD"):
        a, b, c = (parameter(seed=seed) for seed in range(3))
        groups = [{"params": [a]}, {"params": [b], "momentum": 0.8, "dampening": 0.5}, {"params": [c], "momentum": 0.0}]
        optimizer = build(groups, lr=0.1, momentum=0.9, dampening=0.25)
        without = build([parameter(seed=3)], lr=0.1)
        for number, momentum in enumerate((0.0, 0.9, 0.0, 0.5)):
            if number == 2:
                optimizer.param_groups[0]["dampening"] = 0.75
            without.param_groups[0]["momentum"] = momentum
            found = [*step(optimizer, number), *step(without, number)]
        results.append(found)
    torch.testing.assert_close(*results)
    dampened = optim.SGD([parameter()], lr=0.1, dampening=0.5)
    step(dampened, 0)
    dampened.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="set the momentum before the first step"):
        step(dampened, 1)


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
@pytest.mark.parametrize("options", OF_MUON.values(), ids=OF_MUON.keys())
def test_a_step_at_equal_arguments_is_torchs(options: dict[str, Any]) -> None:
    for shape in [(32, 128), (128, 32), (64, 64)]:
        before = parameter(*shape).detach()
        ours, theirs = (
            step(build([parameter(*shape)], **{"lr": 0.02, **options}), 0, 1, 2)[0] for build in both("Muon")
        )
        # Both iterate in bfloat16, whose unit is 0.4 %, rounding at other places; the steepest polynomials double
        # errors.
        assert float((ours - theirs).norm() / (theirs - before).norm()) < 0.05
        assert float((ours - before).norm() / (theirs - before).norm()) == pytest.approx(1.0, abs=0.01)


@needs_muon
@pytest.mark.parametrize("ours_first", [True, False])
def test_state_dicts_of_muon_are_exchanged_with_torchs(ours_first: bool) -> None:
    one, other = (build([parameter(24, 16)], lr=0.02) for build in both("Muon")[:: 1 if ours_first else -1])
    (before,) = step(one, 3)
    _ = step(other, 4)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    other.param_groups[0]["params"][0].data.copy_(before)
    (first,) = step(one, 0)
    (second,) = step(other, 0)
    assert float((first - second).norm() / (first - before).norm()) < 0.05


def test_the_eps_of_other_parameters_is_their_own() -> None:
    bias = nn.Parameter(torch.zeros(3))
    bias.grad = torch.full((3,), 1e-3)
    optim.Muon([bias], lr=1.0, weight_decay=0.0, scalar_optimizer="adam", scalar_eps=1e-3).step()
    torch.testing.assert_close(bias.detach(), torch.full((3,), -0.5))  # Adam's first step is g / (|g| + eps)
