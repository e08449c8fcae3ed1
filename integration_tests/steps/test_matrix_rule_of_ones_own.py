"""The matrix rules that the pages on rules declare: equations, layouts, checkpoints."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import sharded_state
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, Registry, get_optimizer

DOCS = Path(__file__).parents[2] / "docs"
OWN_RULES, PAGE = (DOCS / "own_rules.md").read_text(), (DOCS / "rules.md").read_text()
(ROW_MUON,) = re.findall(r"```python\n(\"\"\"RowMuon.*?)```", OWN_RULES, flags=re.DOTALL)
(FORMULA,) = re.findall(r"```python\n(from dataclasses import dataclass.*?)```", PAGE, flags=re.DOTALL)
(ENTRY,) = re.findall(r"```python\n(from opt_stack import RuleEntry.*?\n\)\n)", PAGE, flags=re.DOTALL)
LOW_RANK = f"import torch\nfrom opt_kernels import Number\n{FORMULA}\n{ENTRY}"
LR, MOMENTUM, ALONE = 0.02, 0.9, Alone()


def imported(name: str, source: str, folder: Path) -> Any:
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """The rules of the pages, imported before ranks start: they share the files."""
    row_muon, low_rank = imported("row_muon", ROW_MUON, tmp_path), imported("low_rank", LOW_RANK, tmp_path)
    return Registry().with_rule(row_muon.ROW_MUON).with_rule(low_rank.LOW_RANK)


def made(rules: Registry, model: nn.Module, rule: str, dp: Comm = ALONE, tp: Comm = ALONE) -> Optimizer:
    axes, fields = Axes(dp=dp, tp=tp), {"lr": LR, "weight_decay": 0.0, "muon_momentum": MOMENTUM, "clip_grad": 0.0}
    whole, exact = {"use_layer_wise_distributed_optimizer": dp.size > 1}, {"muon_fp32_matmul_prec": "highest"}
    roles = Roles(dense=axes, expert=axes, everyone=tp if tp.size > 1 else dp)
    return get_optimizer(
        OptimizerConfig(optimizer=rule, **fields, **whole, **exact), [model], rules=rules, pg_collection=roles
    )


def models(count: int) -> list[nn.Module]:
    """Equal models, made before ranks start: threads share torch's generator."""
    found = []
    for _ in range(count):
        torch.manual_seed(0)
        found.append(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8), nn.Linear(8, 8)))
    return found


def step(model: nn.Module, optimizer: Optimizer, number: int, tp: Comm = ALONE) -> list[Tensor]:
    """Return the gradients of the matrices, of which each tensor-parallel rank has its rows."""
    generator, grads = torch.Generator().manual_seed(number), []
    for param in model.parameters():
        rows = param.shape[0] * (tp.size if param.dim() == 2 else 1)
        whole = torch.randn(rows, *param.shape[1:], generator=generator)
        param.grad = whole.chunk(tp.size)[tp.rank].clone() if param.dim() == 2 else whole
        grads += [param.grad] if param.dim() == 2 else []
    optimizer.step()
    return grads


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


def test_a_wrong_state_is_refused_when_built_by_the_name_of_its_parameter(tmp_path: Path) -> None:
    source = LOW_RANK.replace("        return state\n", "        return state | {'right': torch.zeros(6, 2)}\n")
    wrong = imported("wrong", source, tmp_path)  # right for the trial matrix (4, 6) alone
    with pytest.raises(ValueError, match=r"'right' of '3.weight' has shape \(6, 2\) .* of shape \(8, 2\)"):
        made(Registry().with_rule(wrong.LOW_RANK), models(1)[0], "low_rank")


def test_parts_of_tensor_parallel_matrices_are_gathered_with_states_of_the_whole(registry: Registry) -> None:
    whole, *several = models(3)
    optimizer = made(registry, whole, "low_rank")

    def rank_main(tp: Comm) -> list[Tensor]:
        model = several[tp.rank]
        for param in (param for param in model.parameters() if param.dim() == 2):
            param.data = param.detach().chunk(2, 0)[tp.rank].clone()
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1  # type: ignore[attr-defined]
        own = made(registry, model, "low_rank", tp=tp)
        for number in range(2):
            step(model, own, number, tp)
        return matrices(model)

    for number in range(2):
        step(whole, optimizer, number)
    for parts, want in zip(zip(*run_threads(2, rank_main)), matrices(whole), strict=True):
        torch.testing.assert_close(torch.cat(parts), want)
