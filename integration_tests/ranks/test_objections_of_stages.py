"""A sparse gradient or replaced parameters on one pipeline stage are refused by all stages in the same step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.buffers.main_grad import SparseGradientError
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, get_optimizer, release_gradients

OTHER = "1 other rank(s) refused their gradients or parameter groups"
REPLACED = "param_groups hold other parameters than those that this optimizer was built with"


class Stage(nn.Module):
    """The first has a lookup, which gives sparse gradients if it is asked to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.add_module("linear" if number else "embedding", nn.Linear(4, 4) if number else nn.Embedding(8, 4))

    def forward(self, *, sparse: bool) -> Tensor:
        ((name, inner),) = self.named_children()
        inner.sparse = sparse
        out: Tensor = inner(torch.ones(2, 4) if name == "linear" else torch.tensor([1, 2]))
        return out


Groups = list[dict[str, Any]]
# The groups that the first stage gets (None: its gradient is sparse), and the error there.
OBJECTIONS: dict[str, tuple[Callable[[Groups], Groups] | None, str]] = {
    "sparse": (None, "gradient of 'embedding.weight' is torch.sparse_coo; dense (torch.strided) gradients are allowed"),
    "other params": (
        lambda groups: [g | {"params": [nn.Parameter(torch.zeros_like(p)) for p in g["params"]]} for g in groups],
        REPLACED,
    ),
    "no groups": (lambda groups: [], REPLACED),
    "no rate": (lambda groups: [group | {"lr": None} for group in groups], "lr of group"),
}


def stepped(optimizer: Optimizer, *, halves: bool) -> str:
    try:
        if not halves:
            optimizer.step()
        elif not optimizer.prepare_grads():
            optimizer.step_with_ready_grads()
    except (UnusableGradientError, ValueError) as caught:
        return str(caught)
    return ""


@pytest.mark.parametrize("halves", [False, True], ids=["whole step", "in halves"])
@pytest.mark.parametrize(("name", "wrapped"), [*((name, False) for name in OBJECTIONS), ("sparse", True)])
def test_an_objection_of_one_stage_in_the_second_of_three_steps_refuses_it_on_all(
    name: str, wrapped: bool, halves: bool
) -> None:
    """It raised on that stage alone, and the others waited for its statistics until the timeout."""
    change, message = OBJECTIONS[name]

    def rank_main(comm: Comm) -> list[tuple[str, bool]]:
        """Of each step the error, and whether a weight has moved."""
        axes = Axes(dp=Alone(), tp=Alone())
        roles, model = Roles(dense=axes, expert=axes, everyone=comm), Stage(comm.rank)
        if wrapped:
            model = DistributedDataParallel(DistributedDataParallelConfig(), model, groups=roles)
        optimizer, found = get_optimizer(OptimizerConfig(lr=0.1), [model], {}, pg_collection=roles), []
        groups = optimizer.param_groups
        for number in range(3):
            model(sparse=number == 1 and change is None).sum().backward()
            if comm.rank == 0 and number == 1 and change is not None:
                optimizer.param_groups = change(groups)
            before = [param.detach().clone() for param in model.parameters()]
            error = stepped(optimizer, halves=halves)
            optimizer.param_groups = groups
            optimizer.zero_grad()
            found.append((error, not all(map(torch.equal, before, model.parameters()))))
        return found

    for of_rank, start in zip(run_threads(2, rank_main), (message, OTHER), strict=True):
        assert of_rank[1][0].startswith(start)
        assert [(bool(error), moved) for error, moved in of_rank] == [(False, True), (True, False), (False, True)]


def test_a_released_gradient_that_is_sparse_is_refused_in_backward() -> None:
    model = Stage(0)
    release = release_gradients(get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [model], {}))
    before = model.embedding.weight.detach().clone()
    with pytest.raises(SparseGradientError, match=r"is torch\.sparse_coo"):
        model(sparse=True).sum().backward()
    assert torch.equal(model.embedding.weight, before)
    assert release.optimizer.in_backward is release
