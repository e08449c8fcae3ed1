"""Scripts end with status 0 without destroying their process groups."""

import socket
import subprocess
import sys

WORLDS = 6  # without the wait at exit, two of three worlds abort

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from opt_distributed.comm.collectives import TorchComm

torch.set_num_threads(1)

def last_step(comm):
    for _ in range(20):
        comm.all_reduce_(torch.ones(300_000), async_op=True)  # nobody keeps it, and nobody waits

for port in map(int, sys.argv[1:]):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())  # imports torch once for all ranks
        if ranks[-1] == 0:
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
            last_step(TorchComm(dist.group.WORLD))
            sys.exit(0)
    print(*[os.waitpid(pid, 0)[1] for pid in ranks], flush=True)
"""


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def test_scripts_that_end_during_collectives_end_with_status_0():
    command = [sys.executable, "-c", SCRIPT, *free_ports(WORLDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 0"] * WORLDS, done.stderr
