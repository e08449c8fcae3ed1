"""A model in torch's own DistributedDataParallel: gradients are averaged once, by torch. Gloo processes."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from group_ranks import STEPS, Mlp, batch, config, train_alone
from processes import Job, run_jobs
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

KINDS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "flat": {"use_distributed_optimizer": True},
    "whole": {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True, "muon_fp32_matmul_prec": "highest"},
}


class Ran(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    zeros: list[int | None]


def made_for(kind: str) -> OptimizerConfig:
    return config(**KINDS[kind])


def train(kind: str, ignores: bool, alone: bool = False, unfreezes: bool = False) -> Ran:
    """One rank of a model in torch's wrapper, which leaves the norm to its user where it `ignores` it or `unfreezes` it
    only after the model was wrapped, and averages over this rank only where it is `alone`."""
    model = Mlp()
    model.norm.requires_grad_(not unfreezes)
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()] if alone else None
    if ignores:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["norm.weight", "norm.bias"])
    wrapper = DistributedDataParallel(model, process_group=group)
    model.norm.requires_grad_(True)
    optimizer = get_optimizer(made_for(kind), [wrapper], {})
    results = []
    for step in range(STEPS):
        wrapper(batch(step).chunk(dist.get_world_size())[dist.get_rank()]).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Ran(weights, [r.grad_norm for r in results], [r.num_zeros_in_grad for r in results])


# --- tests ---


@pytest.fixture(scope="module")
def two() -> dict[str, list[Ran]]:
    jobs = {f"{kind}, {ignores}": Job(train, (kind, ignores)) for kind in KINDS for ignores in (False, True)}
    jobs |= {f"{kind}, alone": Job(train, (kind, False, True)) for kind in KINDS}
    jobs |= {f"{kind}, unfrozen": Job(train, (kind, False, False, True)) for kind in KINDS}
    return run_jobs(2, jobs)


@pytest.mark.parametrize(
    "wrapped",
    ["False", "True", "alone", "unfrozen"],
    ids=["all", "all but the norm", "over each rank alone", "all but the norm, unfrozen later"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_torchs_wrapper_takes_the_steps_of_one_process(
    kind: str, wrapped: str, two: dict[str, list[Ran]]
) -> None:
    """The step averages parameters that the wrapper ignores, and all parameters if the wrapper averages over other
    ranks.

    Parameters that were unfrozen after the model was wrapped had each rank's own gradients, and replicas diverged.
    """
    want = train_alone(made_for(kind))
    for got in two[f"{kind}, {wrapped}"]:
        for name, weight in want.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-5, atol=0)
        assert got.zeros == want.zeros
