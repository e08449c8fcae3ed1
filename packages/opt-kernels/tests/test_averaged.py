"""Drop-ins that evaluate other weights than they train: what parameters, states and checkpoints hold in either mode."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from drop_ins import parameter, step
from torch import Tensor

from opt_kernels import optim
from opt_kernels.formulas import RisingRates
from opt_kernels.params import MAIN

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float32 mains": {"dtype": torch.bfloat16, "mains": "float32"},
    "remainders, 8 bit": {
        "dtype": torch.bfloat16, "mains": "remainder", "z_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8,
    },
    "float64": {"dtype": torch.float64},
}  # fmt: skip
ON_KINDS = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def build(*, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Tensor, optim.AdamWScheduleFree]:
    param = parameter(300, dtype=dtype)
    return param, optim.AdamWScheduleFree([param], lr=0.05, backend="torch", **options)


@ON_KINDS
def test_evaluation_leaves_no_trace(kind: dict[str, Any]) -> None:
    (a, plain) = build(**kind)
    (b, evaluated) = build(**kind)
    for seed in range(6):
        step(plain, seed)
        step(evaluated, seed)
        evaluated.eval()
        evaluated.eval()  # twice is once
        evaluated.train()
    assert torch.equal(a, b)
    evaluated.train(False)
    assert not torch.equal(a, b)
    z = evaluated.state[b]["z"]
    y = a.detach()
    if "mains" not in kind:
        expected = y.double() + (1 - 1 / 0.9) * (z.double() - y.double())
        torch.testing.assert_close(b.double(), expected, rtol=2 * torch.finfo(b.dtype).eps, atol=1e-7)


@ON_KINDS
@pytest.mark.parametrize("evaluating", [False, True], ids=["saved in training", "saved in evaluation"])
def test_a_run_resumed_from_either_mode_equals_the_unbroken_run(kind: dict[str, Any], evaluating: bool) -> None:
    (a, first) = build(**kind)
    (b, second) = build(**kind)
    step(first, 0, 1, 2)
    if evaluating:
        first.eval()
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    weights = a.detach().clone()
    assert saved["param_groups"][0]["train_mode"] is not evaluating
    with torch.no_grad():
        b.copy_(weights)  # as a model's checkpoint of that mode has them
    second.load_state_dict(saved)
    assert torch.equal(b, weights)
    assert second.is_training is not evaluating
    for optimizer in (first, second):
        optimizer.train()
        step(optimizer, 3, 4, 5)
    for name, value in {"param": a, **first.state[a]}.items():
        assert torch.equal(value, b if name == "param" else second.state[b][name]), name
    assert MAIN not in saved["state"][0] or saved["state"][0][MAIN].dtype is torch.float32


def test_trained_weights_follow_from_a_saved_average() -> None:
    (a, first) = build()
    (b, second) = build()
    step(first, 0, 1, 2)
    trained = a.detach().clone()
    first.eval()
    saved = first.state_dict()
    del saved["state"][0]["trained_weights"]
    b.data.copy_(a)
    second.load_state_dict(saved)
    second.train()
    torch.testing.assert_close(b.detach(), trained)


def test_a_step_in_evaluation_mode_is_refused_also_by_copies() -> None:
    param, optimizer = build()
    before = param.detach().clone()
    optimizer.eval()
    optimizer.train()
    assert torch.equal(param, before), "moved before the first step"
    step(optimizer, 0, 1)
    trained = param.detach().clone()
    optimizer.eval()
    shown = param.detach().clone()
    with pytest.raises(RuntimeError, match=r"call optimizer.train\(\) before"):
        step(optimizer, 0)
    assert torch.equal(param, shown)
    copied = copy.deepcopy(optimizer)
    copied.train()
    assert torch.equal(copied.param_groups[0]["params"][0], trained)
    assert not optimizer.is_training


@pytest.mark.filterwarnings("error::UserWarning")
def test_weights_loaded_in_evaluation_mode_are_not_lost_silently() -> None:
    param, optimizer = build(dtype=torch.bfloat16, mains="float32")
    step(optimizer, 0, 1)
    before = optimizer.state[param]["main"].clone()
    for _ in range(2):
        optimizer.eval()
        copy.deepcopy(optimizer.state_dict())
        optimizer.train()
    assert torch.equal(optimizer.state[param]["main"], before)
    optimizer.eval()
    with torch.no_grad():
        param.fill_(3.0)
    with pytest.warns(UserWarning, match="written in evaluation mode"):
        optimizer.train()


@pytest.mark.parametrize("rates", [(0.0, 0.01, 0.01), (0.01, 0.02, 0.03), (0.03, 0.02, 0.01, 0.02), (0.01, 0.01)])
def test_a_rate_that_rises_is_warned_of_once(rates: tuple[float, ...]) -> None:
    """The average is that of a rate that does not rise: with a warmup outside, it was a fifth of the way off."""
    _, optimizer = build()
    rises = [max(rates[: place + 1]) > rates[0] for place in range(len(rates))]
    for place, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(optimizer, place)
        has_just_risen = rises[place] and not any(rises[:place])
        assert [str(found.message).split(":")[0] for found in caught] == (
            [f"the lr of group 0 rose from {rates[0]:g} to {rate:g}"] if has_just_risen else []
        )


def test_a_rate_on_a_device_hides_no_other() -> None:
    rates = RisingRates()
    unread = {"lr": torch.ones((), device="meta")}
    rates.note(enumerate([unread, {"lr": 0.1}]))
    with pytest.warns(UserWarning, match="the lr of group 1 rose from 0.1 to 0.2"):
        rates.note(enumerate([unread, {"lr": 0.2}]))
