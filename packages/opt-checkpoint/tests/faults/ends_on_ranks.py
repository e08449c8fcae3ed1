"""A rank whose script ends while its save is running: `ends_on_ranks.py FOLDER PATH HOW`."""

import sys
import threading
from pathlib import Path

import torch.distributed as dist

sys.path.append(sys.argv[2])
from states import state_at

from opt_checkpoint import CheckpointManager, async_save
from opt_checkpoint.store import store as store_module

folder, how, has_ended = Path(sys.argv[1]), sys.argv[3], threading.Event()


def call_after_the_end(name, key, act, detail=""):
    has_ended.wait()
    if how == "fails":
        raise OSError(28, "No space left on device")
    return act()


dist.init_process_group("gloo")
rank = dist.get_rank()
manager = CheckpointManager(folder / "run")
store_module.current = call_after_the_end
async_save(state_at(1, rank, 2), folder / "x")
manager.save(5, state_at(5, rank, 2))
if how == "destroys":
    dist.destroy_process_group()
has_ended.set()
