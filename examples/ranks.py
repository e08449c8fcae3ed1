"""Starts an example's ranks: those of torchrun, or with plain `python` a world of one."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join_ranks() -> None:
    """Create the process group of torchrun's ranks; a program started without torchrun is the only rank.

    torchrun's store outlives an attempt of `--max-restarts`, and with gloo it still has the addresses of ranks that are
    dead: each attempt uses names of its own. On several nodes agents count attempts apart, so torchrun must leave each
    attempt a store of its own: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    env = os.environ
    if "RANK" not in env:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank = int(env["RANK"])
    agent_hosts = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not agent_hosts
    store: dist.Store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=is_host, timeout=timeout)
    if agent_hosts:
        store = dist.PrefixStore(f"attempt {env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    world = int(env["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
