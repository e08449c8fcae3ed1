"""Main values in scaled fp16: blocks with one scale, skipped steps, checkpoints in other precisions, refusals."""

from pathlib import Path

import pytest
import torch
from parity import roles_over
from resuming import begin, state_of, train
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_distributed.pieces import CodedMain
from opt_distributed.step import unit as unit_of_a_step
from opt_stack import Optimizer, get_optimizer

FP16_MAINS = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16}


def test_no_rank_cuts_through_elements_of_one_scale() -> None:
    config = OptimizerConfig(bf16=True, use_distributed_optimizer=True, **FP16_MAINS)

    def starts(comm: Comm) -> list[int]:
        model = nn.Linear(64, 5, bias=False, dtype=torch.bfloat16)  # 320 elements: in equal halves, 192 and 128
        nn.init.ones_(model.weight)
        built = get_optimizer(config, [model], pg_collection=roles_over(comm))
        return [piece.of_param.start for unit in built.stepper.units for piece in unit.pieces]

    assert run_threads(2, starts) == [[0], [256]]


def one_layer(*shape: int, **fields: object) -> tuple[nn.Parameter, Optimizer]:
    model = nn.Module()
    generator = torch.Generator().manual_seed(1)
    model.weight = nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
    config = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=0.0, bf16=True, **FP16_MAINS, **fields)
    return model.weight, get_optimizer(config, [model], {})


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_few_elements_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    largest, opened = 0, 0
    open_, close_ = CodedMain.open_, CodedMain.close_

    def opening(main: CodedMain) -> Tensor:
        nonlocal opened, largest
        opened += main.target.numel()
        largest = max(largest, opened)
        return open_(main)

    def closing(main: CodedMain, *, skip: Tensor | None = None) -> None:
        nonlocal opened
        opened -= main.target.numel()
        close_(main, skip=skip)

    monkeypatch.setattr(unit_of_a_step, "DECODED_NUMEL", 500)
    monkeypatch.setattr(CodedMain, "open_", opening)
    monkeypatch.setattr(CodedMain, "close_", closing)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for _ in range(8)])
    config = OptimizerConfig(optimizer=optimizer, lr=1e-3, bf16=True, **FP16_MAINS)
    built = get_optimizer(config, [model], {})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    built.step()
    assert opened == 0
    assert largest <= 500 + 256


def test_an_overflow_changes_no_byte() -> None:
    weight, optimizer = one_layer(300)
    (held,) = [piece for unit in optimizer.stepper.units for piece in unit.pieces]
    before = [tensor.clone() for tensor in (weight.detach(), *held.main.kept())]
    weight.grad = torch.full_like(weight, torch.inf)
    assert not optimizer.step().success
    assert all(map(torch.equal, before, (weight.detach(), *held.main.kept())))


TINY, HUGE = torch.finfo(torch.bfloat16).smallest_normal, torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize(
    "values",
    [[0.0, -0.0], [TINY / 128, -TINY / 64, 0.0], [TINY, 3 * TINY], [HUGE, -HUGE / 8], [1024.0, 2.0**-14, 2.0**-28]],
    ids=["zeros", "denormals", "smallest", "largest", "far apart"],
)
def test_mains_begin_with_the_value_of_the_parameter(values: list[float]) -> None:
    target = torch.tensor(values).bfloat16()
    assert torch.equal(CodedMain.of(target.clone()).value(), target.float())


def test_elements_lose_what_is_far_below_the_largest_of_their_block_and_no_other() -> None:
    far = torch.tensor([2.0**100, 1.7 * 2.0**60, 2.0**59, 1.0] + [0.0] * 124 + [1.0, 3.0])
    value = CodedMain.of(far.bfloat16()).value()
    assert torch.equal(value[128:], far[128:])
    assert (value - far.bfloat16().float()).abs().max() <= 2.0**61  # 2**-39 of the largest
    assert value[3] == 0.0


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_element_that_is_not_finite_makes_its_block_nan(bad: float) -> None:
    """As with a NaN weight in any precision, the NaN must remain, never become a finite value."""
    main = CodedMain.of(torch.ones(256).bfloat16())
    main.open_()[5] = bad
    main.close_()
    assert main.value()[:128].isnan().all()
    assert torch.equal(main.value()[128:], torch.ones(128))
    assert main.target[:128].isnan().all()
    assert torch.equal(main.target[128:], torch.ones(128).bfloat16())


def test_a_main_value_beyond_the_parameters_dtype_is_kept() -> None:
    main = CodedMain.of(torch.ones(3, dtype=torch.float16))
    main.open_().fill_(70_000.0)
    main.close_()
    torch.testing.assert_close(main.value(), torch.full((3,), 70_000.0), rtol=2.0**-11, atol=0)
    assert main.target.isinf().all()


def test_a_skip_decided_on_the_device_changes_no_byte() -> None:
    main = CodedMain.of(torch.randn(300).bfloat16())
    before = [tensor.clone() for tensor in (main.target, *main.kept())]
    for skips in (True, False):
        main.open_().mul_(2.0)
        main.close_(skip=torch.tensor(skips))
        assert all(map(torch.equal, before, (main.target, *main.kept()))) is skips


def test_the_plan_counts_the_bytes_that_are_kept() -> None:
    _, optimizer = one_layer(3, 100)
    kept = sum(unit.state_bytes() for unit in optimizer.stepper.units)
    assert optimizer.plan.state_bytes() == kept == 300 * (2 + 8) + 3 * 4
    assert "scaled fp16 mains" in str(optimizer.plan)


OTHERS = {
    "fp32 copies": ({"bf16": True}, torch.bfloat16),
    "remainders": ({"bf16": True, "use_precision_aware_optimizer": True}, torch.bfloat16),
    "fp32": ({}, torch.float32),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_goes_to_other_precisions_and_back(name: str, tmp_path: Path) -> None:
    model, optimizer = begin({"bf16": True, **FP16_MAINS}, torch.bfloat16)
    train(model, optimizer, range(3))
    mains = optimizer.get_parameters()
    save(state_of(model, optimizer), tmp_path / "there")
    fields, dtype = OTHERS[name]
    other, wide = begin(fields, dtype)
    wide.load_state_dict(load(state_of(other, wide), tmp_path / "there", dtype="cast").state["optimizer"])
    for got, want in zip(wide.get_parameters(), mains, strict=True):
        assert torch.equal(got, want)
    save(state_of(other, wide), tmp_path / "back")
    again, narrow = begin({"bf16": True, **FP16_MAINS}, torch.bfloat16)
    narrow.load_state_dict(load(state_of(again, narrow), tmp_path / "back", dtype="cast").state["optimizer"])
    for got, want in zip(narrow.get_parameters(), mains, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_fp16_mains_of_fp32_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"main_params_dtype=torch.float16: is allowed for 16-bit parameters only"):
        OptimizerConfig(**FP16_MAINS)
