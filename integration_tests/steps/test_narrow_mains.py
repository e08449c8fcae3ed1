"""Main values in scaled fp16 or in 24 bits: the weights of one process on any layout, and steps that bf16 loses."""

from typing import Any

import pytest
import torch
from parity import Case, Numbers, Spread, Wrapping, train
from torch import nn

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

ROUNDING_OF_BF16 = 2.0**-7
FIELDS: dict[str, dict[str, Any]] = {
    "fp16": {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
    "24 bits": {"use_precision_aware_optimizer": True, "main_params_dtype": torch.int8},
}
TOLERANCES = {  # one more rounding of a bf16 weight; and of an fp16 main value, by 2**-11, before it
    "fp16": ROUNDING_OF_BF16 + 2.0**-10,
    "24 bits": ROUNDING_OF_BF16,
}


def case(rule: str, spread: Spread, wrapping: Wrapping, size: int, *, clips: bool = False) -> Case:
    return Case(size=size, spread=spread, numbers=Numbers.BF16, rule=rule, clips=clips, wrapping=wrapping)


CASES = [
    case("adam", Spread.REPLICATED, Wrapping.PLAIN, 2),
    case("adam", Spread.FLAT, Wrapping.PLAIN, 4),
    case("adam", Spread.FLAT, Wrapping.OVERLAP, 2, clips=True),
    case("lion", Spread.FLAT, Wrapping.WRAPPED, 2),
    case("sgd", Spread.FLAT, Wrapping.PLAIN, 3),
    case("muon", Spread.WHOLE, Wrapping.PLAIN, 2),
    case("muon", Spread.WHOLE, Wrapping.WRAPPED, 4),
    case("soap", Spread.WHOLE, Wrapping.PLAIN, 2, clips=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", FIELDS)
def test_any_rule_and_layout_has_the_weights_of_one_process(name: str, case: Case) -> None:
    (want,) = train(case.alone, **FIELDS[name])
    for got in train(case, **FIELDS[name]):
        for param, weight in want.weights.items():
            if case.is_exact:
                assert torch.equal(got.weights[param], weight), param
            else:
                torch.testing.assert_close(got.weights[param], weight, rtol=TOLERANCES[name], atol=5e-4)


# Adam moves by lr = 1e-3; each step below 1 is rounded to a multiple of 2**-11, or of 2**-16. bf16 would stay at 1.
STEP_ERRORS = {"fp16": 2.0**-12, "24 bits": 2.0**-17}


@pytest.mark.parametrize("name", FIELDS)
def test_mains_follow_steps_that_the_parameter_rounds_away(name: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    config = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=0.0, bf16=True, **FIELDS[name])
    optimizer = get_optimizer(config, [model], {})
    for _ in range(8):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    (main,) = optimizer.get_parameters()
    torch.testing.assert_close(main, torch.full_like(main, 1 - 8 * 1e-3), rtol=0, atol=8 * STEP_ERRORS[name])
    assert model.weight.max() < 1.0
    assert name != "fp16" or torch.equal(model.weight.detach(), main.bfloat16())
