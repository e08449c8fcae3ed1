"""`stats_every(forward=model)`: `why` names the layer whose output overflowed first."""

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer, why

pytestmark = pytest.mark.filterwarnings("ignore::opt_stack.SkippedStepWarning")
AT = 8  # the step of the overflow


class Attention(nn.Module):
    """Overflows between its modules: their own outputs are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)
        self.factor = 1.0

    def forward(self, given: dict[str, Tensor], *, mask: Tensor) -> tuple[Tensor, None]:
        x = given["x"]
        scores = self.query(x) @ self.key(x).T * self.factor
        return (scores + mask).softmax(-1) @ x + scores.sum(), None


class Other(nn.Module):
    """Gives what is not compared: other dtypes and layouts."""

    def forward(self, x: Tensor) -> list[Tensor | int]:
        return [x.to(torch.float8_e5m2), torch.eye(2).to_sparse(), torch.nested.nested_tensor([x]), x.cfloat(), 1]


class Net(nn.Module):
    """Modules that take and return dicts and tuples, one of them twice, and a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.attention = Attention()
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 8)
        self.other = Other()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        self.other(x)
        x, _ = self.attention({"x": self.norm(self.up(x))}, mask=mask)
        return self.down(self.norm(x))


def built(folder: Path | None = None) -> tuple[Net, Optimizer]:
    torch.manual_seed(0)
    net = Net().half()
    config = OptimizerConfig(lr=1e-3, fp16=True, initial_loss_scale=2.0**8, hysteresis=1)
    optimizer = get_optimizer(config, [net])
    optimizer.stats_every(1, directory=folder, forward=net)
    return net, optimizer


def train(net: nn.Module, optimizer: Optimizer, steps: range, spoil: Callable[[int], Any], *, micro: int = 2) -> None:
    for step in steps:
        spoil(step)
        for at in range(micro):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + at)).half()
            loss = net(batch).float().square().mean() / micro
            optimizer.note_loss(loss.detach())
            optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def scale_output(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, given, out: out * 1e6, prepend=True)


def overflow_inside(net: Net) -> None:
    net.attention.factor = 1e6


DAMAGE: dict[str, Callable[[Net], Any]] = {
    "up": lambda net: scale_output(net.up),
    "attention.key": lambda net: scale_output(net.attention.key),
    "attention": overflow_inside,
    "norm": lambda net: scale_output(net.norm),
    "down": lambda net: scale_output(net.down),
}


@pytest.mark.parametrize("layer", DAMAGE)
def test_why_names_the_layer_that_overflowed_first(layer: str, tmp_path: Path) -> None:
    net, optimizer = built(tmp_path)
    train(net, optimizer, range(1, AT + 4), lambda step: DAMAGE[layer](net) if step == AT else None)
    optimizer.recorder.write("end")
    text = str(why(tmp_path)).replace("\n  ", " ")
    assert f"First: at step {AT} the forward pass overflowed first in layer '{layer}'; backward gave NaN in " in text
    assert {stats.overflowed for stats in optimizer.recorder.records if stats.step < AT} == {""}


def test_a_layer_is_named_for_its_own_step_only() -> None:
    """A step between those that are due."""
    net, optimizer = built()
    optimizer.stats_every(4, forward=net)

    def spoil(step: int) -> None:
        net.attention.factor = 1e6 if step == 3 else 1.0

    train(net, optimizer, range(1, 10), spoil)
    named = {stats.step: stats.overflowed for stats in optimizer.recorder.records}
    assert named == {1: "", 3: "attention", 5: "", 9: ""}


def test_bad_inputs_and_evaluation_name_no_layer() -> None:
    net, optimizer = built()
    batch = torch.full((4, 8), torch.inf).half()
    net.eval()
    scale_output(net.up)
    net(torch.ones(4, 8).half())  # not a part of a step
    net.train()
    optimizer.scale_loss(net(batch).sum()).backward()
    assert not optimizer.step().success
    assert optimizer.stats().overflowed == ""


def test_hooks_live_as_long_as_they_are_asked_for() -> None:
    net, optimizer = built()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert copied(torch.ones(4, 8).half()).isfinite().all()
    assert len(net.up._forward_hooks) == 1
    optimizer.stats_every(1, forward=net)
    assert len(net.up._forward_hooks) == 1
    optimizer.stats_every(0, forward=net)
    assert not net.up._forward_hooks
    optimizer.stats_every(1, forward=net)
    del optimizer
    gc.collect()
    assert not net.up._forward_hooks


def test_a_compiled_model_names_the_layer() -> None:
    net, optimizer = built()
    overflow_inside(net)
    compiled = torch.compile(net, backend="eager")
    train(compiled, optimizer, range(1, 2), lambda step: None)
    assert optimizer.stats().overflowed == "attention"


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_transforms_of_a_watched_model_work(transform: Callable[..., Any]) -> None:
    """Raised RuntimeError: a hook wrote to a tensor outside of the transform."""
    model = nn.Sequential(nn.Linear(4, 4))
    plain = transform(model)(torch.ones(3, 4))
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model])
    optimizer.stats_every(1, forward=model)
    assert torch.equal(transform(model)(torch.ones(3, 4)), plain)
