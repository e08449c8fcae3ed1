"""The memory of parameters: shared with others, and in another order of dimensions."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import sharded_state
from stack_models import backward, over, train
from torch import nn

from opt_checkpoint import load, save
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm.threads import ThreadComm
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

BF16 = OptimizerConfig(lr=1e-2, bf16=True)
SHARED = r"share memory; tie parameters by using one nn.Parameter twice"


def tied(*, frozen: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Two layers whose weights are two parameters over the same memory."""
    torch.manual_seed(0)
    first = nn.Linear(5, 5, bias=False)
    second = nn.Linear(5, 5, bias=False)
    second.weight = nn.Parameter(first.weight.data, requires_grad=not frozen)
    first.weight.data = second.weight.data = first.weight.data.to(dtype)
    return nn.Sequential(first, nn.Tanh(), second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_two_parameters_over_one_memory_are_refused(dtype: torch.dtype) -> None:
    """In one process, each had its own main values in fp32, and the second update overwrote the first."""
    config = BF16 if dtype is torch.bfloat16 else OptimizerConfig(lr=1e-2)
    with pytest.raises(ValueError, match=rf"0.weight and 2.weight {SHARED}"):
        get_optimizer(config, [tied(dtype=dtype)], {})
    with pytest.raises(ValueError, match=SHARED):
        get_optimizer(config, [*tied(dtype=dtype)], {})  # as chunks


def test_a_frozen_parameter_may_share_memory_that_stays_in_place() -> None:
    model = tied(frozen=True)
    train(model, get_optimizer(BF16, [model], {}), range(2))
    assert torch.equal(model[0].weight, model[2].weight)


def buffered(*, frozen: bool) -> nn.Sequential:
    if frozen:
        return tied(frozen=True)
    model = nn.Sequential(nn.Linear(5, 5, bias=False).bfloat16())
    model[0].register_buffer("view", model[0].weight.data[1:3])
    return model


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("frozen", [False, True], ids=["buffer", "frozen parameter"])
def test_a_tie_that_moving_into_buffers_would_break_is_refused(wrapped: bool, frozen: bool) -> None:
    """With ZeRO-1 the trained weight moved away, and the other went on with the values of before the first step."""
    shared: dict[str, Any] = {"use_distributed_optimizer": True}

    def rank_main(comm: ThreadComm) -> None:
        roles = over(comm)
        model = buffered(frozen=frozen)

        def build() -> object:
            if wrapped:
                return DistributedDataParallel(DistributedDataParallelConfig(**shared), model, groups=roles)
            return get_optimizer(OptimizerConfig(lr=1e-2, bf16=True, **shared), [model], {}, pg_collection=roles)

        with pytest.raises(ValueError, match=SHARED):
            build()

    run_threads(2, rank_main)


def test_neighbours_in_one_memory_are_trained() -> None:
    """Views of one tensor that do not overlap, as of a fused weight."""
    fused = torch.zeros(10, 5)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False))
    for number, layer in enumerate(model):
        layer.weight = nn.Parameter(fused[5 * number : 5 * number + 5])
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.0), [model], {})
    with torch.no_grad():
        fused.fill_(0.1)
    backward(model, 0)
    assert optimizer.step().success
    assert (fused != 0.1).all()


NUMBERS = {
    "fp32": {},
    "fp32 copies": {"bf16": True},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
    "24 bits": {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.int8},
    "scaled fp16": {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
    "host": {"bf16": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
}


def built(config: OptimizerConfig, memory_format: torch.memory_format) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(config.precision.params)
    model.to(memory_format=memory_format)
    return model, get_optimizer(config, [model], {})


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param)
    assert optimizer.step().success


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_channels_last_has_the_bits_of_contiguous_parameters(rule: str, numbers: dict[str, object]) -> None:
    """With copies in fp32, the first step raised LayoutError, on a model that the optimizer had been built for."""
    config = OptimizerConfig(lr=1e-2, optimizer=rule, **numbers)  # type: ignore[arg-type]
    last = built(config, torch.channels_last)
    plain = built(config, torch.contiguous_format)
    for seed in range(3):
        step(*last, seed)
        step(*plain, seed)
    resumed = built(config, torch.channels_last)
    resumed[0].load_state_dict(plain[0].state_dict())
    resumed[1].load_state_dict(plain[1].state_dict())
    for trained in (last, plain, resumed):
        step(*trained, 3)
    for one, other, again in zip(*(model.parameters() for model, _ in (last, plain, resumed)), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(again, other)


NARROW = {
    "int8": {"optimizer": "lion", "optimizer_options": {"exp_avg_dtype": "int8"}},
    "fp8": {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "scaled fp16": {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
    },
}


@pytest.mark.parametrize("narrow", NARROW.values(), ids=NARROW)
def test_codes_of_channels_last_parameters_are_saved_and_loaded(narrow: dict[str, object], tmp_path: Path) -> None:
    """`sharded_state_dict` raised "view size is not compatible", because blocks of codes are runs of memory."""
    config = OptimizerConfig(lr=1e-2, **narrow)  # type: ignore[arg-type]
    model, optimizer = built(config, torch.channels_last)
    step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    save(sharded_state(model, optimizer), tmp_path / "saved")
    step(model, optimizer, 1)
    wanted = [param.detach().clone() for param in model.parameters()]
    for memory_format in (torch.channels_last, torch.contiguous_format):
        other, resumed = built(config, memory_format)
        state = load(sharded_state(other, resumed), tmp_path / "saved", dtype="cast").state
        resumed.load_state_dict(state["optimizer"])
        step(other, resumed, 1)
        for param, value in zip(other.parameters(), wanted, strict=True):
            if memory_format is torch.channels_last:
                assert torch.equal(param, value)
            else:  # encoded in other blocks: scales differ by less than a rounding unit of the codes
                torch.testing.assert_close(param, value, rtol=0, atol=2 * config.lr)  # a sign of Lion may turn
    with pytest.raises(ValueError, match="lacks exp_avg_scale"):
        built(config, torch.contiguous_format)[1].load_state_dict(saved)
    plain = built(config, torch.contiguous_format)[1].state_dict()
    with pytest.raises(ValueError, match="has exp_avg_scale"):
        built(config, torch.channels_last)[1].load_state_dict(plain)
    other, resumed = built(config, torch.channels_last)
    step(other, resumed, 0)
    resumed.load_state_dict(saved)
    step(other, resumed, 1)
    assert all(map(torch.equal, other.parameters(), wanted))
