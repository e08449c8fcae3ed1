"""Starts an example's ranks: those of torchrun, or with plain `python` a world of one."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join_ranks() -> None:
    """Create the process group of torchrun's ranks; a program started without torchrun is the only rank."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
