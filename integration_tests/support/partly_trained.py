"""A model with tied, frozen, unused and zero-gradient parameters, saved and resumed in several layouts."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opt_checkpoint import LoadReport, load, sharded_model
from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

FLAT = {"use_distributed_optimizer": True}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}
KINDS = {
    "replicated fp32": ({}, torch.float32),
    "flat bf16 with mains": (FLAT | {"bf16": True}, torch.bfloat16),
    "flat bf16 with remainders, narrow moments": (FLAT | {"bf16": True} | NARROW, torch.bfloat16),
}
UNUSED, ZERO, FROZEN = "unused.weight", "zero.weight", "frozen.weight"


class PartlyTrained(nn.Module):
    """Tied embedding and head; a frozen matrix; one that the loss never reaches; one whose gradient is always zero."""

    def __init__(self, *, seed: int, backwards: bool = False):
        super().__init__()
        torch.manual_seed(seed)
        parts = {
            "embedding": nn.Embedding(11, 16),
            "first": nn.Linear(16, 24),
            "second": nn.Linear(24, 16),
            "frozen": nn.Linear(16, 16, bias=False),
            "zero": nn.Linear(16, 8, bias=False),
            "unused": nn.Linear(16, 8, bias=False),
            "head": nn.Linear(16, 11, bias=False),
        }
        for name in reversed(parts) if backwards else parts:
            self.add_module(name, parts[name])
        self.head.weight = self.embedding.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes[:, :-1])
        x = x + self.frozen(self.second(torch.tanh(self.first(x)))) + (self.zero(x) * 0).sum()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), codes[:, 1:].flatten())


def begin(
    kind: str, *, seed: int = 0, model: PartlyTrained | None = None, overrides: Any = None, **changes: Any
) -> Any:
    options, dtype = KINDS[kind]
    model = (PartlyTrained(seed=seed) if model is None else model).to(dtype)
    return model, get_optimizer(OptimizerConfig(**{"lr": 1e-2, **options, **changes}), [model], overrides)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def resume(model: nn.Module, optimizer: Optimizer, path: Path, load_options: Any = None, **options: Any) -> LoadReport:
    report = load(state_of(model, optimizer), path, **(load_options or {}))
    optimizer.load_state_dict(report.state["optimizer"], **options)
    return report


def states(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Copies, by parameter name; by one name of the tied one, which goes by the first of the model."""
    held = optimizer.state_dict()
    return {
        name.replace("head", "embedding"): {key: value.clone() for key, value in held["state"][index].items()}
        for group in held["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
    }


def assert_same(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> None:
    assert {name: set(state) for name, state in got.items()} == {name: set(state) for name, state in want.items()}
    for name, state in want.items():
        for key, value in state.items():
            assert torch.equal(got[name][key], value), f"{key} of {name}"


def group_of(optimizer: Optimizer, name: str) -> dict[str, Any]:
    return next(g for g in optimizer.param_groups if name in {id.name for id in g["param_ids"]})
