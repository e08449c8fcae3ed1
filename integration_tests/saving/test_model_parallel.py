"""Parts of divided models that cannot be placed are refused with a sentence on every rank, never saved as the whole.

Those that can be placed are saved as the whole, and resumed on other grids by the fuzz.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grids import Grid, process_groups
from processes import Job, refusal, run_jobs, run_processes
from torch import Tensor, nn

from opt_checkpoint import (
    ShardedTensor,
    differences,
    load,
    load_optimizer,
    read_index,
    save,
    sharded_model,
    sharded_optimizer,
)
from opt_checkpoint.state import ModelAxes, Replica, place_
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import OptimizerConfig, ProcessGroups, get_optimizer, run_threads


def model_of(grid: Grid, rank: int, seed: int) -> nn.Module:
    """What a rank has of a model of four layers with known values."""

    def part(whole: Tensor, dim: int, *, dense: bool = False) -> nn.Parameter:
        if dense:
            tp = at.tp
            size = grid.tp
        else:
            tp = at.etp
            size = grid.etp
        param = nn.Parameter(torch.cat([run.chunk(size, dim)[tp] for run in whole.chunk(1 + dense)]))
        vars(param).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1 + dense, allreduce=dense)
        return param

    at = grid.place(rank)
    layers = nn.ModuleList(nn.Module() for _ in range(4))
    length = 4 // grid.pp
    torch.manual_seed(seed)
    for layer in layers:
        layer.norm = nn.Parameter(torch.randn(3))
        layer.scale = nn.Buffer(torch.randn(3))
        layer.gate = part(torch.randn(8, 3), 0, dense=True)
        layer.stack = part(torch.randn(4, 3, 6).chunk(grid.ep)[at.ep], 2)
        layer.experts = nn.ParameterList(part(up, 0) for up in torch.randn(4, 4, 3).chunk(grid.ep)[at.ep])
    return nn.ModuleDict({"layers": layers[at.stage * length :][:length]})


class Run:
    def __init__(self, grid: Grid, rank: int = 0, *, seed: int = 0, **fields: Any):
        self.grid = grid
        self.rank = rank
        self.model = model_of(grid, rank, seed)
        self.groups = process_groups(grid, rank)
        config = OptimizerConfig(lr=0.05, clip_grad=0.0, **(fields or {"use_distributed_optimizer": True}))
        self.optimizer = get_optimizer(config, [self.model], pg_collection=self.groups)

    def step(self, seed: int) -> None:
        for param, grad in zip(self.model.parameters(), model_of(self.grid, self.rank, seed).parameters(), strict=True):
            param.grad = grad.data * (1 if getattr(param, "allreduce", True) else self.grid.dp / self.grid.expert_dp)
        self.optimizer.step()

    def sharded(self) -> dict[str, Any]:
        weights = sharded_model(self.model, groups=self.groups)
        return {"model": weights, "optimizer": self.optimizer.sharded_state_dict(weights)}

    def load(self, path: str) -> None:
        self.optimizer.load_state_dict(load(self.sharded(), path).state["optimizer"])


class TorchRun:
    """The same model with torch's AdamW, whose groups are the experts and the others."""

    def __init__(self, grid: Grid, rank: int = 0, *, seed: int = 0):
        self.grid = grid
        self.rank = rank
        self.model = model_of(grid, rank, seed)
        self.groups = process_groups(grid, rank) if grid.size > 1 else None
        dense = [param for param in self.model.parameters() if getattr(param, "allreduce", True)]
        experts = [param for param in self.model.parameters() if not getattr(param, "allreduce", True)]
        self.optimizer = torch.optim.AdamW([{"params": dense}, {"params": experts, "lr": 0.01}], lr=0.05)

    def step(self, seed: int) -> None:
        for param, grad in zip(self.model.parameters(), model_of(self.grid, self.rank, seed).parameters(), strict=True):
            param.grad = grad.data
        self.optimizer.step()

    def save(self, path: str) -> None:
        weights = sharded_model(self.model, groups=self.groups)
        save({"model": weights, "optimizer": sharded_optimizer(self.model, self.optimizer, groups=self.groups)}, path)

    def load(self, path: str) -> None:
        load({"model": sharded_model(self.model, groups=self.groups)}, path)
        self.optimizer.param_groups[0]["lr"] = 9.0
        report = load_optimizer(self.model, self.optimizer, path, groups=self.groups)
        assert report.uninitialised == report.gone == report.groups.new == report.groups.gone == ()
        assert [group["lr"] for group in self.optimizer.param_groups] == [0.05, 0.01]


def save_torch_part(grid: Grid, path: str) -> None:
    run = TorchRun(grid, dist.get_rank())
    run.step(1)
    run.save(path)


def resume_torch_part(grid: Grid, path: str) -> None:
    run = TorchRun(grid, dist.get_rank(), seed=9)
    run.load(path)
    run.step(2)
    run.save(f"{path}-resumed")


def test_torchs_optimizer_of_parts_is_saved_as_that_of_the_whole(tmp_path: Path) -> None:
    whole = TorchRun(Grid())
    whole.step(1)
    whole.save(str(tmp_path / "whole"))
    tp_pp = Grid(tp=2, pp=2)
    ep = Grid(dp=4, ep=2, etp=2)
    jobs = {name: Job(save_torch_part, (grid, str(tmp_path / name))) for name, grid in (("tp_pp", tp_pp), ("ep", ep))}
    jobs["ep to tp_pp"] = Job(resume_torch_part, (tp_pp, str(tmp_path / "ep")))
    jobs["whole to ep"] = Job(resume_torch_part, (ep, str(tmp_path / "whole")))
    run_jobs(4, jobs)
    for name in ("tp_pp", "ep"):
        indices = read_index(tmp_path / name), read_index(tmp_path / "whole")
        assert [found for found in differences(*indices) if found.key in indices[1].tensors] == []
    whole.step(2)
    for name in ("ep-resumed", "whole-resumed"):
        resumed = TorchRun(Grid(), seed=8)
        resumed.load(str(tmp_path / name))
        for mine, theirs in ((resumed.model, whole.model), (resumed.optimizer, whole.optimizer)):
            torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-6)


def save_part(grid: Grid, path: str) -> None:
    run = Run(grid, dist.get_rank())
    save({"model": sharded_model(run.model, groups=run.groups)}, f"{path}/first")
    run.step(1)
    save(run.sharded(), f"{path}/stepped")


def test_a_divided_model_is_saved_as_the_whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    grids = {str(tmp_path_factory.mktemp("saved")): grid for grid in (Grid(tp=2, pp=2), Grid(dp=4, ep=2, etp=2))}
    run_jobs(4, {path: Job(save_part, (grid, path)) for path, grid in grids.items()})
    for path in grids:
        loaded = Run(Grid(), seed=8)
        resumed = Run(Grid(), seed=9)
        whole = Run(Grid())
        load({"model": sharded_model(loaded.model)}, f"{path}/first")
        torch.testing.assert_close(loaded.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        resumed.load(f"{path}/stepped")
        for run, seed in ((whole, 1), (whole, 2), (resumed, 2)):
            run.step(seed)
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=1e-6, atol=1e-6)


# The rows of a fused gate and value are saved in another order than that of the parts.
MOMENTS: dict[str, dict[str, Any]] = {
    f"{method}, {mode}": {
        "optimizer": "adaptive_muon",
        "adaptive_muon_moment2_method": method,
        "muon_tp_mode": mode,
        "muon_fp32_matmul_prec": "highest",
    }
    for method in ("normuon", "namo", "adamuon_paper")
    for mode in ("duplicated", "distributed")
}


def resume_moments(path: str) -> None:
    """From parts and from the whole, by one step each."""
    for name, fields in MOMENTS.items():
        run = Run(Grid(tp=2), dist.get_rank(), **fields)
        run.step(1)
        save(run.sharded(), f"{path}/parts/{name}")
        for saved in ("parts", "whole"):
            resumed = Run(Grid(tp=2), dist.get_rank(), seed=9, **fields)
            resumed.load(f"{path}/{saved}/{name}")
            resumed.step(2)
            save({"model": sharded_model(resumed.model, groups=resumed.groups)}, f"{path}/{saved}-resumed/{name}")


def test_moments_of_fused_rows_are_saved_as_of_the_whole(tmp_path: Path) -> None:
    """NorMuon's were refused at the save where each rank has those of its rows, and else loaded in such parts only."""
    wholes = {name: Run(Grid(), **fields) for name, fields in MOMENTS.items()}
    for name, whole in wholes.items():
        whole.step(1)
        save(whole.sharded(), tmp_path / "whole" / name)
        whole.step(2)
    run_processes(2, resume_moments, str(tmp_path))
    for name, fields in MOMENTS.items():
        resumed = Run(Grid(), seed=8, **fields)
        resumed.load(f"{tmp_path}/parts/{name}")
        resumed.step(2)
        found = [resumed.model.state_dict()]
        for saved in ("parts", "whole"):
            other = Run(Grid(), seed=7, **fields)
            load({"model": sharded_model(other.model)}, f"{tmp_path}/{saved}-resumed/{name}")
            found.append(other.model.state_dict())
        for weights in found:
            torch.testing.assert_close(weights, wholes[name].model.state_dict(), rtol=1e-5, atol=1e-5)


def marked(**marks: Any) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(torch.rand(4, 3, generator=torch.Generator().manual_seed(7 + dist.get_rank())))
    for name, value in marks.items():
        setattr(model.w, name, value)
    return model


TP = {"tensor_model_parallel": True, "partition_dim": 0}


def groups(*roles: str) -> ProcessGroups:
    """All roles that must be given are a rank alone, but these are the world."""
    alone = dict.fromkeys(("dp", "expt_dp", "mp", "tp_ep_pp"))
    return ProcessGroups(**{**alone, **dict.fromkeys(roles, dist.group.WORLD)})


def describe(*roles: str, **marks: Any) -> None:
    sharded_model(marked(**marks), groups=groups(*roles))


def save_model(path: str, model: nn.Module) -> None:
    save({"model": sharded_model(model)}, path)


def replicated(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=dist.get_rank())


def load_without_groups(path: str) -> None:
    save({"model": {"w": replicated("model.w", torch.zeros(4, 3))}}, path)
    load({"model": sharded_model(marked(**TP))}, path)


def stage(layers: int, *, value: float = 0.0) -> nn.Module:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))})
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, value + number)
    return model


def load_stages_without_groups(path: str) -> None:
    """The same first layers on every rank are loaded if the groups say so; a model of all layers needs no groups."""
    of_stages = groups("mp", "pp", "tp_ep_pp", "intra_dist_opt")
    save({"model": sharded_model(stage(2, value=10.0 * dist.get_rank()), groups=of_stages)}, path)
    for layers, given, expected in ((4, None, [0, 1, 10, 11]), (2, ProcessGroups(dp=dist.group.WORLD), [0, 1])):
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


def save_torch_stages(path: str) -> None:
    model = nn.ModuleDict({f"part{dist.get_rank()}": nn.Linear(2, 2)})
    save({"optimizer": sharded_optimizer(model, torch.optim.SGD(model.parameters()))}, path)


def parts_as_wholes(path: str) -> None:
    model = marked(**TP)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=groups(*OF_TP))
    optimizer.sharded_state_dict({"w": replicated("w", model.w)})


OF_TP = ("mp", "tp_ep_pp", "tp", "intra_dist_opt")
UNKNOWN = "w is tensor parallel .* unknown without process groups"
REFUSED: dict[str, tuple[Callable[[str], Any], str]] = {
    "tp saved": (lambda path: save_model(path, marked(**TP)), rf"{UNKNOWN}; pass sharded_model\(model, groups="),
    "experts saved": (
        lambda path: save_model(path, marked(allreduce=False)),
        r"w is an expert \(allreduce=False\), .* pass sharded_model\(model, groups=",
    ),
    "stages saved": (
        lambda path: save_model(path, marked()),
        r"values differ .* for parts of one model sharded_model\(model, groups=\.\.\.\)",
    ),
    "loaded": (load_without_groups, UNKNOWN),
    "stages loaded": (
        load_stages_without_groups,
        r"model\.layers has 2 layers, and .* more \(model\.layers\.2\.weight\): .*groups=",
    ),
    "states of torch": (save_torch_states, UNKNOWN),
    "stages of torch": (save_torch_stages, r"optimizer\.names .*pass sharded_optimizer\(model, optimizer, groups="),
    "groups without tp": (
        lambda path: sharded_model(marked(**TP), groups=ProcessGroups(dp=None, mp=dist.group.WORLD)),
        "account for 1 of 2 ranks with dense parameters .*pass every group of opt_stack.ProcessGroups",
    ),
    "experts without ep": (
        lambda path: describe("dp", "tp_ep_pp", allreduce=False),
        "account for 1 of 2 ranks with experts .*pass every group of opt_stack.ProcessGroups",
    ),
    "parts as wholes": (parts_as_wholes, "describes each part as the whole; pass opt_checkpoint.sharded_model"),
}


def ask_all(folder: str) -> dict[str, str]:
    return {name: refusal(lambda ask=ask, name=name: ask(f"{folder}/{name}")) for name, (ask, _) in REFUSED.items()}


def test_a_part_of_unknown_place_is_refused_on_every_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank in run_processes(2, ask_all, str(tmp_path_factory.mktemp("refused"))):
        for name, (_, message) in REFUSED.items():
            assert re.search(message, rank[name]), f"{name}: {rank[name]}"


@pytest.mark.parametrize("is_expert", [False, True], ids=["stages", "experts"])
def test_local_state_of_another_stage_or_expert_rank_is_refused(is_expert: bool) -> None:
    states: dict[int, Any] = {}

    def rank_main(comm: Comm) -> str:
        alone = Axes(dp=Alone(), tp=Alone())
        roles = Roles(dense=Axes(dp=comm, tp=Alone()) if is_expert else alone, expert=alone, everyone=comm)
        model = nn.Linear(3, 2)
        for param in model.parameters():
            nn.init.constant_(param, comm.rank + 1)
            param.allreduce = not is_expert
            param.grad = torch.ones_like(param)
        optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=roles)
        optimizer.step()
        assert optimizer.has_rank_local_state
        states[comm.rank] = optimizer.state_dict()
        comm.gather_objects("saved")
        optimizer.load_state_dict(states[comm.rank])
        return refusal(lambda: optimizer.load_state_dict(states[1 - comm.rank]))

    kind = "experts" if is_expert else "dense"
    for rank, message in enumerate(run_threads(2, rank_main)):
        assert f"was saved on layout replicated, {kind} part {1 - rank} of 2, but this optimizer has" in message


def test_uneven_parts_of_one_group_are_refused_on_all_ranks() -> None:
    """Its ranks left out the comparison of experts, in which the others waited for them."""

    def rank_main(comm: Comm) -> str:
        first = comm.rank - comm.rank % 2
        tp = comm.part([first, first + 1])
        dp = comm.part([comm.rank % 2, comm.rank % 2 + 2])
        model = nn.Module()
        model.dense = nn.Parameter(torch.zeros(3 if comm.rank == 0 else 2, 4))
        model.expert = nn.Parameter(torch.zeros(2, 4))
        model.expert.allreduce = False
        for param in model.parameters():
            param.tensor_model_parallel = True
            param.partition_dim = 0
        state = {"model": sharded_model(model)}
        axes = ModelAxes(all_ranks=comm, tp=tp, expert_tp=comm, ep=Alone(), pp=Alone(), dense=dp, expert=Replica(0, 1))
        return refusal(lambda: place_(state, axes))

    messages = run_threads(4, rank_main)
    assert all("dense" in message for message in messages), messages
