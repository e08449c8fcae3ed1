"""The page on adapters: its lines for trainers satisfy their interfaces."""

import importlib
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()


def section_of(title: str) -> str:
    return re.split(r"^## ", PAGE[PAGE.index(f"## {title}\n") + 3 :], maxsplit=1, flags=re.MULTILINE)[0]


def lines_to_write(title: str) -> str:
    """The indented block of a section."""
    (block,) = re.findall(r"^    \S.*\n(?:(?:    .*)?\n)*", section_of(title), re.MULTILINE)
    return textwrap.dedent(block)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    assert all((param != old).any() for param, old in zip(model.parameters(), before, strict=True))


def test_the_lines_for_lightning_return_muon_and_its_schedule() -> None:
    names: dict[str, Any] = {}
    imports = (
        "from opt_stack import OptimizerConfig, get_optimizer\nfrom opt_scheduler import as_lr_scheduler, cosine\n"
    )
    exec(imports + lines_to_write("Lightning"), names)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    made = names["configure_optimizers"](model)
    train(model, made["optimizer"])
    made["lr_scheduler"]["scheduler"].step()
    assert made["lr_scheduler"]["interval"] == "step"
    assert {group["optimizer"] for group in made["optimizer"].param_groups} >= {"muon"}
    assert all(1e-4 < group["lr"] < 1e-3 for group in made["optimizer"].param_groups)


def test_the_plugin_gives_axolotls_trainer_our_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {"post_trainer_create": lambda self, cfg, trainer: None})  # 0.21.0
    outer = {name: ModuleType(name) for name in ("axolotl", "axolotl.integrations")}
    for name, module in {**outer, base.__name__: base}.items():
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, Any] = {}
    exec(lines_to_write("Axolotl"), names)
    trainer = SimpleNamespace(model=nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), optimizer=None)
    names["StackPlugin"]().post_trainer_create(SimpleNamespace(learning_rate=0.01), trainer)
    assert {(group["optimizer"], group["lr"]) for group in trainer.optimizer.param_groups} >= {("muon", 0.01)}
    train(trainer.model, trainer.optimizer)


def test_the_optimizer_for_verl_accepts_the_calls_of_verl() -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load(lines_to_write("verl"))["optim"]
    model = nn.Linear(4, 4).bfloat16()
    # As `build_optimizer` of verl 0.9.1 does.
    arguments = {key: config[key] for key in ("lr", "weight_decay", "betas")} | config["override_optimizer_config"]
    optimizer = getattr(importlib.import_module(config["optimizer_impl"]), config["optimizer"])(
        model.parameters(), **arguments
    )
    assert optimizer.param_groups[0]["lr"] == 1e-6
    for group in optimizer.param_groups:
        group["lr"] = 0.1  # so that a step is more than a rounding of bfloat16
    train(model, optimizer)
