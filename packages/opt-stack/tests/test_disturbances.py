"""Everything that can happen between two steps: the next one reads and writes all tensors where they are then.

Each case runs twice: as usual, and with a twin that keeps nothing: torch's operations, and units made anew every step.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_kernels.backends.cpp.compiler import usable
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.needs_extra

Disturb = Callable[[Optimizer, list[nn.Parameter]], None]
SHAPES = {"square": (4, 4), "wide": (3, 5), "bias": (5,)}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 with mains": BF16,
    "bfloat16 with remainders": {**BF16, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True},
    "muon": {**BF16, "optimizer": "muon"},
}


class Net(nn.Module):
    """Two matrices and a vector; their gradients are set, not computed, except in wrapped models."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        factors = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
        return torch.stack([(p * f.to(p.dtype)).float().sum() for p, f in zip(self.parameters(), factors)]).sum()


def new_grads(params: list[nn.Parameter], step: int) -> None:
    """Gradients in place, where there are any of the same kind."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        value = torch.randn(param.shape, generator=generator).to(param.dtype)
        if param.grad is None:
            param.grad = value
        else:
            param.grad.copy_(value)


def grad_elsewhere(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[0].grad = params[0].grad.clone()  # type: ignore[union-attr]


def grad_transposed(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[0].grad.data = params[0].grad.detach().t()  # type: ignore[union-attr]  # the same address


def grads_gone_and_back(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.zero_grad()
    new_grads(params, 77)


def weight_elsewhere(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[0].data = params[0].detach().clone()


def weight_transposed(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[0].data = params[0].detach().t()  # the same address


def weight_of_another_dtype(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[1].grad = None
    params[1].data = params[1].detach().half()


def weight_replaced(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones_like(params[0]))


def numbers_changed(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.03) if group is optimizer.param_groups[0] else 0.02
        group["weight_decay"] = 0.0


def moment_of(optimizer: Optimizer, param: nn.Parameter) -> Tensor:
    return next(
        optimizer.state[param][name] for name in ("exp_avg", "momentum_buffer") if name in optimizer.state[param]
    )


def state_set(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[0]]
    optimizer.state[params[0]] = {name: value * 3 for name, value in state.items()}


def state_elsewhere(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    moment = moment_of(optimizer, params[0])
    moment.data = moment.clone().neg_()


def state_transposed(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    moment = moment_of(optimizer, params[0])
    moment.data = moment.detach().t()  # the same address


def memory_of_states_replaced(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    """Tensors of a state_dict share the memory of states, which a resize of their storage replaces."""
    for state in optimizer.state_dict()["state"].values():
        for tensor in state.values():
            values = tensor.clone()
            tensor.untyped_storage().resize_(1 << 16)
            tensor.copy_(values)


def mains_elsewhere(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    for main in optimizer.get_parameters():
        main.data = main.detach().clone().mul_(2)


def loaded(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    saved = deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"].fill_(11)
        for name in state.keys() & {"exp_avg", "momentum_buffer"}:
            state[name].mul_(2)
    optimizer.load_state_dict(saved)


def weights_reloaded(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        params[0].fill_(0.5)
    optimizer.reload_model_params()


def offloaded_and_restored(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()


DISTURBED: list[Disturb] = [
    grad_elsewhere, grad_transposed, grads_gone_and_back, weight_elsewhere, weight_transposed, weight_of_another_dtype,
    weight_replaced, numbers_changed, state_set, state_elsewhere, state_transposed, memory_of_states_replaced,
    mains_elsewhere, loaded, weights_reloaded, offloaded_and_restored,
]  # fmt: skip


def build(form: str, backend: str, *, wrap: bool = False) -> tuple[Any, Optimizer]:
    fields = FORMS[form]
    model: Any = Net(fields.get("params_dtype", torch.float32))
    if wrap:
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model, fields = DistributedDataParallel(config, model), {**fields, "use_distributed_optimizer": True}
    optimizer = get_optimizer(OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.1, **fields}), [model])
    for unit in optimizer.stepper.units:
        rule: Any = unit.rule
        unit.rule = rule if form == "muon" else replace(rule, backend=backend)
    return model, optimizer


def run(form: str, disturb: Disturb, backend: str, *, halves: bool = False, wrap: bool = False) -> list[Any]:
    """Results of five steps, then mains and states; `disturb` runs before the fourth, or in its middle."""
    model, optimizer = build(form, backend, wrap=wrap)
    params = list(model.parameters())
    found: list[Any] = []
    for step in range(5):
        if wrap:
            model.zero_grad_buffer()
            model(step).backward()
        else:
            new_grads([param for param in params if param.requires_grad], step)
        try:
            if step == 3 and not halves:
                disturb(optimizer, params)
            if backend == "torch":
                optimizer.stepper.units = [replace(unit) for unit in optimizer.stepper.units]
            if step == 3 and halves:
                assert not optimizer.prepare_grads()
                disturb(optimizer, params)
                optimizer.step_with_ready_grads()
            else:
                found.append(tuple(optimizer.step()[:2]))
        except (ValueError, RuntimeError):
            return [*found, "refused"]
    states = [tensor for param in params for tensor in optimizer.state[param].values()]
    return found + [tensor.detach().float() for tensor in (*optimizer.get_parameters(), *states)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for got, want in zip(found, expected, strict=True):
        if isinstance(want, str):
            assert got == want
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("disturb", DISTURBED)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_reads_tensors_where_they_are(form: str, disturb: Disturb) -> None:
    expected = run(form, disturb, "torch")
    for backend in ("triton", "cpp") if usable() and form != "muon" else ("triton",):
        assert_same(run(form, disturb, backend), expected)


@pytest.mark.parametrize(
    "disturb", [weight_elsewhere, state_elsewhere, mains_elsewhere, loaded, offloaded_and_restored]
)
@pytest.mark.parametrize("case", ["halves", "wrap"])
def test_the_same_between_halves_and_where_gradients_live_in_buffers(case: str, disturb: Disturb) -> None:
    for form in ("float32", "bfloat16 with mains"):
        assert_same(run(form, disturb, "triton", **{case: True}), run(form, disturb, "torch", **{case: True}))


@pytest.mark.parametrize("late", range(len(SHAPES)))
@pytest.mark.parametrize("form", ["bfloat16 with mains", "muon"])
def test_a_gradient_that_comes_late_is_used(form: str, late: int) -> None:
    """One parameter has gradients only in the fourth and fifth of six steps."""
    model, optimizer = build(form, "triton")
    params = list(model.parameters())
    for step in range(6):
        before = params[late].detach().clone()
        params[late].grad = None
        new_grads([param for place, param in enumerate(params) if place != late or 3 <= step < 5], step)
        optimizer.step()
        assert torch.equal(params[late], before) != (3 <= step < 5)
    counts = [float(optimizer.state[param]["step"]) for param in params]
    assert counts == [2.0 if place == late else 6.0 for place in range(len(SHAPES))]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_keeps_no_gradient_alive(form: str) -> None:
    """After `zero_grad`, their memory is needed for activations."""
    model, optimizer = build(form, "triton")
    params = list(model.parameters())
    for step in range(5):
        new_grads(params, step)
        optimizer.step()
    grads = [ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None] * len(params)
