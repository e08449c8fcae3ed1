"""A sparse gradient or replaced parameters on one pipeline stage are refused by all stages in the same step."""

from collections.abc import Callable

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


class First(nn.Module):
    """A stage whose lookup gives sparse gradients if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, *, sparse: bool) -> Tensor:
        self.embedding.sparse = sparse
        rows: Tensor = self.embedding(torch.tensor([1, 2]))
        return rows


class Last(nn.Module):
    """Another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, sparse: bool) -> Tensor:
        out: Tensor = self.linear(torch.ones(2, 4))
        return out


def of_stages(comm: Comm, *, wrapped: bool) -> tuple[nn.Module, Optimizer]:
    axes = Axes(dp=Alone(), tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=comm)
    model: nn.Module = First() if comm.rank == 0 else Last()
    if wrapped:
        model = DistributedDataParallel(DistributedDataParallelConfig(), model, groups=roles)
    return model, get_optimizer(OptimizerConfig(lr=0.1), [model], {}, pg_collection=roles)


def other_params(optimizer: Optimizer) -> None:
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [nn.Parameter(torch.zeros_like(param)) for param in group["params"]]
    optimizer.param_groups = groups


def no_groups(optimizer: Optimizer) -> None:
    optimizer.param_groups = []


def no_rate(optimizer: Optimizer) -> None:
    optimizer.param_groups = [group | {"lr": None} for group in optimizer.param_groups]


REPLACED = "param_groups hold other parameters than those that this optimizer was built with"
# What changes on the first stage (None: its gradient is sparse), and the error there.
OBJECTIONS: dict[str, tuple[Callable[[Optimizer], None] | None, str]] = {
    "sparse": (None, "gradient of 'embedding.weight' is torch.sparse_coo; dense (torch.strided) gradients are allowed"),
    "other params": (other_params, REPLACED),
    "no groups": (no_groups, REPLACED),
    "no rate": (no_rate, "lr of group"),
}


@pytest.mark.parametrize("halves", [False, True], ids=["whole step", "in halves"])
@pytest.mark.parametrize(("name", "wrapped"), [*((name, False) for name in OBJECTIONS), ("sparse", True)])
def test_an_objection_of_one_stage_in_the_second_of_three_steps_refuses_it_on_all(
    name: str, wrapped: bool, halves: bool
) -> None:
    """It raised on that stage alone, and the others waited for its statistics until the timeout."""
    change, message = OBJECTIONS[name]

    def rank_main(comm: Comm) -> list[tuple[str, bool]]:
        """Of each step the error, and whether a weight has moved."""
        model, optimizer = of_stages(comm, wrapped=wrapped)
        groups, found = optimizer.param_groups, []
        for number in range(3):
            model(sparse=number == 1 and change is None).sum().backward()
            if comm.rank == 0 and number == 1 and change is not None:
                change(optimizer)
            before, error = [param.detach().clone() for param in model.parameters()], ""
            try:
                if not halves:
                    optimizer.step()
                elif not optimizer.prepare_grads():
                    optimizer.step_with_ready_grads()
            except (UnusableGradientError, ValueError) as caught:
                error = str(caught)
            optimizer.param_groups = groups
            optimizer.zero_grad()
            found.append((error, not all(map(torch.equal, before, model.parameters()))))
        return found

    for of_rank, start in zip(run_threads(2, rank_main), (message, OTHER), strict=True):
        assert of_rank[1][0].startswith(start)
        assert [(bool(error), moved) for error, moved in of_rank] == [(False, True), (True, False), (False, True)]


def test_a_released_gradient_that_is_sparse_is_refused_in_backward() -> None:
    model = First()
    release = release_gradients(get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [model], {}))
    before = model.embedding.weight.detach().clone()
    with pytest.raises(SparseGradientError, match=r"is torch\.sparse_coo"):
        model(sparse=True).sum().backward()
    assert torch.equal(model.embedding.weight, before)
    assert release.optimizer.in_backward is release
