"""Ranks as gloo processes: a pool that is started once, so that imports are paid once; each case has a new world."""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from installed_packages import read_entry_points_once
from programs import fork_server

from fuzz.cases import Grid, Place
from fuzz.failed import Failed
from opt_checkpoint.run.ranks import leave
from opt_distributed.comm.groups import ProcessGroups

TIMEOUT = timedelta(seconds=60)
MAX_RANKS = 4


class _Job(NamedTuple):
    """A request to a worker."""

    world: int  # number of the world, for its keys in the store
    rank: int
    size: int
    rank_main: Callable[..., Any]
    args: tuple[Any, ...]


class Pool:
    """Worker processes that form one world after another."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = fork_server()
        self._worlds = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(MAX_RANKS):
            parent_end, worker_end = context.Pipe()
            process = context.Process(target=_work, args=(worker_end, self.store.port), daemon=True)
            process.start()
            worker_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)

    def run(self, size: int, rank_main: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of `rank_main(*args)` on each of `size` ranks of a new world; `Failed` where it raised."""
        self._worlds += 1
        for rank, pipe in enumerate(self._pipes[:size]):
            pipe.send(_Job(self._worlds, rank, size, rank_main, args))
        return [self._result(pipe) for pipe in self._pipes[:size]]

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.kill()

    def _result(self, pipe: Connection) -> Any:
        try:
            if pipe.poll(3 * TIMEOUT.total_seconds()):
                return pipe.recv()
        except (EOFError, OSError):
            return Failed(kind="Died", text="the process ended", where="", is_consequence=False)
        return Failed(kind="TimeoutError", text="the rank did not end: it hangs", where="", is_consequence=False)


_pools: list[Pool] = []


def run_processes(size: int, rank_main: Callable[..., Any], *args: Any) -> list[Any]:
    """`Pool.run` on this process's pool, which is started when first needed and again after a hang."""
    if not _pools:
        _pools.append(Pool())
        atexit.register(_pools[0].close)
    results = _pools[0].run(size, rank_main, *args)
    if any(isinstance(result, Failed) for result in results):  # a collective may still be under way
        _pools.pop().close()
    return results


def _work(pipe: Connection, port: int) -> None:
    torch.set_num_threads(1)
    read_entry_points_once()
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        job: _Job = pipe.recv()
        prefixed = dist.PrefixStore(f"world {job.world}", store)
        dist.init_process_group("gloo", store=prefixed, rank=job.rank, world_size=job.size, timeout=TIMEOUT)
        try:
            result = job.rank_main(*job.args)
        except Exception as error:
            result = Failed.of(error)
        pipe.send(result)
        leave(dist.group.WORLD)


def process_groups(grid: Grid, rank: int) -> ProcessGroups:
    """The groups of a grid by Megatron-Core's roles. A group of one rank is None."""
    shards = grid.dp // grid.instances
    keys: dict[str, Callable[[Place], Any]] = {
        "dp": lambda p: (p.stage, p.tp, p.replica % grid.cp),
        "dp_cp": lambda p: (p.stage, p.tp),
        "cp": lambda p: (p.stage, p.tp, p.replica // grid.cp),
        "expt_dp": lambda p: (p.stage, p.ep, p.etp),
        "mp": lambda p: p.replica,
        "tp_ep_pp": lambda p: p.expert_replica,
        "tp": lambda p: (p.stage, p.replica),
        "expt_tp": lambda p: (p.stage, p.ep, p.expert_replica),
        "embd": lambda p: (p.tp, p.replica, "ends" if p.stage in (0, grid.pp - 1) else p.stage),
        "pp": lambda p: (p.tp, p.replica),
        "ep": lambda p: (p.stage, p.etp, p.expert_replica),
        "intra_dist_opt": lambda p: p.instance,
        "intra_dp_cp": lambda p: (p.stage, p.tp, p.instance),
        "intra_expt_dp": lambda p: (p.stage, p.ep, p.etp, p.instance),
        "inter_dist_opt": lambda p: (p.stage, p.tp, p.replica % shards),
    }
    return ProcessGroups(**{role: _group(grid, rank, key) for role, key in keys.items()})


def _group(grid: Grid, rank: int, key: Callable[[Place], Any]) -> dist.ProcessGroup | None:
    """Every rank makes all groups of the role, in one order."""
    by_key: dict[Any, list[int]] = {}
    for other, place in enumerate(grid.places()):
        by_key.setdefault(key(place), []).append(other)
    mine = None
    for members in by_key.values():
        group = dist.new_group(members, timeout=TIMEOUT) if len(members) > 1 else None
        if rank in members:
            mine = group
    return mine
