"""The small model of these tests, its batches, groups of ranks, and the shortest training loop."""

import threading
from typing import Any

import torch
from parity import roles_over
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

FEATURES = 5
HIDDEN = 7
over = roles_over
_SEEDED = threading.Lock()  # ranks that are threads share torch's generator


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Matrices and biases of awkward sizes; the same weights at every call."""
    with _SEEDED:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3)).to(dtype)


def backward(model: nn.Module, step: int, *, scale: Any = None) -> None:
    """Gradients of a batch that depends on the step alone."""
    x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(step))
    dtype = next(model.parameters()).dtype
    loss = model(x.to(dtype)).float().square().mean()
    (loss if scale is None else scale(loss)).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def stepped(config: OptimizerConfig, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer after some steps."""
    model = make_model(config.precision.params)
    optimizer = get_optimizer(config, [model])
    train(model, optimizer, range(steps))
    return model, optimizer


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_equal(got: Any, want: Any, at: str = "") -> None:
    """Bit for bit, through nested dicts, lists and tuples; types count, too."""
    assert type(got) is type(want), at
    if isinstance(want, dict):
        assert list(got) == list(want), at
        for key in want:
            assert_equal(got[key], want[key], f"{at}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), at
        for number, pair in enumerate(zip(got, want, strict=True)):
            assert_equal(*pair, f"{at}[{number}]")
    elif isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{at}: {text}")
    else:
        assert got == want, at
