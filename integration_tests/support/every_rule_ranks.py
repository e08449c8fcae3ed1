"""Rank programs for the tests of all elementwise rules; gradients are the same on every rank."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_kernels.formulas import Formula
from opt_kernels.formulas.registry import FORMULAS
from opt_stack import Optimizer, Registry, get_optimizer

BEFORE, AFTER = 3, 5  # steps until the save, and in all
SHAPES = {"weight": (64, 40), "bias": (40,), "odd": (301,)}


class Case(NamedTuple):
    """A rule in numbers."""

    rule: str
    narrow: bool  # bfloat16 parameters with remainders, and 8-bit states
    options: dict[str, Any]  # `optimizer_options`
    file: str = ""  # that defines the formula `RULE`; empty: one of ours

    def formula(self) -> Formula:
        if not self.file:
            return FORMULAS[self.rule]
        names: dict[str, Any] = {"__name__": "their_rule"}
        exec(compile(Path(self.file).read_text(), self.file, "exec"), names)
        found: Formula = names["RULE"]
        return found


def begin(case: Case, *, sharded: bool) -> tuple[nn.Module, Optimizer]:
    dtype, formula = torch.bfloat16 if case.narrow else torch.float32, case.formula()
    model = nn.Module()
    for seed, (name, shape) in enumerate(SHAPES.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        model.register_parameter(name, nn.Parameter(values.to(dtype)))
    narrow: dict[str, Any] = {}
    options = dict(case.options)
    if case.narrow:
        narrow = {"bf16": True, "use_precision_aware_optimizer": True}
        options |= {f"{state.name}_dtype": "int8" if state.signed else "uint8" for state in formula.states}
    config = OptimizerConfig(
        optimizer=case.rule,
        lr=0.01,
        weight_decay=0.1,
        clip_grad=0.0,
        use_distributed_optimizer=sharded,
        optimizer_options=options,
        **narrow,
    )
    rules = Registry().with_formula(formula) if case.file else None
    return model, get_optimizer(config, [model], rules=rules)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> dict[str, Tensor]:
    """The parameters after these steps. Sums and means of these gradients over three ranks are exact."""
    for step in steps:
        for seed, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + seed))
            param.grad = grad.to(torch.bfloat16).to(param.dtype)
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def run_and_save(cases: dict[str, Case], folder: str) -> dict[str, dict[str, Tensor]]:
    """Save sharded state after some steps; return the final weights."""
    found = {}
    for name, case in cases.items():
        model, optimizer = begin(case, sharded=True)
        train(model, optimizer, range(BEFORE))
        save(state_of(model, optimizer), f"{folder}/{name}")
        found[name] = train(model, optimizer, range(BEFORE, AFTER))
    return found


def resume(cases: dict[str, Case], folder: str, again: str, *, sharded: bool = True) -> dict[str, dict[str, Tensor]]:
    """Resume from `folder`, save the loaded state to `again`, and return the final weights."""
    found = {}
    for name, case in cases.items():
        model, optimizer = begin(case, sharded=sharded)
        loaded = load(state_of(model, optimizer), f"{folder}/{name}").state
        optimizer.load_state_dict(loaded["optimizer"])
        if again:
            save(state_of(model, optimizer), f"{again}/{name}")
        found[name] = train(model, optimizer, range(BEFORE, AFTER))
    return found


def refused(case: Case) -> str:
    try:
        begin(case, sharded=True)
    except ValueError as error:
        return str(error)
    return ""


class Evaluated(NamedTuple):
    """Weights of one rank, before, during and after an evaluation; what was refused meanwhile; weights after a resume
    from what was saved meanwhile."""

    trained: dict[str, Tensor]
    shown: dict[str, Tensor]
    after: dict[str, Tensor]
    refusals: list[str]
    resumed: dict[str, Tensor]


def _resumed(case: Case, shown: dict[str, Tensor], trained: dict[str, Tensor], saved: Any, *, sharded: bool) -> Any:
    """The weights of a run that resumes from a model saved in evaluation mode, as trainers do."""
    model, optimizer = begin(case, sharded=sharded)
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.copy_(shown[key])
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert all(torch.equal(param, shown[key]) for key, param in model.named_parameters())
    optimizer.train()
    assert all(torch.equal(param, trained[key]) for key, param in model.named_parameters())
    return train(model, optimizer, range(BEFORE, AFTER))


def evaluate(cases: dict[str, Case], *, sharded: bool = True) -> dict[str, Evaluated]:
    found = {}
    for name, case in cases.items():
        model, optimizer = begin(case, sharded=sharded)
        trained = train(model, optimizer, range(BEFORE))
        optimizer.eval()
        shown = train(model, optimizer, range(0))
        refusals = []
        for attempt in (optimizer.step, partial(optimizer.sharded_state_dict, {}), optimizer.reload_model_params):
            try:
                attempt()
            except RuntimeError as error:
                refusals.append(str(error))
        resumed = _resumed(case, shown, trained, optimizer.state_dict(), sharded=sharded)
        assert all(torch.equal(param, shown[key]) for key, param in model.named_parameters())
        optimizer.train()
        assert all(torch.equal(param, trained[key]) for key, param in model.named_parameters())
        after = train(model, optimizer, range(BEFORE, AFTER))
        found[name] = Evaluated(trained, shown, after, refusals, resumed)
    return found
