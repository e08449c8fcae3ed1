"""Ranks as processes: what threads cannot show, such as process groups, DTensors, FSDP2, lost ranks and exit statuses.

All of them are forked from a server that has imported torch and our packages, and computed nothing: a started
interpreter spends about five seconds on these imports. This module imports none of our packages.
"""

import atexit
import gc
import importlib.util
import inspect
import multiprocessing as mp
import os
import pickle
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from installed_packages import read_entry_points_once
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")
TIMEOUT_S = 60
ANSWER_S = 4 * TIMEOUT_S  # a collective gives up after one timeout; a world of many jobs takes its time
PRELOADED = ["opt_stack", "opt_checkpoint", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
PRELOADED += ["torch._dynamo"]  # which every torch optimizer imports when it is built
# On torch 2.6 a model that FSDP2 sharded cannot run without a GPU; its parameters can be updated, saved and loaded.
FSDP2_RUNS = hasattr(torch.cpu.Stream, "record_event")


class RankError(RuntimeError):
    """Ranks raised, died or hung; the message has their tracebacks."""


class Job(NamedTuple):
    """A program for the ranks of a world: a function and its arguments."""

    rank_main: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run_processes(size: int, rank_main: Callable[..., Any], *args: Any, reuse: bool = False) -> list[Any]:
    """Run `rank_main(*args)` on `size` gloo ranks; return their results in rank order.

    `rank_main` is a function at the top level of a file; it finds the world in `torch.distributed`. Arguments and
    results are pickled. With `reuse`, other worlds may have run in the processes, which saves a tenth of a second; not
    for DTensors, since torch keeps meshes of former worlds. Raises RankError: a rank raised, died or hung.
    """
    workers = _workers if reuse else _Workers()
    answers = workers.run(size, ByFile.of(rank_main, *args))
    failed = [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(answers) if not succeeded]
    if failed or not reuse:  # after a failure, a collective may still be under way
        workers.close()
    if failed:
        raise RankError("\n".join(failed))
    return [result for _, result in answers]


def run_jobs(size: int, jobs: Mapping[str, Job]) -> dict[str, list[Any]]:
    """Run the jobs in turn in one world. Results by job, then by rank."""
    by_file = {name: ByFile.of(job.rank_main, *job.args) for name, job in jobs.items()}
    by_rank = run_processes(size, _all_jobs, by_file)
    return {name: [results[name] for results in by_rank] for name in jobs}


def _all_jobs(jobs: Mapping[str, "ByFile"]) -> dict[str, Any]:
    return {name: job() for name, job in jobs.items()}


def run_program(program: Path | str, *arguments: object, ranks: int = 1, folder: Path | None = None) -> str:
    """Run `python program *arguments` on `ranks` ranks, with torchrun's variables; return what they print, in turn.

    With 0 ranks, it is one process without these variables. A module is `"-m"` and its name.

    They run in `folder`, by default in the folder in which this process was started. Raises RankError: a rank failed;
    the message is the end of what it wrote to stderr.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the ranks', as torchrun's agent
    world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
    of_ranks: list[dict[str, object]] = [world | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    of_processes = of_ranks or [{}]
    argv = [str(word) for word in (program, *arguments)]
    printed = ""
    with tempfile.TemporaryDirectory() as scratch:
        files = [(Path(scratch) / f"{rank}.out", Path(scratch) / f"{rank}.err") for rank in range(len(of_processes))]
        processes = [
            start(_launched, variables, argv, of_process, folder)
            for variables, of_process in zip(of_processes, files, strict=True)
        ]
        for process in processes:
            process.join(ANSWER_S)
            process.kill()
        for process, (out, err) in zip(processes, files, strict=True):
            if process.exitcode != 0:
                errors = err.read_text()[-3000:] if err.exists() else ""
                raise RankError(f"exit status {process.exitcode}\n{errors}")
            printed += out.read_text()
    return printed


def _launched(variables: dict[str, object], argv: list[str], files: tuple[Path, Path], folder: Path | None) -> None:
    if folder is not None:
        os.chdir(folder)
    os.environ.update({name: str(value) for name, value in variables.items()})
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


def start(main: Callable[..., Any], *args: Any) -> Any:
    """Start a process that runs `main(*args)` and ends; a `multiprocessing.Process`, which the test may kill."""
    process = fork_server().Process(target=_run_alone, args=(ByFile.of(main, *args),))
    process.start()
    return process


def fork_server() -> Any:
    """Return a context whose processes are as clean as spawned ones."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # those that are installed
    return context


def new_meeting(folder: Path) -> str:
    """Return the name of a file in which the ranks of a new world find each other."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="world-") as file:
        return file.name


def join_world(rank: int, size: int, meeting: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Make this process, which the test started, a rank of a gloo world."""
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)


@contextmanager
def world_of_one() -> Iterator[dist.ProcessGroup]:
    """Make this process a gloo world of size one: enough for meshes, DTensors and refusals."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def once_a_world(function: Callable[..., T]) -> Callable[..., T]:
    """Cache the results of a function, such as groups, until the world ends."""
    cached = cache(function)
    _cached_in_world.append(cached)
    return cached


_cached_in_world: list[Any] = []


@once_a_world
def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the same mesh for all models of a world: making one takes longer than a step, and slows what follows."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def refusal(build: Callable[[], object]) -> str:
    """Return the message of the ValueError that `build` raises on this rank, or "built" if it raises none."""
    try:
        build()
    except ValueError as error:
        return str(error)
    return "built"


# --- workers ----------------------------------------------------------------------------------------------------------


class ByFile(NamedTuple):
    """A function and its last arguments, for a process that cannot import the file: pytest imports files by path."""

    module: str
    file: str
    name: str
    pickled: bytes

    @classmethod
    def of(cls, function: Callable[..., Any], *args: Any) -> "ByFile":
        file = inspect.getsourcefile(function)
        assert file is not None
        return cls(function.__module__, file, function.__name__, pickle.dumps(args))

    def __call__(self, *first: Any) -> Any:
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[self.module])
        # Only now: the arguments may be of classes of this file.
        return getattr(sys.modules[self.module], self.name)(*first, *pickle.loads(self.pickled))


def _run_alone(main: ByFile) -> None:
    torch.set_num_threads(1)
    main()


class _Workers:
    """Processes that form one world after another. More are started when a world needs them."""

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._num_worlds = 0
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, size: int, rank_main: ByFile) -> list[tuple[bool, Any]]:
        if self._store is None:
            # It listens before anybody asks: on torch 2.6 a rank that comes too early may wait for half a minute.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < size:
            ours, theirs = fork_server().Pipe()
            process = fork_server().Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._num_worlds += 1
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((self._num_worlds, rank, size, rank_main))
        return [self._answer(pipe) for _, pipe in self._workers[:size]]

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()
        self._store = None

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            if not pipe.poll(ANSWER_S):
                return False, f"no answer in {ANSWER_S} s: it hangs"
            succeeded, answer = pipe.recv()
        except (EOFError, OSError):
            return False, "the process ended without a result"
        return succeeded, pickle.loads(answer) if succeeded else answer


_workers = _Workers()


@atexit.register
def close_workers() -> None:
    """End the workers that are used again; the next world starts new ones."""
    _workers.close()


def _serve(pipe: Connection, port: int) -> None:
    """Be a rank of one world after another, until killed."""
    torch.set_num_threads(1)
    read_entry_points_once()
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    gc.freeze()  # what was imported; looking through it after each world would take longer than most worlds
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    while True:
        world, rank, size, rank_main = pipe.recv()
        try:
            prefixed = dist.PrefixStore(f"world {world}", store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=timeout)
            answer = (True, pickle.dumps(rank_main()))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        _leave()


def _leave() -> None:
    """Destroy the world, and free what refers to its groups, so that peers that wait for this rank raise."""
    for function in _cached_in_world:
        function.cache_clear()
    # On torch 2.6, gloo's threads need the GIL to free a finished message, but destroying a group waits for them while
    # it has the GIL. Sleeping first gives them the GIL.
    time.sleep(0.01)
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
