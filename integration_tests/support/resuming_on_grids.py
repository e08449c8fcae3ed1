"""Rank programs for the tests of resuming on other TP x DP grids; importable, so that spawned processes find them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tp_model import Grid, Lm, Part, joined, joined_batch

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_distributed.comm import TorchComm
from opt_scheduler import OptimizerParamScheduler
from opt_stack import Optimizer, get_optimizer

BEFORE, IN_ALL = 3, 23  # steps until the save, and of the whole schedule

State = dict[str, dict[str, Tensor]]  # by parameter: whole `weight`, `exp_avg`, `exp_avg_sq`, `fp32_param`, `step`


class Size(NamedTuple):
    """A grid of ranks."""

    tp: int
    dp: int

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.dp}"


class Numbers(NamedTuple):
    """The dtypes of a run."""

    options: dict[str, Any]
    dtype: torch.dtype


class Run(NamedTuple):
    """The results of one rank: all elements at the save, and the losses that follow."""

    state: State
    losses: list[float]


class Going(NamedTuple):
    """A run in progress."""

    model: Lm
    optimizer: Optimizer
    scheduler: OptimizerParamScheduler
    grid: Grid

    def sharded(self) -> dict[str, Any]:
        weights = self.model.sharded_state_dict(self.grid.dp.rank)
        state = self.optimizer.sharded_state_dict(weights)
        return {"model": weights, "optimizer": state, "scheduler": self.scheduler.state_dict()}

    def train(self, steps: range) -> list[float]:
        """Losses of the joined batch."""
        losses = []
        for step in steps:
            loss = self.model(joined_batch(step).chunk(self.grid.dp.size)[self.grid.dp.rank])
            self.optimizer.scale_loss(loss).backward()
            assert self.optimizer.step().success
            self.optimizer.zero_grad()
            self.scheduler.step(1)
            total = loss.detach().clone()
            self.grid.dp.all_reduce_(total)
            losses.append(total.item() / self.grid.dp.size)
        return losses


def begin(grid: Grid, numbers: Numbers, *, seed: int = 0) -> Going:
    model = Lm(grid.tp, numbers.dtype, seed=seed)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0, **numbers.options)
    for name, part in model.parts().items() if config.fp8_recipe is not None else ():
        if name.startswith("blocks") and part.weight.dim() == 2:
            part.quantize_(config.fp8_recipe)
    optimizer = get_optimizer(config, [model], pg_collection=grid.roles)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=BEFORE + 2,  # the save falls into the warm-up: a schedule that restarted would be noticed
        lr_decay_steps=IN_ALL,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=IN_ALL,
        wd_incr_style="constant",
    )
    return Going(model, optimizer, scheduler, grid)


class Job(NamedTuple):
    """A run on a grid that starts and saves to `path`, or resumes from it."""

    size: Size
    numbers: Numbers
    path: str
    after: int  # steps that follow


def run_all(saves: dict[str, Job], loads: dict[str, Job]) -> dict[str, Run]:
    """The runs that include this rank. Small grids run at the same time on different ranks."""
    grids = _make_grids({job.size for job in (*saves.values(), *loads.values())})
    found: dict[str, Run] = {}
    for work, jobs in ((_save_and_go_on, saves), (_resume, loads)):
        for number, (name, job) in enumerate(jobs.items()):
            places = grids[job.size]
            grid = places[number % len(places)]
            if grid is not None:
                found[name] = work(grid, job)
        dist.barrier()
    return found


def _save_and_go_on(grid: Grid, job: Job) -> Run:
    going = begin(grid, job.numbers)
    going.train(range(BEFORE))
    save(going.sharded(), job.path, process_group=grid.world.group)
    return Run(everything(going), going.train(range(BEFORE, BEFORE + job.after)))


def _resume(grid: Grid, job: Job) -> Run:
    """Resume from values of another seed, so that a missing load is detected."""
    going = begin(grid, job.numbers, seed=1)
    loaded = load(going.sharded(), job.path, process_group=grid.world.group).state
    going.optimizer.load_state_dict(loaded["optimizer"])
    going.scheduler.load_state_dict(loaded["scheduler"])
    return Run(everything(going), going.train(range(BEFORE, BEFORE + job.after)))


def _make_grids(sizes: set[Size]) -> dict[Size, list[Grid | None]]:
    """The places of each grid among the world's ranks, None where this rank is outside; all ranks make groups in the
    same order."""
    found: dict[Size, list[Grid | None]] = {}
    for size in sorted(sizes):
        numel = size.tp * size.dp
        firsts = range(0, dist.get_world_size() - numel + 1, numel)
        found[size] = [_make_grid(size, first) for first in firsts]
    return found


def _make_grid(size: Size, first: int) -> Grid | None:
    ranks = [[first + dp * size.tp + tp for tp in range(size.tp)] for dp in range(size.dp)]
    world = dist.new_group([rank for row in ranks for rank in row])
    tp_groups = [dist.new_group(row) for row in ranks]
    dp_groups = [dist.new_group(list(column)) for column in zip(*ranks, strict=True)]
    dp, tp = divmod(dist.get_rank() - first, size.tp)
    if not 0 <= dp < size.dp:
        return None
    return Grid(tp=TorchComm(tp_groups[dp]), dp=TorchComm(dp_groups[tp]), world=TorchComm(world))


@torch.no_grad()
def everything(going: Going) -> State:
    """All elements of the run, joined in rank order without using the checkpoint's metadata."""
    local = _local_state(going)
    by_rank = going.grid.world.gather_objects(local)
    tp_size = going.grid.tp.size
    found: State = {}
    for name, part in going.model.parts().items():
        of_tp = [_of_block(by_rank[tp::tp_size], name, part) for tp in range(tp_size)]
        found[name] = {key: _whole([block[key] for block in of_tp], part) for key in of_tp[0]}
    return found


def _local_state(going: Going) -> State:
    state = {name: {"weight": part.weight.detach().clone()} for name, part in going.model.parts().items()}
    held = going.optimizer.state_dict()
    for group in held["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            of_param = held["state"].get(index, {})
            of_elements = {key: value for key, value in of_param.items() if not key.startswith("fp8_")}  # scales
            state[name.removesuffix(".weight")] |= {_of_whole(key): value for key, value in of_elements.items()}
    return state


def _of_whole(key: str) -> str:
    """The name of a state without the part of the parameter: `exp_avg` of `exp_avg@0of2[128:256]`."""
    return key.partition("[")[0].partition("@")[0]


def _of_block(by_dp: list[State], name: str, part: Part) -> dict[str, Tensor]:
    """One tensor-parallel rank's block: its flat shards concatenated in the order of data-parallel ranks."""
    weights = [of_rank[name]["weight"] for of_rank in by_dp]
    assert all(torch.equal(weight, weights[0]) for weight in weights), f"replicas of {name} differ"
    block = {"weight": weights[0]}
    holders = [of_rank[name] for of_rank in by_dp if "step" in of_rank[name]]
    for key in holders[0].keys() - {"weight"}:
        values = [holder[key] for holder in holders]
        if key == "step":
            assert all(torch.equal(value, values[0]) for value in values), f"steps of {name} differ"
            block[key] = values[0]
        else:
            block[key] = torch.cat([value.flatten() for value in values]).view(part.weight.shape)
    return block


def _whole(blocks: list[Tensor], part: Part) -> Tensor:
    return joined(blocks, dim=part.dim if blocks[0].dim() else None, fused=part.fused)
