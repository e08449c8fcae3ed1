"""State and update on the host: the effect of the six fields, and that training is otherwise unchanged."""

from typing import Any

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from parity import roles_over
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.comm import Alone
from opt_kernels.hooks import CautiousUpdate
from opt_stack import Optimizer, get_optimizer

BF16 = torch.bfloat16
FP32 = torch.float32
PLAIN: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 1.0}
OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
SIZES = (6, 10, 16, 64)


class Vectors(nn.Module):
    """Four vectors, of 96 elements together."""

    def __init__(self, dtype: torch.dtype = FP32):
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, size).to(dtype)) for size in SIZES)

    def set_grads(self, step: int) -> None:
        for number, param in enumerate(self.values):
            generator = torch.Generator().manual_seed(10 * step + number)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)

    def trained(self, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
        for step in range(steps):
            self.set_grads(step)
            optimizer.step()
        return [param.detach().clone() for param in self.values]


def built(model: nn.Module, **fields: Any) -> Optimizer:
    return get_optimizer(OptimizerConfig(**{**PLAIN, **fields}), [model], {}, pg_collection=roles_over(Alone()))


def state_bytes(dtype: torch.dtype = FP32, **fields: Any) -> dict[str, int]:
    """Bytes of state on the device and on the host, for a model on a device."""

    def rank_main(one: DeferredRank) -> dict[str, int]:
        seen = {"host": 0, "device": 0}
        for piece in (piece for unit in built(Vectors(dtype), **fields).stepper.units for piece in unit.pieces):
            for tensor in (*piece.state.values(), *piece.main.kept.values()):
                seen["host" if one.device.memory.is_on_host(tensor) else "device"] += tensor.nbytes
        return seen

    found: dict[str, int] = run_deferred(1, rank_main, seed=0)[0]
    return found


def test_offloaded_state_lives_on_the_host() -> None:
    assert state_bytes() == {"host": 0, "device": 96 * 8}
    assert state_bytes(BF16, **OFFLOAD, bf16=True) == {"host": 96 * 12, "device": 0}


@pytest.mark.parametrize(
    ("fraction", "numel"), [(0.01, 64), (64 / 96, 64), (0.67, 80), (80 / 96, 80), (0.9, 90), (0.99, 96), (1.0, 96)]
)
def test_the_fraction_of_the_elements_lives_on_the_host(fraction: float, numel: int) -> None:
    """Whole parameters, in the order of the layout (the last first), until there are enough elements."""
    fields = OFFLOAD | {"optimizer_offload_fraction": fraction}
    assert state_bytes(**fields) == {"host": 8 * numel, "device": 8 * (96 - numel)}
    plan = built(Vectors(), **fields).plan
    assert (plan.state_bytes(on_host=True), plan.state_bytes(on_host=False)) == (8 * numel, 8 * (96 - numel))
    assert f"of this on the host: {8 * numel} bytes; staging buffers, at most: {8 * numel}" in str(plan)


@pytest.mark.parametrize("of_torch", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_torch_updates_on_the_host_if_requested(of_torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other formats: see `modes/test_modes.py`."""
    stepped: list[str] = []
    step = of_torch.step
    monkeypatch.setattr(of_torch, "step", lambda self, *args: stepped.append(type(self).__name__) or step(self, *args))
    rule = {"optimizer": "sgd" if of_torch is torch.optim.SGD else "adam"}
    fields = {**OFFLOAD, **rule, "decoupled_weight_decay": of_torch is not torch.optim.Adam}
    ours = Vectors()
    theirs = Vectors()
    expected = ours.trained(built(ours, **fields))
    assert not stepped
    found = theirs.trained(built(theirs, **fields, use_torch_optimizer_for_cpu_offload=True))
    assert set(stepped) == {of_torch.__name__}
    torch.testing.assert_close(found, expected, rtol=5e-7, atol=1e-8)  # which differ where one fuses two operations


def test_torchs_optimizer_is_refused_with_hooks() -> None:
    """And with other rules and dtypes: see `modes/test_modes.py`."""
    config = OptimizerConfig(**PLAIN, **OFFLOAD, use_torch_optimizer_for_cpu_offload=True)
    with pytest.raises(ConfigError, match="use_torch_optimizer_for_cpu_offload=True: optimizer='adam' has"):
        get_optimizer(config, [nn.Linear(4, 4)], {}, hooks=(CautiousUpdate(),))


@pytest.mark.parametrize("overlap", [True, False])
def test_copies_run_on_the_side_stream_if_requested(overlap: bool) -> None:
    """Those to the host, and those back."""

    def rank_main(one: DeferredRank) -> set[bool]:
        model = Vectors()
        queue = one.device.mode.queue
        to_host: set[bool] = set()  # of copies on the side stream

        def noted(name: str, run: Any, given: Any) -> None:
            if name == "aten.copy_.default" and one.device.current_stream().name == "side":
                to_host.add(one.device.memory.is_on_host(given[0][0]))
            queue(name, run, given)

        optimizer = built(model, **OFFLOAD, overlap_cpu_optimizer_d2h_h2d=overlap)
        one.device.mode.queue = noted
        model.trained(optimizer, 1)
        return to_host

    assert run_deferred(1, rank_main, seed=0) == [{True, False} if overlap else set()]


@pytest.mark.parametrize("pin_grads", [True, False])
@pytest.mark.parametrize("pin_params", [True, False])
def test_staging_is_pinned_if_requested(pin_grads: bool, pin_params: bool) -> None:
    def rank_main(one: DeferredRank) -> list[tuple[torch.dtype, bool]]:
        asked: list[tuple[torch.dtype, bool]] = []
        host_empty = one.device.host_empty

        def noted(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
            asked.append((dtype, pinned))
            return host_empty(numel, dtype, pinned=pinned)

        one.device.host_empty = noted
        model = Vectors(torch.float16)
        pins = {"pin_cpu_grads": pin_grads, "pin_cpu_params": pin_params}
        model.trained(built(model, fp16=True, initial_loss_scale=1.0, **OFFLOAD, **pins), 1)
        return asked

    [asked] = run_deferred(1, rank_main, seed=0)
    num_params = len(list(Vectors(torch.float16).parameters()))
    assert asked == [(torch.float16, pin_params)] * num_params + [(torch.float16, pin_grads)] * num_params
