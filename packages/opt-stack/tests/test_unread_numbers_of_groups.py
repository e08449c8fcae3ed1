"""Numbers without effect that are written to groups after the optimizer was built: refused by the next step."""

from typing import Any

import pytest
import torch
from stack_models import make_model, train, weights
from torch import nn

from opt_config import OptimizerConfig
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_kernels.formulas import Formula, Number, State, fma
from opt_kernels.hooks import CautiousDecay, Hook
from opt_scheduler import OptimizerParamScheduler
from opt_stack import Optimizer, Registry, get_optimizer


def scalars(*, lr: float, beta1: float) -> dict[str, float]:
    return {"lr": lr, "weight": 1 - beta1}


def update(p: Any, g: Any, m: Any, *, lr: Any, weight: Any) -> Any:
    m = fma(weight, g - m, m)
    return p - lr * m, m


UNDECAYED = Formula(
    name="undecayed", states=(State("m"),), numbers=(Number("betas", (0.9, 0.99)),), scalars=scalars, update=update
)


def built(hooks: tuple[Hook, ...] = (), comm: Any = None, **fields: Any) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    axes = Axes(dp=comm or Alone(), tp=Alone())
    config = OptimizerConfig(optimizer="undecayed", lr=0.1, **fields)
    roles = Roles(dense=axes, expert=axes, everyone=comm or Alone())
    rules = Registry().with_formula(UNDECAYED)
    return model, get_optimizer(config, [model], rules=rules, hooks=hooks, pg_collection=roles)


def scheduler(optimizer: Optimizer, start: float, end: float) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer, init_lr=0.1, max_lr=0.1, min_lr=0.1, lr_warmup_steps=0, lr_decay_steps=4, lr_decay_style="constant",
        start_wd=start, end_wd=end, wd_incr_steps=4, wd_incr_style="constant" if start == end else "linear",
    )  # fmt: skip


def test_a_schedule_of_weight_decay_that_nothing_reads_is_refused_before_anything_changes() -> None:
    model, optimizer = built()
    schedule = scheduler(optimizer, 0.01, 0.1)
    train(model, optimizer, range(1))
    before = weights(model)
    schedule.step(1)
    with pytest.raises(ValueError, match=r"weight_decay=0\.03\d* has no effect: formula 'undecayed' never reads it"):
        train(model, optimizer, range(1, 2))
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


@pytest.mark.parametrize("decay", [0.0, 0.01], ids=["none", "the default"])
def test_a_constant_weight_decay_that_nothing_reads_is_accepted(decay: float) -> None:
    model, optimizer = built(weight_decay=decay)
    schedule = scheduler(optimizer, decay, decay)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        schedule.step(1)


def test_a_hook_that_decays_reads_it() -> None:
    model, optimizer = built((CautiousDecay(),))
    schedule = scheduler(optimizer, 0.01, 0.1)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        schedule.step(1)


def test_betas_that_nothing_reads_are_refused_and_loaded_numbers_are_not() -> None:
    model, optimizer = built()
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["betas"] = (0.9, 0.5)
    with pytest.raises(ValueError, match="never reads beta2"):
        train(model, optimizer, range(1))
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["weight_decay"] = 0.1  # as of a version that did not refuse it
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(ValueError, match="has no effect"):
        train(model, optimizer, range(1))


def test_every_rank_refuses_what_one_wrote() -> None:
    def rank_main(comm: ThreadComm) -> str:
        model, optimizer = built(comm=comm, use_distributed_optimizer=True)
        if comm.rank == 1:
            optimizer.param_groups[0]["weight_decay"] = 0.2
        before = weights(model)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            train(model, optimizer, range(1))
        assert all(torch.equal(before[name], value) for name, value in weights(model).items())
        return str(caught.value)

    other, own = run_threads(2, rank_main)
    assert "other rank" in other
    assert "weight_decay=0.2 has no effect" in own
