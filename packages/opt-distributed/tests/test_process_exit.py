"""Scripts end with status 0 without destroying their process groups."""

import subprocess
import sys
from pathlib import Path

WORLDS = 6  # without the wait at exit, two of three worlds abort

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from opt_distributed.comm.collectives import TorchComm

torch.set_num_threads(1)

def last_step(comm):
    for _ in range(20):
        comm.all_reduce_(torch.ones(300_000), async_op=True)  # nobody keeps it, and nobody waits

for meeting in sys.argv[1:]:
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())  # imports torch once for all ranks
        if ranks[-1] == 0:
            dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
            last_step(TorchComm(dist.group.WORLD))
            sys.exit(0)
    print(*[os.waitpid(pid, 0)[1] for pid in ranks], flush=True)
"""


def test_scripts_that_end_during_collectives_end_with_status_0(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, *(str(tmp_path / f"world-{number}") for number in range(WORLDS))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 0"] * WORLDS, done.stderr
