"""Parts of a model that cannot be placed are refused with a sentence on every rank, never saved as the whole."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import nn

from opt_checkpoint import ShardedTensor, load, save, sharded_model, sharded_optimizer
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import OptimizerConfig, ProcessGroups, get_optimizer, run_threads


def marked(shape: tuple[int, ...] = (4, 3), **marks: Any) -> nn.Module:
    model = nn.Module()
    generator = torch.Generator().manual_seed(7 + dist.get_rank() if dist.is_initialized() else 7)
    model.w = nn.Parameter(torch.rand(shape, generator=generator))
    for name, value in marks.items():
        setattr(model.w, name, value)
    return model


TP = {"tensor_model_parallel": True, "partition_dim": 0}


def tp_groups() -> ProcessGroups:
    world = dist.group.WORLD
    return ProcessGroups(dp=None, expt_dp=None, mp=world, tp_ep_pp=world, tp=world, intra_dist_opt=world)


def save_without_groups(path: str) -> None:
    save({"model": sharded_model(marked(**TP))}, path)


def save_experts_without_groups(path: str) -> None:
    save({"model": sharded_model(marked(allreduce=False))}, path)


def save_stages_without_groups(path: str) -> None:
    save({"model": sharded_model(marked())}, path)


def load_without_groups(path: str) -> None:
    save(
        {"model": {"w": ShardedTensor.from_rank_offsets("model.w", torch.zeros(4, 3), replica_id=dist.get_rank())}},
        path,
    )
    load({"model": sharded_model(marked(**TP))}, path)


def stage(layers: int, *, value: float = 0.0) -> nn.Module:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))})
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, value + number)
    return model


def load_stages_without_groups(path: str) -> None:
    """The same first layers on every rank are loaded if the groups say so; a model of all layers needs no groups."""
    world = dist.group.WORLD
    groups = ProcessGroups(dp=None, expt_dp=None, mp=world, pp=world, tp_ep_pp=world, intra_dist_opt=world)
    save({"model": sharded_model(stage(2, value=10.0 * dist.get_rank()), groups=groups)}, path)
    for layers, given, expected in ((4, None, [0, 1, 10, 11]), (2, ProcessGroups(dp=world), [0, 1])):
        model = stage(layers, value=99.0)
        load({"model": sharded_model(model, groups=given)}, path)
        assert [param[0, 0].item() for param in model.parameters()] == expected
    load({"model": sharded_model(stage(2))}, path)


def save_torch_states(path: str) -> None:
    model = marked(**TP)
    optimizer = torch.optim.AdamW(model.parameters())
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    save({"optimizer": sharded_optimizer(model, optimizer)}, path)


def without_dim(path: str) -> None:
    sharded_model(marked(tensor_model_parallel=True), groups=tp_groups())


def dim_too_large(path: str) -> None:
    sharded_model(marked(tensor_model_parallel=True, partition_dim=2), groups=tp_groups())


def strided_columns(path: str) -> None:
    sharded_model(marked(tensor_model_parallel=True, partition_dim=1, partition_stride=3), groups=tp_groups())


def dim_missing_on_one_rank(path: str) -> None:
    sharded_model(marked(**(TP if dist.get_rank() else {"tensor_model_parallel": True})), groups=tp_groups())


def groups_without_tp(path: str) -> None:
    sharded_model(marked(**TP), groups=ProcessGroups(dp=None, mp=dist.group.WORLD))


def experts_without_ep(path: str) -> None:
    world = dist.group.WORLD
    sharded_model(marked(allreduce=False), groups=ProcessGroups(dp=world, expt_dp=None, mp=None, tp_ep_pp=world))


def parts_as_wholes(path: str) -> None:
    model = marked(**TP)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=tp_groups())
    weights = {"w": ShardedTensor.from_rank_offsets("w", model.w, replica_id=dist.get_rank())}
    optimizer.sharded_state_dict(weights)


def replicas_that_also_are_parts(path: str) -> None:
    world = dist.group.WORLD
    get_optimizer(OptimizerConfig(lr=0.1), [marked()], pg_collection=ProcessGroups(dp=world, tp=world))


REFUSED: dict[Callable[[str], None], str] = {
    save_without_groups: r"w is tensor parallel .* unknown without process groups; pass sharded_model\(model, groups=",
    save_experts_without_groups: r"w is an expert \(allreduce=False\), .* pass sharded_model\(model, groups=",
    save_stages_without_groups: r"values differ .* for parts of one model sharded_model\(model, groups=\.\.\.\)",
    load_without_groups: "w is tensor parallel .* unknown without process groups",
    load_stages_without_groups: r"model\.layers has 2 layers, and .* more \(model\.layers\.2\.weight\): .*groups=",
    save_torch_states: "w is tensor parallel .* unknown without process groups",
    without_dim: "tensor_model_parallel=True, but no partition_dim; set param.partition_dim",
    dim_too_large: "tensor_model_parallel=True, but partition_dim=2; set param.partition_dim",
    strided_columns: "partition_stride=3 and partition_dim=1; a stride above 1 is supported along dim 0",
    dim_missing_on_one_rank: "but no partition_dim; set param.partition_dim",
    groups_without_tp: "account for 1 of 2 ranks with dense parameters .*pass every group of opt_stack.ProcessGroups",
    experts_without_ep: "account for 1 of 2 ranks with experts .*pass every group of opt_stack.ProcessGroups",
    parts_as_wholes: "describes each part as the whole; pass opt_checkpoint.sharded_model",
    replicas_that_also_are_parts: "the ranks of tp hold other parts of the model, so they are not replicas",
}


def ask_all(folder: str) -> dict[str, str]:
    found = {}
    for ask in REFUSED:
        try:
            ask(f"{folder}/{ask.__name__}")
            found[ask.__name__] = "nothing was refused"
        except ValueError as error:
            found[ask.__name__] = str(error)
    return found


# --- tests ---


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
