"""The matrix rules that the pages on rules declare: equations, layouts, checkpoints."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, Registry, get_optimizer

DOCS = Path(__file__).parents[2] / "docs"
OWN_RULES = (DOCS / "own_rules.md").read_text()
(SOURCE,) = re.findall(r"```python\n(\"\"\"RowMuon.*?)```", OWN_RULES, flags=re.DOTALL)
PAGE = (DOCS / "rules.md").read_text()
(LOW_RANK,) = re.findall(r"```python\n(from dataclasses import dataclass.*?)```", PAGE, flags=re.DOTALL)
(ENTRY,) = re.findall(r"```python\n(from opt_stack import RuleEntry.*?\n\)\n)", PAGE, flags=re.DOTALL)
LR, MOMENTUM = 0.02, 0.9


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """The rules here and those that the pages declare, imported before ranks start: they share the files."""
    module = imported("row_muon", SOURCE, tmp_path)
    page = imported("low_rank", f"import torch\nfrom opt_kernels import Number\n{LOW_RANK}\n{ENTRY}", tmp_path)
    return Registry().with_rule(module.ROW_MUON).with_rule(page.LOW_RANK)


def imported(name: str, source: str, folder: Path) -> Any:
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(
    rules: Registry, comm: Comm, model: nn.Module, rule: str = "row_muon", tp: Comm | None = None, **fields: Any
) -> Optimizer:
    config = OptimizerConfig(
        optimizer=rule, lr=LR, weight_decay=0.0, muon_momentum=MOMENTUM, clip_grad=0.0,
        use_layer_wise_distributed_optimizer=comm.size > 1, **fields,
    )  # fmt: skip
    axes = Axes(dp=comm, tp=tp or Alone())
    roles = Roles(dense=axes, expert=axes, everyone=tp or comm)
    return get_optimizer(config, [model], rules=rules, pg_collection=roles)


def models(count: int) -> list[nn.Module]:
    """Equal models, made before ranks start: threads share torch's generator."""
    found = []
    for _ in range(count):
        torch.manual_seed(0)
        found.append(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8), nn.Linear(8, 8)))
    return found


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def matrices(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters() if param.dim() == 2]


def test_it_has_at_most_sixty_lines() -> None:
    assert len(SOURCE.splitlines()) <= 60


def test_it_takes_the_steps_of_its_equation(registry: Registry) -> None:
    (model,) = models(1)
    optimizer = made(registry, Alone(), model, muon_fp32_matmul_prec="highest")
    wanted, momenta = matrices(model), [torch.zeros_like(matrix) for matrix in matrices(model)]
    norms = [matrix.norm() for matrix in wanted]
    for number in range(3):
        step(model, optimizer, number)
        grads = [param.grad for param in model.parameters() if param.dim() == 2]
        for i, grad in enumerate(grads):
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
    (alone,), several = models(1), models(ranks)
    optimizer = made(registry, Alone(), alone, rule)
    for number in range(2):
        step(alone, optimizer, number)
    save(state_of(alone, optimizer), tmp_path / "saved")
    for number in range(2, 4):
        step(alone, optimizer, number)

    def rank_main(comm: Comm) -> tuple[list[Tensor], int]:
        model = several[comm.rank]
        own = made(registry, comm, model, rule)
        own.load_state_dict(load(state_of(model, own), tmp_path / "saved").state["optimizer"])
        for number in range(2, 4):
            step(model, own, number)
        return matrices(model), sum(state in of for of in own.state_dict()["state"].values())

    found = run_threads(ranks, rank_main)
    assert sum(held for _, held in found) == len(matrices(alone))  # each matrix on one rank
    for weights, _ in found:
        for one, want in zip(weights, matrices(alone), strict=True):
            torch.testing.assert_close(one, want, rtol=1e-6, atol=1e-7)  # norms are summed in another order


def test_a_state_of_a_chosen_shape_is_resumed_by_a_state_dict_and_refused_in_another_shape(registry: Registry) -> None:
    first, second = models(2)
    optimizer, other = (made(registry, Alone(), model, "low_rank") for model in (first, second))
    step(first, optimizer, 0)
    saved = optimizer.state_dict()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(saved)
    step(first, optimizer, 1)
    step(second, other, 1)
    assert all(map(torch.equal, matrices(first), matrices(second)))
    index = next(index for index, state in saved["state"].items() if "right" in state)
    saved["state"][index]["right"] = saved["state"][index]["right"].mT.contiguous()
    with pytest.raises(ValueError, match=r"right of '0.weight' has shape \(2, 12\), this rank's piece has \(12, 2\)"):
        other.load_state_dict(saved)


def test_a_wrong_state_is_refused_when_built_by_the_name_of_its_parameter(registry: Registry, tmp_path: Path) -> None:
    source = f"import torch\nfrom opt_kernels import Number\n{LOW_RANK}\n{ENTRY}"
    source = source.replace("        return state\n", "        return state | {'right': torch.zeros(6, 2)}\n")
    wrong = imported("wrong", source, tmp_path)  # right for the trial matrix (4, 6) alone
    with pytest.raises(ValueError, match=r"'right' of '3.weight' has shape \(6, 2\) .* of shape \(8, 2\)"):
        made(Registry().with_rule(wrong.LOW_RANK), Alone(), models(1)[0], "low_rank")


def test_parts_of_tensor_parallel_matrices_are_gathered_with_states_of_the_whole(registry: Registry) -> None:
    (whole,), several = models(1), models(2)
    optimizer = made(registry, Alone(), whole, "low_rank")
    for number in range(2):
        step(whole, optimizer, number)

    def rank_main(comm: Comm) -> list[Tensor]:
        model = several[comm.rank]
        for param in model.parameters():
            if param.dim() == 2:
                param.data = param.detach().chunk(2, 0)[comm.rank].clone()
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1  # type: ignore[attr-defined]
        own = made(registry, Alone(), model, "low_rank", comm)
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            for param, like in zip(model.parameters(), whole.parameters()):
                grad = torch.randn(like.shape, generator=generator)
                param.grad = grad.chunk(2, 0)[comm.rank].clone() if param.dim() == 2 else grad
            own.step()
        return matrices(model)

    for parts, want in zip(zip(*run_threads(2, rank_main)), matrices(whole), strict=True):
        torch.testing.assert_close(torch.cat(parts), want)
