"""A rank whose script ends while its save is running: `ends_on_ranks.py FOLDER PATH HOW`."""

import errno
import sys
import threading
from pathlib import Path

import torch.distributed as dist

sys.path.append(sys.argv[2])
from failing_calls import Calls, error
from states import state_at

from opt_checkpoint import CheckpointManager, async_save

folder = Path(sys.argv[1])
how = sys.argv[3]
has_ended = threading.Event()


def wait_for_the_end(name: str, key: str) -> None:
    has_ended.wait()
    if how == "fails":
        error(errno.ENOSPC)


dist.init_process_group("gloo")
rank = dist.get_rank()
manager = CheckpointManager(folder / "run")
Calls(wait_for_the_end).__enter__()  # for good
async_save(state_at(1, rank, 2), folder / "x")
manager.save(5, state_at(5, rank, 2))
if how == "destroys":
    dist.destroy_process_group()
has_ended.set()
