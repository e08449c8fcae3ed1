"""Fields of `OptimizerConfig` for dtypes, the loss scale and clipping: what a step keeps and by how much it moves."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from named import BF16, FP16, FP32, PLAIN, Named, normal, pieces

from opt_config import OptimizerConfig
from opt_distributed.pieces import CodedMain
from opt_stack import get_optimizer

AWARE = {"bf16": True, "use_precision_aware_optimizer": True}


FLOAT8 = torch.float8_e4m3fn
# Fields; the dtypes of the parameter, of its main value (a copy, a remainder or codes), and of both moments.
NUMBERS: Mapping[str, tuple[Mapping[str, Any], tuple[Any, ...]]] = {
    "nothing": ({}, (FP32, None, FP32, FP32)),
    "fp16": ({"fp16": True, "initial_loss_scale": 8.0}, (FP16, FP32, FP32, FP32)),
    "bf16": ({"bf16": True}, (BF16, FP32, FP32, FP32)),
    "params_dtype": ({"params_dtype": BF16}, (BF16, FP32, FP32, FP32)),
    "use_precision_aware_optimizer": (AWARE, (BF16, torch.int16, FP32, FP32)),
    "main_params_dtype": ({**AWARE, "main_params_dtype": FP16}, (BF16, FP16, FP32, FP32)),
    "24-bit mains": ({**AWARE, "main_params_dtype": torch.int8}, (BF16, torch.int8, FP32, FP32)),
    "store_param_remainders": ({**AWARE, "store_param_remainders": False}, (BF16, FP32, FP32, FP32)),
    "of fp32 parameters": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": BF16}, (FP32, None, BF16, FP32),
    ),
    "lion": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": BF16, "optimizer": "lion"}, (FP32, None, BF16, None),
    ),
}  # fmt: skip
MOMENTS = {BF16: BF16, FP16: FP16, torch.uint8: FLOAT8}
NUMBERS |= {
    f"exp_avg_dtype {dtype}": ({**AWARE, "exp_avg_dtype": dtype}, (BF16, torch.int16, kept, FP32))
    for dtype, kept in MOMENTS.items()
}
NUMBERS |= {
    f"exp_avg_sq_dtype {dtype}": ({**AWARE, "exp_avg_sq_dtype": dtype}, (BF16, torch.int16, FP32, kept))
    for dtype, kept in MOMENTS.items()
}


@pytest.mark.parametrize("name", NUMBERS)
def test_mains_and_moments_are_kept_in_the_requested_formats(name: str) -> None:
    fields, kept = NUMBERS[name]
    model = Named(weight=normal(300, seed=1).to(kept[0]))
    optimizer = get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {})
    (piece,) = pieces(optimizer)
    main, moments = piece.main, (piece.state.get("exp_avg"), piece.state.get("exp_avg_sq"))
    stored = main.kept()[0] if isinstance(main, CodedMain) else main.copy if main.copy is not None else main.remainder
    found = [None if tensor is None else tensor.dtype for tensor in (main.target, stored, *moments)]
    assert found == [*kept]
    assert optimizer.plan.state_bytes() == sum(unit.state_bytes() for unit in optimizer.stepper.units)


DYNAMIC = {"fp16": True, "initial_loss_scale": 64.0, "loss_scale_window": 3.0, "hysteresis": 2, "min_loss_scale": 1.0}
SCALES: Mapping[str, tuple[Mapping[str, Any], str, list[float]]] = {  # fields, steps (x: an overflow), scales
    "initial_loss_scale": ({"initial_loss_scale": 16.0}, "..", [16, 16, 16]),
    "loss_scale_window": ({"loss_scale_window": 2.0}, "....", [64, 64, 128, 128, 256]),
    "hysteresis": ({"hysteresis": 3}, "xxx", [64, 64, 64, 32]),
    "min_loss_scale": ({"min_loss_scale": 32.0}, "xxxx", [64, 64, 32, 32, 32]),
    "none of them": ({}, "...xxx", [64, 64, 64, 128, 128, 64, 32]),
    "loss_scale": ({"loss_scale": 4.0}, "..xx", [4, 4, 4, 4, 4]),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_loss_scale_follows_the_verdicts(name: str) -> None:
    fields, verdicts, want = SCALES[name]
    model = Named(weight=torch.zeros(5, dtype=FP16))
    optimizer = get_optimizer(OptimizerConfig(**PLAIN, **{**DYNAMIC, **fields}), [model], {})
    scales = [optimizer.scale_loss(torch.ones(())).item()]
    for verdict in verdicts:
        model.weight.grad = torch.full((5,), math.inf if verdict == "x" else 1.0, dtype=FP16)
        assert optimizer.step().success is (verdict == ".")
        scales.append(optimizer.scale_loss(torch.ones(())).item())
    assert scales == want
