"""An option of a rule that differs on one rank is refused, with the same message on every rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import slow_tiger
import torch
from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_kernels.formulas import Formula
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.schedule_free import SCHEDULE_FREE
from opt_kernels.hooks import CautiousDecay, ClipUpdateRms
from opt_kernels.rules import MuonRule, Rule
from opt_stack import Registry, RuleEntry, get_optimizer, get_optimizer_based_on_param_groups

Options = dict[str, Any]


def rule(made: Rule, **hyper: Any) -> Options:
    entry = RuleEntry(name="own", summary="", make=lambda config: made, hyper=lambda config: hyper)
    return {"rules": Registry().with_rule(entry), "optimizer": "own"}


def formula(made: Formula) -> Options:
    return {"rules": Registry().with_formula(replace(made, name="own")), "optimizer": "own"}


def other_scalars(*, lr: float, weight_decay: float, beta1: float, beta2: float) -> dict[str, float]:
    return {"lr": lr, "decay": 1 - lr * weight_decay, "weight1": 1 - beta1, "weight2": 1 - beta2 * beta2}


def other_average(p: Any, z: Any, *, beta1: float) -> Any:
    return p + (1 - beta1) * (z - p)


# What rank 0 has, what the last rank has, and what the sentence shows.
CASES: dict[str, tuple[Options, Options, str]] = {
    "hooks": ({}, {"hooks": (CautiousDecay(),)}, r"hooks=\[\].*hooks=\[CautiousDecay\(\)\]"),
    "a hook's number": (
        {"hooks": (ClipUpdateRms(1.0),)}, {"hooks": (ClipUpdateRms(2.0),)}, r"threshold=1\.0.*threshold=2\.0",
    ),
    "steps of Newton-Schulz": (rule(MuonRule()), rule(MuonRule(num_ns_steps=6)), "num_ns_steps=5.*num_ns_steps=6"),
    "the dtype of a state": (
        rule(MuonRule()), rule(MuonRule(momentum_buffer_dtype=torch.bfloat16)),
        r"dtype=torch\.float32.*dtype=torch\.bfloat16",
    ),
    "a formula's source": (formula(LION), formula(replace(LION, scalars=other_scalars)), "source=.*source="),
    "a formula's evaluation": (
        formula(SCHEDULE_FREE),
        formula(replace(SCHEDULE_FREE, evaluation=(other_average, other_average))),
        "source=.*source=",
    ),
    "a formula's default": (
        formula(slow_tiger.RULE), formula(slow_tiger.RULE.with_defaults(period=4)), "period=3.*period=4",
    ),
    "a number of groups": (
        rule(MuonRule(), momentum=0.9), rule(MuonRule(), momentum=0.8),
        "momentum of w is 0.9 on rank 0 and 0.8 on rank",
    ),
}  # fmt: skip


def data_parallel(comm: Comm) -> Axes:
    return Axes(dp=comm, tp=Alone())


def tensor_parallel(comm: Comm) -> Axes:
    return Axes(dp=Alone(), tp=comm)


@pytest.mark.parametrize("axes_of", [data_parallel, tensor_parallel], ids=["data", "tensor"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_another_option_of_one_rank_is_refused_on_every_rank(
    case: str, size: int, axes_of: Callable[[Comm], Axes]
) -> None:
    of_first, of_last, message = CASES[case]

    def rank_main(comm: Comm) -> str:
        options = dict(of_last if comm.rank == size - 1 else of_first)
        config = OptimizerConfig(lr=0.1, optimizer=options.pop("optimizer", "adam"))
        axes, model = axes_of(comm), nn.Module()
        model.register_parameter("w", nn.Parameter(torch.ones(6, 4)))
        if axes.tp.size > 1:
            model.w.tensor_model_parallel, model.w.partition_dim, model.w.partition_stride = True, 0, 1
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        with pytest.raises(ConfigError, match=message) as caught:
            get_optimizer(config, [model], {}, pg_collection=roles, **options)
        return str(caught.value)

    assert len(set(run_threads(size, rank_main))) == 1


def test_a_group_that_one_replica_of_one_part_has_otherwise_is_refused_on_every_rank() -> None:
    """Ranks that had found the difference among their replicas did not compare with their tensor-parallel peers, which
    waited for them."""
    parts, replicas = ([World(2, timeout_s=30) for _ in range(2)] for _ in range(2))

    def rank_main(comm: Comm) -> str:
        replica, part = divmod(comm.rank, 2)
        axes = Axes(dp=ThreadComm(replicas[part], replica), tp=ThreadComm(parts[replica], part))
        model = nn.Module()
        model.register_parameter("w", nn.Parameter(torch.ones(6, 4)))
        model.w.tensor_model_parallel, model.w.partition_dim, model.w.partition_stride = True, 0, 1
        groups = [{"params": [model.w], "weight_decay": 0.2 if comm.rank == 3 else 0.1}]
        with pytest.raises(ValueError, match=r"weight_decay of w is 0\.1 on rank 0 and 0\.2 on rank 1") as caught:
            get_optimizer_based_on_param_groups(
                OptimizerConfig(lr=0.1), [model], groups, pg_collection=Roles(dense=axes, expert=axes, everyone=comm)
            )
        return str(caught.value)

    run_threads(4, rank_main)
