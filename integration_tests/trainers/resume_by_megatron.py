"""Saves with Megatron-Core's `dist_checkpointing`, and loads with another optimizer, on gloo ranks without a GPU.

    python resume_by_megatron.py FOLDER RANKS KIND

"ours" is the optimizer of `opt_stack.megatron`, "theirs" Megatron-Core's. FOLDER gets a directory of each after three
steps, and of each pair the directory that the second one saves after loading that of the first. "A by our load" is what
our optimizer saves after `opt_stack.megatron.dist_checkpointing.load` of A, and "ours by our save to theirs" what
Megatron-Core's saves after loading a directory of its `save`, which releases before 0.19 cannot read.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # emerging-optimizers compiles functions

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/opt-checkpoint/tests_megatron"))

from write_megatron import KINDS, STEPS, Kind, OnCpu, start, train

PAIRS = (("ours", "ours"), ("ours", "theirs"), ("theirs", "ours"))
TYPE = "distrib_optim_sharding_type"


def run(rank: int, folder: Path, ranks: int, kind: Kind) -> None:
    import megatron.core

    start(rank, folder, ranks)
    with OnCpu():
        for side in ("ours", "theirs"):
            save(*build(side, kind, STEPS), folder / side, kind)
        for first, second in PAIRS:
            model, optimizer = build(second, kind, 0)
            load(model, optimizer, folder / first)
            save(model, optimizer, folder / f"{first} to {second}", kind)
        for first in ("ours", "theirs"):
            model, optimizer = build("ours", kind, 0)
            load(model, optimizer, folder / first, package=our_checkpointing())
            save(model, optimizer, folder / f"{first} by our load", kind)
        if megatron.core.__version__ >= "0.19":
            by_us = folder / "ours by our save"
            save(*build("ours", kind, STEPS), by_us, kind, package=our_checkpointing())
            model, optimizer = build("theirs", kind, 0)
            load(model, optimizer, by_us, strict="raise_all")
            save(model, optimizer, folder / "ours by our save to theirs", kind)
    dist.barrier()
    dist.destroy_process_group()


def our_checkpointing() -> Any:
    from opt_stack.megatron import dist_checkpointing

    return dist_checkpointing


def build(side: str, kind: Kind, steps: int) -> tuple[Any, Any]:
    if side == "theirs":
        return train(1, kind, steps=steps)
    from opt_stack import megatron

    return train(1, kind, package=megatron, steps=steps)


def save(model: Any, optimizer: Any, path: Path, kind: Kind, *, package: Any = None) -> None:
    from megatron.core import dist_checkpointing

    path.mkdir(exist_ok=True)
    dist.barrier()
    metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
    if kind.is_distributed or kind.is_layer_wise:
        metadata[TYPE] = "fully_reshardable"
    sharded = model.module.sharded_state_dict()
    state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, metadata=metadata)}
    (package or dist_checkpointing).save(state, str(path), content_metadata=metadata)


def complete_(optimizer: Any) -> None:
    """Give torch's Adam in Megatron-Core's optimizers the state that it lacks before a step."""
    for part in getattr(optimizer, "chained_optimizers", ()):
        if not isinstance(part.optimizer, torch.optim.Adam):
            continue
        state = part.optimizer.state
        for param in (param for group in part.optimizer.param_groups for param in group["params"]):
            moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            state[param] = {"step": torch.tensor(0.0), **moments}
        if hasattr(part, "_set_main_param_and_optimizer_states"):  # it looks for a step, too
            set_states = part._set_main_param_and_optimizer_states
            part._set_main_param_and_optimizer_states = partial(_set_with_step, part, set_states)


def _set_with_step(part: Any, set_states: Any, param: Any, tensors: Any) -> None:
    group, order = part.model_param_group_index_map[param]
    main = part.optimizer.param_groups[group]["params"][order]
    set_states(param, {**tensors, "step": part.optimizer.state[main]["step"]})


def load(model: Any, optimizer: Any, path: Path, *, package: Any = None, **options: Any) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing = package or dist_checkpointing
    metadata = dist_checkpointing.load_content_metadata(str(path))
    complete_(optimizer)
    sharded = model.module.sharded_state_dict()
    state = {"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=True, metadata=metadata)}
    loaded = dist_checkpointing.load(state, str(path), **options)
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


if __name__ == "__main__":
    world = int(sys.argv[2])
    mp.start_processes(run, (Path(sys.argv[1]), world, KINDS[sys.argv[3]]), nprocs=world, start_method="spawn")
