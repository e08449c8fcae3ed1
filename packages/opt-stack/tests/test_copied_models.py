"""A copied model with its own optimizer, which has loaded the same state, is independent of the original."""

import copy
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, weights
from torch import nn

from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

Pair = tuple[nn.Module, Optimizer]
REMAINDERS = {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "remainders": REMAINDERS,
    "muon": {"optimizer": "muon", "bf16": True},
}


def built(form: str) -> Pair:
    config = OptimizerConfig(lr=1e-1, clip_grad=1.0, **FORMS[form])
    model = make_model(config.precision.params)
    return model, get_optimizer(config, [model])


def copied(form: str, pair: Pair) -> Pair:
    """A copy of the model, with another optimizer that has loaded the state of the first."""
    model = copy.deepcopy(pair[0])
    optimizer = get_optimizer(OptimizerConfig(lr=1e-1, clip_grad=1.0, **FORMS[form]), [model])
    optimizer.load_state_dict(pair[1].state_dict())
    return model, optimizer


def step(pair: Pair, number: int) -> None:
    model, optimizer = pair
    optimizer.zero_grad()
    backward(model, number)
    optimizer.step()


def trained(form: str, *numbers: int) -> Pair:
    pair = built(form)
    for number in numbers:
        step(pair, number)
    return pair


def assert_same(one: Pair, other: Pair) -> None:
    assert_equal(weights(one[0]), weights(other[0]))
    assert_equal(one[1].state_dict()["state"], other[1].state_dict()["state"])


@pytest.mark.parametrize("form", FORMS)
def test_a_copied_model_and_its_original_continue_as_if_each_were_alone(form: str) -> None:
    original = trained(form, 0, 1, 2)
    for refused in (original, original[1]):
        with pytest.raises(TypeError, match="load this one's state_dict"):
            copy.deepcopy(refused)
    other = copied(form, original)
    for number in (3, 4, 5):
        step(original, number)
        step(other, 10 + number)
    assert_same(original, trained(form, 0, 1, 2, 3, 4, 5))
    assert_same(other, trained(form, 0, 1, 2, 13, 14, 15))
    assert not torch.equal(*(next(pair[0].parameters()) for pair in (original, other)))
