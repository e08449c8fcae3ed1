"""`torch.compile`: a drop-in's step is part of the graph, the stack's step breaks it once; both see every new value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_kernels.optim import AdamW
from opt_stack import get_optimizer


def drop_in(model: nn.Module) -> Any:
    return AdamW(model.parameters(), lr=0.1)


def whole_stack(model: nn.Module) -> Any:
    return get_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.01), [model])


ON_BOTH = pytest.mark.parametrize("build", [drop_in, whole_stack])


class Counted:
    """A compiler that runs what it is given, and counts the graphs."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_graphs += 1
        run: Callable[..., Any] = graph.forward
        return run


def made(build: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    return model, build(model)


def trained(model: nn.Module, optimizer: Any, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The weights and what `step` returned, after three steps with another learning rate each."""
    found = []
    for number in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.25)
        found.append(step(torch.full((3,), float(number))))
    return [*found, *(param.detach().clone() for param in model.parameters())]


def within(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
    """A function that computes before and after the step."""

    def run(x: Tensor) -> Tensor:
        before = x * 2
        optimizer.step()
        return (before + x).sum()

    return run


@ON_BOTH
def test_a_compiled_step_is_the_step(build: Callable[[nn.Module], Any]) -> None:
    torch._dynamo.reset()
    model, optimizer = made(build)
    compiled = torch.compile(optimizer.step, backend=Counted())

    def step(x: Tensor) -> Tensor:
        compiled()
        return x

    found = trained(model, optimizer, step)
    model, optimizer = made(build)
    expected = trained(model, optimizer, lambda x: (optimizer.step(), x)[1])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("build", "fullgraph"), [(whole_stack, False), (drop_in, True)], ids=["stack", "drop-in"])
def test_a_compiled_function_has_the_bits_of_the_step_and_two_graphs(
    build: Callable[[nn.Module], Any], fullgraph: bool
) -> None:
    """The stack's: before and after its step. A drop-in's: for the first learning rate, and for any other."""
    torch._dynamo.reset()
    compiler = Counted()
    model, optimizer = made(build)
    run = torch.compile(within(model, optimizer), backend=compiler, fullgraph=fullgraph)
    found = trained(model, optimizer, run)
    model, optimizer = made(build)
    expected = trained(model, optimizer, within(model, optimizer))
    assert all(map(torch.equal, found, expected))
    assert compiler.num_graphs == 2


def test_a_graph_without_breaks_around_the_stacks_step_is_refused_by_torch() -> None:
    torch._dynamo.reset()
    model, optimizer = made(whole_stack)
    before = [param.detach().clone() for param in model.parameters()]
    compiled = torch.compile(within(model, optimizer), backend=Counted(), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        trained(model, optimizer, compiled)
    assert all(map(torch.equal, before, model.parameters()))
