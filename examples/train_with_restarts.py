"""A run that restarts after a worker was killed, and ends with the same bits.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/train_with_restarts.py --dir runs/restarts --kill
    torchrun --standalone --nproc-per-node 2 examples/train_with_restarts.py --dir runs/whole
    optckpt diff runs/restarts/step-000000012 runs/whole/step-000000012

With `--kill`, the last rank kills itself in step 8 of the first attempt. torchrun then starts all ranks again, and they
resume from the newest checkpoint. `train` is the whole loop; `train_on_ray.py` runs it under Ray Train.
"""

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from ranks import join_ranks
from torch import nn

from opt_checkpoint import CheckpointManager, sharded_model
from opt_stack import OptimizerConfig, get_optimizer

SAVE_EVERY = 3
KILLED_IN = 8  # counted from 1


def train(directory: str, *, steps: int, kill: bool) -> None:
    """Train to `steps`, from the newest good checkpoint in `directory` if there is one."""
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    config = OptimizerConfig(optimizer="muon", lr=0.02, use_layer_wise_distributed_optimizer=True)
    optimizer = get_optimizer(config, [model])
    checkpoints = CheckpointManager(directory, keep=2)

    def state() -> dict[str, Any]:
        weights = sharded_model(model)
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    start = checkpoints.latest_good() or 0
    if start:
        optimizer.load_state_dict(checkpoints.load(state(), step=start).state["optimizer"])
    rank = dist.get_rank()
    print(f"rank {rank} begins after step {start}", flush=True)
    for step in range(start + 1, steps + 1):
        if kill and start == 0 and step == KILLED_IN and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        # Data by step and rank, so that a resumed run reads what the uninterrupted one does.
        batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0 or step == steps:
            checkpoints.save(step, state())
    checkpoints.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="of the checkpoints: on all nodes the same folder, or a bucket")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill", action="store_true", help="kill the last rank once")
    args = parser.parse_args()
    join_ranks()
    train(args.dir, steps=args.steps, kill=args.kill)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
