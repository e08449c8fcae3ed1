"""Everything that can happen between two steps: the next one reads and writes all tensors where they are then.

Each case runs twice: as usual, and with a twin that keeps nothing: torch's operations, and units made anew every step.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from tiers import NIGHT
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_kernels.backends.cpp.compiler import usable
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.needs_extra

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


DISTURBED = (
    "grad elsewhere", "grad transposed", "grads gone and back", "weight elsewhere", "weight transposed",
    "weight of another dtype", "weight replaced", "numbers", "state set", "state elsewhere", "state transposed",
    "memory of states replaced", "mains elsewhere", "loaded", "weights reloaded", "offloaded and restored",
)  # fmt: skip
ELSEWHERE = ("weight elsewhere", "state elsewhere", "mains elsewhere", "loaded", "offloaded and restored")


def disturb(what: str, optimizer: Optimizer, params: list[Any]) -> None:
    first, second, _ = params
    groups, state = optimizer.param_groups, optimizer.state[first]
    name = "momentum_buffer" if "momentum_buffer" in state else "exp_avg"
    match what:
        case "grad elsewhere":
            first.grad = first.grad.clone()
        case "grad transposed":
            first.grad.data = first.grad.detach().t()  # the same address
        case "grads gone and back":
            optimizer.zero_grad()
            new_grads(params, 77)
        case "weight elsewhere":
            first.data = first.detach().clone()
        case "weight transposed":
            first.data = first.detach().t()  # the same address
        case "weight of another dtype":
            second.grad = None
            second.data = second.detach().half()
        case "weight replaced":
            groups[0]["params"][0] = nn.Parameter(torch.ones_like(first))
        case "numbers":
            for group in groups:
                group["lr"] = torch.tensor(0.03) if group is groups[0] else 0.02
                group["weight_decay"] = 0.0
        case "state set":
            optimizer.state[first] = {name: value * 3 for name, value in state.items()}
        case "state elsewhere":
            state[name].data = state[name].clone().neg_()
        case "state transposed":
            state[name].data = state[name].detach().t()  # the same address
        case "memory of states replaced":  # which tensors of a state_dict share
            for tensor in [t for of_param in optimizer.state_dict()["state"].values() for t in of_param.values()]:
                values = tensor.clone()
                tensor.untyped_storage().resize_(1 << 16)
                tensor.copy_(values)
        case "mains elsewhere":
            for main in optimizer.get_parameters():
                main.data = main.detach().clone().mul_(2)
        case "loaded":
            saved = deepcopy(optimizer.state_dict())
            for of_param in saved["state"].values():
                of_param["step"].fill_(11)
                for moment in of_param.keys() & {"exp_avg", "momentum_buffer"}:
                    of_param[moment].mul_(2)
            optimizer.load_state_dict(saved)
        case "weights reloaded":
            first.detach().fill_(0.5)
            optimizer.reload_model_params()
        case "offloaded and restored":
            optimizer.offload_to_cpu()
            optimizer.restore_from_cpu()


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


def run(form: str, what: str, backend: str, *, halves: bool = False, wrap: bool = False) -> list[Any]:
    """Results of four steps, then mains and states; the change comes before the third, or in its middle."""
    model, optimizer = build(form, backend, wrap=wrap)
    params = list(model.parameters())
    found: list[Any] = []
    for step in range(4):
        if wrap:
            model.zero_grad_buffer()
            model(step).backward()
        else:
            new_grads([param for param in params if param.requires_grad], step)
        try:
            if step == 2 and not halves:
                disturb(what, optimizer, params)
            if backend == "torch":
                optimizer.stepper.units = [replace(unit) for unit in optimizer.stepper.units]
            if step == 2 and halves:
                assert not optimizer.prepare_grads()
                disturb(what, optimizer, params)
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


CASES = [(form, what) for form in FORMS for what in (DISTURBED if NIGHT or form == "float32" else ELSEWHERE)]


@pytest.mark.parametrize(("form", "what"), CASES)
def test_a_step_reads_tensors_where_they_are(form: str, what: str) -> None:
    expected = run(form, what, "torch")
    for backend in ("triton", "cpp") if usable() and form != "muon" else ("triton",):
        assert_same(run(form, what, backend), expected)


@pytest.mark.parametrize("what", ELSEWHERE)
@pytest.mark.parametrize("case", ["halves", "wrap"])
def test_the_same_between_halves_and_where_gradients_live_in_buffers(case: str, what: str) -> None:
    for form in ("float32", "bfloat16 with mains"):
        assert_same(run(form, what, "triton", **{case: True}), run(form, what, "torch", **{case: True}))


@pytest.mark.parametrize("form", ["bfloat16 with mains", "muon"])
def test_a_gradient_that_comes_late_is_used_and_counted(form: str) -> None:
    """One parameter has gradients only in the fourth and fifth of six steps."""
    for late in range(len(SHAPES)):
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
