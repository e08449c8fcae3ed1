"""The matrix rules that the pages on rules declare: equations, layouts, checkpoints."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from parity import roles_over, sharded_state
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_stack import Optimizer, Registry, get_optimizer

DOCS = Path(__file__).parents[2] / "docs"
OWN_RULES, PAGE = (DOCS / "own_rules.md").read_text(), (DOCS / "rules.md").read_text()
(ROW_MUON,) = re.findall(r"```python\n(\"\"\"RowMuon.*?)```", OWN_RULES, flags=re.DOTALL)
(FORMULA,) = re.findall(r"```python\n(from dataclasses import dataclass.*?)```", PAGE, flags=re.DOTALL)
(ENTRY,) = re.findall(r"```python\n(from opt_stack import RuleEntry.*?\n\)\n)", PAGE, flags=re.DOTALL)
LOW_RANK = f"import torch\nfrom opt_kernels import Number\n{FORMULA}\n{ENTRY}"
LR, MOMENTUM = 0.02, 0.9


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The rules of the pages, imported before ranks start: they share the files."""
    monkeypatch.syspath_prepend(tmp_path)
    found = Registry()
    for name, source in (("row_muon", ROW_MUON), ("low_rank", LOW_RANK)):
        (tmp_path / f"{name}_of_the_page.py").write_text(source)
        module = importlib.import_module(f"{name}_of_the_page")
        monkeypatch.delitem(sys.modules, module.__name__)
        found = found.with_rule(getattr(module, name.upper()))
    return found


def made(rules: Registry, model: nn.Module, rule: str, comm: Comm | None = None) -> Optimizer:
    fields = {"lr": LR, "weight_decay": 0.0, "muon_momentum": MOMENTUM, "clip_grad": 0.0}
    fields |= {"use_layer_wise_distributed_optimizer": comm is not None, "muon_fp32_matmul_prec": "highest"}
    roles = roles_over(comm or Alone())
    return get_optimizer(OptimizerConfig(optimizer=rule, **fields), [model], rules=rules, pg_collection=roles)


def models(count: int) -> list[nn.Module]:
    """Equal models, made before ranks start: threads share torch's generator."""
    found = []
    for _ in range(count):
        torch.manual_seed(0)
        found.append(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8), nn.Linear(8, 8)))
    return found


def step(model: nn.Module, optimizer: Optimizer, number: int) -> list[Tensor]:
    """Return the gradients of the matrices."""
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    return [param.grad for param in model.parameters() if param.dim() == 2]


def matrices(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters() if param.dim() == 2]


def test_it_has_at_most_sixty_lines_and_takes_the_steps_of_its_equation(registry: Registry) -> None:
    assert len(ROW_MUON.splitlines()) <= 60
    (model,) = models(1)
    optimizer = made(registry, model, "row_muon")
    wanted, momenta = matrices(model), [torch.zeros_like(matrix) for matrix in matrices(model)]
    norms = [matrix.norm() for matrix in wanted]
    for number in range(3):
        for i, grad in enumerate(step(model, optimizer, number)):
            momenta[i] = MOMENTUM * momenta[i] + (1 - MOMENTUM) * grad
            rows = momenta[i] / momenta[i].norm(dim=1, keepdim=True)
            left, _, right = torch.linalg.svd(rows, full_matrices=False)
            moved = wanted[i] - LR * norms[i] * (left @ right) / (left @ right).norm()
            wanted[i] = norms[i] * moved / moved.norm()
    for found, want, norm in zip(matrices(model), wanted, norms, strict=True):
        torch.testing.assert_close(found.norm(), norm)
        # Newton-Schulz moves singular values to between 0.7 and 1.2 of those of the polar factor.
        assert (found - want).norm() < 0.4 * 3 * LR * norm


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("rule", "state"), [("row_muon", "momentum_buffer"), ("low_rank", "right")])
def test_ranks_that_hold_whole_matrices_continue_a_checkpoint_of_one(
    rule: str, state: str, ranks: int, registry: Registry, tmp_path: Path
) -> None:
    alone, *several = models(1 + ranks)
    optimizer = made(registry, alone, rule)
    for number in range(4):
        if number == 2:
            save(sharded_state(alone, optimizer), tmp_path / "saved")
        step(alone, optimizer, number)

    def rank_main(comm: Comm) -> tuple[list[Tensor], int]:
        model = several[comm.rank]
        own = made(registry, model, rule, comm)
        own.load_state_dict(load(sharded_state(model, own), tmp_path / "saved").state["optimizer"])
        for number in range(2, 4):
            step(model, own, number)
        return matrices(model), sum(state in of for of in own.state_dict()["state"].values())

    found = run_threads(ranks, rank_main)
    assert sum(held for _, held in found) == len(matrices(alone))  # each matrix on one rank
    for weights, _ in found:
        torch.testing.assert_close(weights, matrices(alone), rtol=1e-6, atol=1e-7)  # norms are summed in another order


def test_a_state_of_a_chosen_shape_is_resumed_by_a_state_dict_and_refused_in_another_shape(registry: Registry) -> None:
    first, second = models(2)
    optimizer, other = (made(registry, model, "low_rank") for model in (first, second))
    step(first, optimizer, 0)
    saved = optimizer.state_dict()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(saved)
    step(first, optimizer, 1)
    step(second, other, 1)
    assert all(map(torch.equal, matrices(first), matrices(second)))
    state = next(state for state in saved["state"].values() if "right" in state)
    state["right"] = state["right"].mT.contiguous()
    with pytest.raises(ValueError, match=r"right of '0.weight' has shape \(2, 12\), this rank's piece has \(12, 2\)"):
        other.load_state_dict(saved)
