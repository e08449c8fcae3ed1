"""Main values in scaled fp16 or in 24 bits: any rule and layout has the weights of one process."""

from typing import Any

import pytest
import torch
from parity import Case, Numbers, Spread, Wrapping, train

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
