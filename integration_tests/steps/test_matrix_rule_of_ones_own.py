"""The matrix rule that opt-kernels' README declares, in one file: its equation, its layouts, its checkpoints."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import run_threads
from opt_stack import Optimizer, Registry, get_optimizer

README = Path(__file__).parents[2] / "packages" / "opt-kernels" / "README.md"
(SOURCE,) = re.findall(r"```py\n# row_muon\.py\n(.*?)```", README.read_text(), flags=re.DOTALL)
LR, MOMENTUM = 0.02, 0.9


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """The rules here and the one that the file declares, imported before ranks start: they share the file."""
    file = tmp_path / "row_muon.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("row_muon", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Registry().with_rule(module.ROW_MUON)


def made(rules: Registry, comm: Comm, model: nn.Module, **fields: Any) -> Optimizer:
    config = OptimizerConfig(
        optimizer="row_muon", lr=LR, weight_decay=0.0, muon_momentum=MOMENTUM, clip_grad=0.0,
        use_layer_wise_distributed_optimizer=comm.size > 1, **fields,
    )  # fmt: skip
    axes = Axes(dp=comm, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=comm)
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
def test_ranks_that_hold_whole_matrices_continue_a_checkpoint_of_one(
    ranks: int, registry: Registry, tmp_path: Path
) -> None:
    (alone,), several = models(1), models(ranks)
    optimizer = made(registry, Alone(), alone)
    for number in range(2):
        step(alone, optimizer, number)
    save(state_of(alone, optimizer), tmp_path / "saved")
    for number in range(2, 4):
        step(alone, optimizer, number)

    def rank_main(comm: Comm) -> tuple[list[Tensor], int]:
        model = several[comm.rank]
        own = made(registry, comm, model)
        own.load_state_dict(load(state_of(model, own), tmp_path / "saved").state["optimizer"])
        for number in range(2, 4):
            step(model, own, number)
        return matrices(model), sum("momentum_buffer" in state for state in own.state_dict()["state"].values())

    found = run_threads(ranks, rank_main)
    assert sum(held for _, held in found) == len(matrices(alone))  # each matrix on one rank
    for weights, _ in found:
        for one, want in zip(weights, matrices(alone), strict=True):
            torch.testing.assert_close(one, want, rtol=1e-6, atol=1e-7)  # norms are summed in another order
