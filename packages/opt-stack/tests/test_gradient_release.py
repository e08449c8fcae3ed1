"""Gradient release: the bits of the ordinary step without the memory of gradients, or a refusal that says why."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from stack_models import assert_equal, over
from torch import Tensor, nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig, ParamKey
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer, release_gradients

BF16 = torch.bfloat16
WIDTH = 8
AWARE = {"bf16": True, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True}


class Net(nn.Module):
    """A layer used twice, a tied one, a frozen one, one that odd steps skip; a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.skipped, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen.requires_grad_(False)
        numbers = torch.Generator().manual_seed(2)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=numbers) / 3)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.tied(torch.tanh(self.second(x)))
        return self.frozen(x if skip else self.skipped(x)) + self.empty.sum()


def loss_of(model: nn.Module, step: int, *, scale: float = 1.0) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(x.to(dtype), skip=step % 2 == 1).float().square().mean() * scale
    return loss


def build(dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[nn.Module, Optimizer]:
    model = Net().to(dtype)
    config = OptimizerConfig(**{"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, **fields})
    return model, get_optimizer(config, [model])


def train(model: nn.Module, optimizer: Optimizer, *, first: int = 0, last: int = 4) -> list[tuple[bool, float]]:
    found = []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        loss_of(model, step).backward()
        success, norm, zeros = optimizer.step()
        assert zeros is None
        optimizer.zero_grad()
        found.append((success, norm))
    return found


def weights(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Parameters, main values and state."""
    state = [value for one in optimizer.state_dict()["state"].values() for value in one.values()]
    return [value.detach().clone() for value in (*model.parameters(), *state) if isinstance(value, Tensor)]


NARROWEST = {"main_params_dtype": torch.int8, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "adam": (torch.float32, {}),
    "bf16 with fp32 mains": (BF16, {"bf16": True}),
    "bf16 with remainders, 8-bit moments": (
        BF16, {**AWARE, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    ),
    "bf16 with scaled fp16 mains": (
        BF16, {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
    ),
    "bf16 with 8-bit remainders and moments": (BF16, {**AWARE, **NARROWEST}),
    "sgd": (torch.float32, {"optimizer": "sgd"}),
    "lion": (BF16, {"bf16": True, "optimizer": "lion"}),
    "schedule_free": (torch.float32, {"optimizer": "schedule_free"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_weights_and_state_have_the_bits_of_the_ordinary_step(name: str) -> None:
    dtype, fields = CASES[name]
    model, optimizer = build(dtype, **fields)
    expected = train(model, optimizer)
    released_model, released = build(dtype, **fields)
    release_gradients(released)
    found = train(released_model, released)
    assert [success for success, _ in found] == [True] * 4
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-12)
    assert released.get_grad_norm() == found[-1][1]
    assert_equal(weights(released_model, released), weights(model, optimizer))


def test_norms_by_group_are_those_of_the_ordinary_step() -> None:
    """`grad_norms_by_group` was empty or stale, and the model's norm counted groups that are left out of it."""
    found = []
    for releases in (False, True):
        model = Net()
        overrides = {ParamKey(name="second.*"): {"clip_grad": False}}
        optimizer = get_optimizer(OptimizerConfig(lr=0.01, clip_grad=0.0), [model], overrides)
        if releases:
            release_gradients(optimizer)
            assert optimizer.grad_norms_by_group == {}
        loss_of(model, 0).backward()
        result = optimizer.step()
        found.append({**optimizer.grad_norms_by_group, "result": result.grad_norm, "asked": optimizer.get_grad_norm()})
    assert found[0]["adam"] > 0
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_a_released_run_goes_on_as_an_ordinary_one_and_back() -> None:
    model, optimizer = build()
    train(model, optimizer, last=6)
    other_model, other = build()
    release = release_gradients(other)
    train(other_model, other, last=2)
    release.remove()
    train(other_model, other, first=2, last=4)
    release_gradients(other)
    train(other_model, other, first=4, last=6)
    assert_equal(weights(other_model, other), weights(model, optimizer))


# --- one step off the road --------------------------------------------------------------------------------------------


def test_backward_leaves_no_gradient_and_may_not_run_twice() -> None:
    model, optimizer = build()
    release_gradients(optimizer)
    loss_of(model, 0).backward()
    assert all(param.grad is None for param in model.parameters() if param.numel())
    with pytest.raises(RuntimeError, match=r"a second gradient of .* arrived before optimizer.step\(\)"):
        loss_of(model, 2).backward()


def test_zero_grad_allows_training_after_a_failed_backward() -> None:
    model, optimizer = build()
    release_gradients(optimizer)
    handle = model.first.register_full_backward_pre_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0).backward()
    handle.remove()
    with pytest.warns(RuntimeWarning, match=r"zero_grad\(\) dropped an iteration .* a retried backward updates"):
        optimizer.zero_grad()
    assert train(model, optimizer, last=1)[0][0]


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_nothing_is_updated_from_gradients_that_are_not_finite(scale: float) -> None:
    model, optimizer = build()
    release_gradients(optimizer)
    before = weights(model, optimizer)
    loss_of(model, 0, scale=scale).backward()
    success, norm, _ = optimizer.step()
    assert (success, math.isfinite(norm)) == (False, False)
    optimizer.zero_grad()
    assert_equal(weights(model, optimizer), before)
    assert train(model, optimizer, last=1)[0][0]


def test_the_first_nonfinite_gradient_stops_later_updates() -> None:
    """`first` comes last in backward."""
    model, optimizer = build()
    release_gradients(optimizer)
    model.second.weight.register_hook(lambda grad: grad * math.nan)  # type: ignore[union-attr, operator]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    loss_of(model, 0).backward()
    assert not optimizer.step().success
    stayed = {name for name, param in model.named_parameters() if torch.equal(param, before[name])}
    assert stayed >= {"first.weight", "second.weight"}
    assert "skipped.weight" not in stayed


def test_backward_through_a_value_that_was_overwritten_raises() -> None:
    """A detached view of a weight is no use that its gradient waits for; it would read the updated value."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [layer])
    release_gradients(optimizer)
    x = torch.ones(1, WIDTH, requires_grad=True)
    y = torch.tanh(nn.functional.linear(x, layer.weight.detach()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(y).sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda model, optimizer: optimizer.eval(), "in evaluation mode", id="evaluation"),
        pytest.param(lambda model, optimizer: optimizer.offload_to_cpu(), r"restore_from_cpu\(\) first", id="offload"),
        pytest.param(lambda model, optimizer: model.double(), "was converted or moved after the", id="converted"),
        pytest.param(
            lambda model, optimizer: optimizer.param_groups[0].update(clip_grad=False), "clip_grad=False", id="an entry"
        ),
    ],
)
def test_iterations_in_another_mode_dtype_or_entry_are_refused(change: Any, message: str) -> None:
    model, optimizer = build(optimizer="schedule_free")
    release_gradients(optimizer)
    train(model, optimizer, last=1)
    change(model, optimizer)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises((RuntimeError, ValueError), match=message):
        loss_of(model, 2).backward()
    assert_equal([param.detach() for param in model.parameters()], before)


def test_halves_of_a_step_and_other_norms_are_refused() -> None:
    model, optimizer = build()
    release = release_gradients(optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"released in backward, .* call step\(\)"):
        optimizer.prepare_grads()
    with pytest.raises(RuntimeError, match="no gradients are ready"):
        optimizer.get_grad_norm(1.0)
    with pytest.raises(RuntimeError, match=r"since the last step\(\); call step\(\) first"):
        release.remove()
    with pytest.raises(ConfigError, match="releases its gradients already"):
        release_gradients(optimizer)


# --- refusals when it is built ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "clipping": ({"clip_grad": 1.0}, torch.float32, "clip_grad=1.0 needs the norm of all gradients"),
    "threshold": ({"grad_norm_skip_threshold": 9.0}, torch.float32, "grad_norm_skip_threshold=9.0 needs the norm"),
    "dynamic loss scale": ({"fp16": True}, torch.float16, "a loss scale skips whole steps"),
    "constant loss scale": ({"loss_scale": 8.0}, torch.float32, "a loss scale skips whole steps"),
    "zeros": ({"log_num_zeros_in_grad": True}, torch.float32, "log_num_zeros_in_grad=True needs"),
    "offload": (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
        torch.float32,
        "optimizer_cpu_offload=True copies gradients",
    ),
    "matrices": ({"optimizer": "muon"}, torch.float32, "rule 'muon' batches matrices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_gradients_at_once_is_refused(name: str) -> None:
    fields, dtype, message = REFUSED[name]
    model, optimizer = build(dtype, **fields)
    with pytest.raises(ConfigError, match=message):
        release_gradients(optimizer)
    assert optimizer.in_backward is None
    if dtype is torch.float32:
        loss_of(model, 0).backward()
        assert model.first.weight.grad is not None  # type: ignore[union-attr]


def test_ranks_and_wrapped_chunks_are_refused() -> None:
    def rank_main(comm: Comm, *, wraps: bool) -> None:
        roles = over(comm)
        model: nn.Module = Net()
        if wraps:
            model = DistributedDataParallel(DistributedDataParallelConfig(), model, groups=roles)
        optimizer = get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [model], pg_collection=roles)
        with pytest.raises(
            ConfigError, match="plain module" if wraps else "gradients of 2 ranks are reduced after backward"
        ):
            release_gradients(optimizer)

    run_threads(2, lambda comm: rank_main(comm, wraps=False))
    rank_main(Alone(), wraps=True)


def test_an_optimizer_that_nobody_uses_is_freed() -> None:
    """Hooks of the parameters kept it and its state for ever."""
    net = nn.Linear(3, 2)
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, clip_grad=0.0), [net], {})
    release_gradients(optimizer)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    net(torch.ones(1, 3)).sum().backward()
    assert net.weight.grad is not None


def test_a_gradient_in_main_grad_is_refused_when_the_step_ends() -> None:
    """A fused kernel that writes there returns no gradient to autograd, so that no hook runs: nothing was trained."""
    model, optimizer = build()
    release_gradients(optimizer)
    loss_of(model, 1).backward()  # skips a layer
    model.skipped.weight.main_grad = torch.ones(WIDTH, WIDTH)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gradient of 'skipped.weight' is in main_grad"):
            optimizer.step()
    del model.skipped.weight.main_grad
    assert optimizer.step().success
