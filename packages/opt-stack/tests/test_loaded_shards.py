"""Main values that were set outside of a step reach the parameters of every rank, before the next forward."""

import copy
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, train, weights
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

KINDS = ("plain", "wrapped", "overlapping")
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def build(comm: ThreadComm, kind: str, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
    axes = Axes(dp=comm, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=comm)
    overlaps = kind == "overlapping"
    shared: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_param_gather": overlaps}
    config = OptimizerConfig(lr=1e-2, bf16=dtype is torch.bfloat16, **shared)
    model = make_model(dtype)
    if kind == "plain":
        return model, get_optimizer(config, [model], {}, pg_collection=roles)
    of_wrapper = DistributedDataParallelConfig(overlap_grad_reduce=overlaps, bucket_size=20, **shared)
    return model, get_optimizer(config, [DistributedDataParallel(of_wrapper, model, groups=roles)], {})


@kinds
@dtypes
def test_parameters_are_those_of_the_state_dict_that_main_values_were_read_from(kind: str, dtype: torch.dtype) -> None:
    """Each rank had the new values in its own shard and the old ones in all others."""
    given = {name: torch.full(p.shape, 0.5) for name, p in make_model().named_parameters()}

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        model, optimizer = build(comm, kind, dtype)
        optimizer.reload_model_params(given)
        return weights(model)

    for found in run_threads(3, rank_main):
        assert_equal(found, {name: value.to(dtype) for name, value in given.items()})


@kinds
def test_a_loaded_16_bit_state_sets_the_parameters_on_every_rank(kind: str) -> None:
    def rank_main(comm: ThreadComm) -> None:
        trained, optimizer = build(comm, kind, torch.bfloat16)
        train(trained if kind == "plain" else optimizer.wrapped[0], optimizer, range(3))
        model, other = build(comm, kind, torch.bfloat16)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_equal(weights(model), weights(trained))

    run_threads(3, rank_main)


def test_a_state_that_one_rank_refuses_is_loaded_by_none() -> None:
    def rank_main(comm: ThreadComm) -> None:
        model, optimizer = build(comm, "plain", torch.bfloat16)
        backward(model, 0)
        optimizer.step()
        before = weights(model)
        state = copy.deepcopy(optimizer.state_dict())
        if comm.rank == 1:
            state["param_groups"][0]["lr"] = "fast"
        with pytest.raises(ValueError, match="lr='fast' of the saved group"):
            optimizer.load_state_dict(state)
        assert_equal(weights(model), before)

    run_threads(2, rank_main)
