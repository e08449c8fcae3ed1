"""A sparse gradient or replaced parameters on one pipeline stage are refused by all stages in the same step."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.buffers.main_grad import SparseGradientError
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, get_optimizer, release_gradients

SPARSE = "gradient of 'embedding.weight' is torch.sparse_coo; dense (torch.strided) gradients are allowed"
REPLACED = "param_groups hold other parameters than those that this optimizer was built with"
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


def whole_step(optimizer: Optimizer) -> None:
    optimizer.step()


def in_halves(optimizer: Optimizer) -> None:
    assert not optimizer.prepare_grads()
    optimizer.step_with_ready_grads()


STEPS = pytest.mark.parametrize("step", [whole_step, in_halves])


def outcome_of(model: nn.Module, optimizer: Optimizer, step: Callable[[Optimizer], None]) -> tuple[str, bool]:
    """The error of a step, and whether a weight has moved."""
    before = [param.detach().clone() for param in model.parameters()]
    error = ""
    try:
        step(optimizer)
    except (UnusableGradientError, ValueError) as caught:
        error = str(caught)
    optimizer.zero_grad()
    return error, not all(map(torch.equal, before, model.parameters()))


def with_sparse_gradients(comm: Comm, *, wrapped: bool, step: Callable[[Optimizer], None]) -> list[tuple[str, bool]]:
    """Three steps, the second with a sparse gradient on the first stage."""
    model, optimizer = of_stages(comm, wrapped=wrapped)
    found = []
    for number in range(3):
        model(sparse=number == 1).sum().backward()
        found.append(outcome_of(model, optimizer, step))
    return found


def assert_second_is_refused(found: list[list[tuple[str, bool]]], *, first: str) -> None:
    for of_rank, start in zip(found, (first, OTHER), strict=True):
        assert of_rank[1][0].startswith(start)
        assert [(bool(error), moved) for error, moved in of_rank] == [(False, True), (True, False), (False, True)]


@STEPS
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_sparse_gradient_of_one_stage_is_refused_by_all(wrapped: bool, step: Callable[[Optimizer], None]) -> None:
    """It raised on that stage alone, and the others waited for its statistics until the timeout."""
    found = run_threads(2, partial(with_sparse_gradients, wrapped=wrapped, step=step))
    assert_second_is_refused(found, first=SPARSE)


@STEPS
@pytest.mark.parametrize("without_groups", [False, True], ids=["other params", "no groups"])
def test_replaced_parameters_of_one_stage_are_refused_by_all(
    step: Callable[[Optimizer], None], without_groups: bool
) -> None:
    """It raised on that stage alone, and the others waited for its statistics until the timeout."""

    def rank_main(comm: Comm) -> list[tuple[str, bool]]:
        model, optimizer = of_stages(comm, wrapped=False)
        built, groups = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
        for group in groups:
            group["params"] = [nn.Parameter(torch.zeros_like(param)) for param in group["params"]]
        found = []
        for number in range(3):
            model(sparse=False).sum().backward()
            if comm.rank == 0:
                other = [] if without_groups else groups
                optimizer.param_groups = other if number == 1 else built
            found.append(outcome_of(model, optimizer, step))
        return found

    assert_second_is_refused(run_threads(2, rank_main), first=REPLACED)


@STEPS
def test_a_group_without_a_rate_on_one_stage_is_refused_by_all(step: Callable[[Optimizer], None]) -> None:
    """The second half of a step raised on that stage alone."""

    def rank_main(comm: Comm) -> list[tuple[str, bool]]:
        model, optimizer = of_stages(comm, wrapped=False)
        found = []
        for number in range(3):
            model(sparse=False).sum().backward()
            if comm.rank == 0:
                optimizer.param_groups[0]["lr"] = None if number == 1 else 0.1
            found.append(outcome_of(model, optimizer, step))
        return found

    assert_second_is_refused(run_threads(2, rank_main), first="lr of group")


def test_a_sparse_gradient_is_a_value_error() -> None:
    model, optimizer = of_stages(Alone(), wrapped=False)
    model(sparse=True).sum().backward()
    with pytest.raises(ValueError, match=r"is torch\.sparse_coo"):
        optimizer.step()


def test_a_released_gradient_that_is_sparse_is_refused_in_backward() -> None:
    model = First()
    release = release_gradients(get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [model], {}))
    before = model.embedding.weight.detach().clone()
    with pytest.raises(SparseGradientError, match=r"is torch\.sparse_coo"):
        model(sparse=True).sum().backward()
    assert torch.equal(model.embedding.weight, before)
    assert release.optimizer.in_backward is release
