"""Parts of a model that cannot be placed are refused with a sentence on every rank, never saved as the whole."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_processes
from torch import nn
from unplaced_parts import REFUSED, ask_all

from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import OptimizerConfig, get_optimizer, run_threads


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_processes(2, ask_all, str(tmp_path_factory.mktemp("refused")))


@pytest.mark.parametrize("ask", REFUSED, ids=lambda ask: ask.__name__)
def test_a_part_of_unknown_place_is_refused_on_every_rank(
    ask: Callable[[str], None], refusals: list[dict[str, str]]
) -> None:
    for rank in refusals:
        assert re.search(REFUSED[ask], rank[ask.__name__]), rank[ask.__name__]


# --- state_dict of this rank's part -----------------------------------------------------------------------------------


def model_on(rank: int, *, is_expert: bool) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank + 1)
            if is_expert:
                param.allreduce = False
    return model


@pytest.mark.parametrize("is_expert", [False, True], ids=["stages", "experts"])
def test_the_local_state_of_another_stage_or_expert_rank_is_refused(is_expert: bool) -> None:
    states: dict[int, Any] = {}

    def rank_main(comm: ThreadComm) -> str:
        alone = Axes(dp=Alone(), tp=Alone())
        dense = Axes(dp=comm, tp=Alone()) if is_expert else alone
        roles = Roles(dense=dense, expert=alone, everyone=comm)
        model = model_on(comm.rank, is_expert=is_expert)
        optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=roles)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.has_rank_local_state
        states[comm.rank] = optimizer.state_dict()
        comm.gather_objects("saved")
        optimizer.load_state_dict(states[comm.rank])
        try:
            optimizer.load_state_dict(states[1 - comm.rank])
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    kind = "experts" if is_expert else "dense"
    for rank, refusal in enumerate(run_threads(2, rank_main)):
        assert f"was saved on layout replicated, {kind} part {1 - rank} of 2, but this optimizer has" in refusal
