"""Main values in 24 bits (`main_params_dtype=torch.int8`): bits of a step, other precisions and back, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import run_deferred
from parity import roles_over
from resuming import begin, state_of, train
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_distributed.pieces import Numbers as Format
from opt_kernels.codecs.narrow import join, split_
from opt_stack import Optimizer, get_optimizer

SHORT = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}


def one_layer(*shape: int, **fields: Any) -> tuple[nn.Parameter, Optimizer]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    config = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=0.0, bf16=True, **{**SHORT, **fields})
    return model.weight, get_optimizer(config, [model], {})


def stepped(weight: nn.Parameter, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        assert optimizer.step().success


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("rule", ["adam", "sgd", "lion", "adan", "muon", "adaptive_muon", "soap"])
def test_a_step_is_that_of_fp32_main_values_rounded_to_24_bits(rule: str, order: str) -> None:
    """The next step begins at the rounded values."""
    weight, optimizer = one_layer(40, 30, optimizer=rule)
    if order == "columns":
        model = nn.Module()
        model.weight = nn.Parameter(weight.detach().t().contiguous().t())
        weight, optimizer = model.weight, get_optimizer(optimizer.config, [model], {})
    wide, in_fp32 = one_layer(40, 30, optimizer=rule, main_params_dtype=torch.float32, store_param_remainders=False)
    for step in range(6):
        stepped(weight, optimizer, range(step, step + 1))
        stepped(wide, in_fp32, range(step, step + 1))
        (main,) = in_fp32.get_parameters()
        rounded, bits = torch.empty_like(wide), torch.empty(40, 30, dtype=torch.int8)
        split_(rounded, bits, main)
        assert torch.equal(optimizer.get_parameters()[0], join(rounded, bits))
        assert torch.equal(weight, rounded)
        main.copy_(join(rounded, bits))


@pytest.mark.parametrize("shape", [(300,), (0,), (4, 0)], ids=str)
def test_an_overflow_changes_no_byte_and_nothing_is_no_error(shape: tuple[int, ...]) -> None:
    weight, optimizer = one_layer(*shape)
    stepped(weight, optimizer, range(2))
    (held,) = [piece for unit in optimizer.stepper.units for piece in unit.pieces] or [None]
    kept = () if held is None else held.main.kept()
    before = [tensor.clone() for tensor in (weight.detach(), *kept)]
    weight.grad = torch.full_like(weight, torch.inf)
    assert bool(optimizer.step().success) is (weight.numel() == 0)
    assert all(map(torch.equal, before, (weight.detach(), *kept)))


OTHERS: dict[str, dict[str, Any]] = {
    "fp32 mains": {"main_params_dtype": torch.float32, "store_param_remainders": False},
    "16-bit remainders": {"main_params_dtype": torch.float32},
    "itself": {},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_goes_to_another_precision_and_back_without_a_lost_bit(name: str) -> None:
    weight, optimizer = one_layer(40, 30)
    stepped(weight, optimizer, range(3))
    other, wide = one_layer(40, 30, **OTHERS[name])
    wide.load_state_dict(optimizer.state_dict())
    assert torch.equal(wide.get_parameters()[0], optimizer.get_parameters()[0])
    assert torch.equal(other, optimizer.get_parameters()[0].bfloat16()) or name != "fp32 mains"
    again, back = one_layer(40, 30)
    back.load_state_dict(wide.state_dict())
    stepped(weight, optimizer, range(3, 6))
    stepped(again, back, range(3, 6))
    assert torch.equal(again, weight)
    assert torch.equal(back.get_parameters()[0], optimizer.get_parameters()[0])


def test_a_checkpoint_of_fp32_main_values_continues_in_24_bits(tmp_path: Path) -> None:
    wide = {"bf16": True}
    model, optimizer = begin(wide, torch.bfloat16)
    train(model, optimizer, range(2))
    save(state_of(model, optimizer), tmp_path / "wide")
    other, short = begin({**wide, **SHORT}, torch.bfloat16)
    train(other, short, range(5, 6))  # other weights, so that a missing load is noticed
    short.load_state_dict(load(state_of(other, short), tmp_path / "wide").state["optimizer"])
    for one, two in zip(optimizer.get_parameters(), short.get_parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=2.0**-16, atol=0)
    losses = train(model, optimizer, range(2, 6)), train(other, short, range(2, 6))
    assert losses[1] == pytest.approx(losses[0], abs=2e-2)


def test_half_of_it_on_the_host_has_the_bits_of_none() -> None:
    def run(comm: Comm, **fields: Any) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)).bfloat16()
        for number, param in enumerate(model.parameters()):
            param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
        config = OptimizerConfig(lr=1e-2, clip_grad=0.0, bf16=True, **SHORT, **fields)
        optimizer = get_optimizer(config, [model], pg_collection=roles_over(comm))
        for step in range(3):
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            assert optimizer.step().success
        return [*(param.detach().clone() for param in model.parameters()), *optimizer.get_parameters()]

    (want,) = run_threads(1, run)
    on_host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    for found in (
        *run_threads(1, lambda comm: run(comm, **on_host)),
        *run_deferred(1, lambda one: run(one.comm, **on_host), seed=0),
    ):
        assert all(map(torch.equal, found, want))


def test_the_plan_counts_one_byte() -> None:
    model = nn.Linear(64, 64, bias=False).bfloat16()
    config = OptimizerConfig(bf16=True, **SHORT, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8)
    optimizer = get_optimizer(config, [model], {})
    (unit,) = optimizer.stepper.units
    assert unit.state_bytes() == 64 * 64 * 3 + 2 * 4 * 64 * 64 // 128
    assert {*optimizer.plan.units[0].numbers.values()} == {Format.SHORT_REMAINDER}
    assert "24 bits as bf16 + 8-bit remainder" in str(optimizer.plan)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**SHORT}, "main_params_dtype=torch.int8: is an 8-bit remainder of bf16 parameters; set bf16=True"),
        ({**SHORT, "fp16": True}, "main_params_dtype=torch.int8: is an 8-bit remainder of bf16 parameters"),
        ({**SHORT, "bf16": True, "store_param_remainders": False}, "but store_param_remainders=False; set only one"),
        ({"bf16": True, "main_params_dtype": torch.int8}, "has no effect without use_precision_aware_optimizer"),
        ({**SHORT, "bf16": True, "fp8_recipe": "delayed"}, "main_params_dtype=torch.int8: excludes fp8_recipe"),
    ],
)
def test_configurations_without_bf16_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**fields)
    assert message in str(caught.value)
