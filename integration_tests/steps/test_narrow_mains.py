"""Main values in scaled fp16 or in 24 bits: steps that bf16 loses, and what is kept, also in a skipped step."""

from typing import Any

import pytest
import torch
from torch import nn

from opt_config import OptimizerConfig
from opt_kernels.codecs import join, split_
from opt_kernels.params import CodedMain
from opt_stack import Optimizer, get_optimizer

BF16 = torch.bfloat16
SHORT: dict[str, Any] = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}


def one_layer(*shape: int, **fields: Any) -> tuple[nn.Parameter, Optimizer]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16))
    config = OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.0, "clip_grad": 0.0, "bf16": True, **fields})
    return model.weight, get_optimizer(config, [model], {})


def stepped(weight: nn.Parameter, optimizer: Optimizer, step: int) -> None:
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).to(BF16)
    assert optimizer.step().success


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion", "adan", "muon", "adaptive_muon", "soap"])
def test_a_step_is_that_of_fp32_main_values_rounded_to_24_bits(rule: str, order: str) -> None:
    """The next step begins at the rounded values."""
    weight, optimizer = one_layer(40, 30, optimizer=rule, **SHORT)
    if order == "columns":
        model = nn.Module()
        model.weight = nn.Parameter(weight.detach().t().contiguous().t())
        weight = model.weight
        optimizer = get_optimizer(optimizer.config, [model], {})
    in_fp32_fields = {**SHORT, "main_params_dtype": torch.float32, "store_param_remainders": False}
    wide, in_fp32 = one_layer(40, 30, optimizer=rule, **in_fp32_fields)
    for step in range(6):
        stepped(weight, optimizer, step)
        stepped(wide, in_fp32, step)
        (main,) = in_fp32.get_parameters()
        rounded = torch.empty_like(wide)
        bits = torch.empty(40, 30, dtype=torch.int8)
        split_(rounded, bits, main)
        assert torch.equal(optimizer.get_parameters()[0], join(rounded, bits))
        assert torch.equal(weight, rounded)
        main.copy_(join(rounded, bits))


# --- blocks of 128 elements with one scale ----------------------------------------------------------------------------

TINY = torch.finfo(BF16).smallest_normal
HUGE = torch.finfo(BF16).max


def test_mains_begin_with_the_parameter_within_block_precision() -> None:
    for values in (
        [0.0, -0.0],
        [TINY / 128, -TINY / 64, 0.0],
        [TINY, 3 * TINY],
        [HUGE, -HUGE / 8],
        [1024.0, 2.0**-14, 2.0**-28],
    ):
        target = torch.tensor(values).to(BF16)
        assert torch.equal(CodedMain.of(target.clone()).value(), target.float()), values
    far = torch.tensor([2.0**100, 1.7 * 2.0**60, 2.0**59, 1.0] + [0.0] * 124 + [1.0, 3.0])
    value = CodedMain.of(far.to(BF16)).value()
    assert torch.equal(value[128:], far[128:])
    assert (value - far.to(BF16).float()).abs().max() <= 2.0**61  # 2**-39 of the largest
    assert value[3] == 0.0


def test_mains_keep_large_values_and_turn_a_nonfinite_block_nan() -> None:
    """As with a NaN weight in any precision, the NaN must remain, never become a finite value."""
    for bad in (torch.inf, torch.nan):
        main = CodedMain.of(torch.ones(256).to(BF16))
        main.open_()[5] = bad
        main.close_()
        for values in (main.value(), main.target):
            assert values[:128].isnan().all()
            assert torch.equal(values[128:].float(), torch.ones(128))
    main = CodedMain.of(torch.ones(3, dtype=torch.float16))
    main.open_().fill_(70_000.0)
    main.close_()
    torch.testing.assert_close(main.value(), torch.full((3,), 70_000.0), rtol=2.0**-11, atol=0)
    assert main.target.isinf().all()


def test_a_skip_decided_on_the_device_changes_no_byte() -> None:
    main = CodedMain.of(torch.randn(300).to(BF16))
    before = [tensor.clone() for tensor in (main.target, *main.kept.values())]
    for skips in (True, False):
        main.open_().mul_(2.0)
        main.close_(skip=torch.tensor(skips))
        assert all(map(torch.equal, before, (main.target, *main.kept.values()))) is skips
