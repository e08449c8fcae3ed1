"""Worlds of ranks for tests: gloo processes on this machine, or threads; and the small model they train."""

import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from installed_packages import read_entry_points_once
from programs import fork_server
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from opt_checkpoint.run.ranks import leave

TIMEOUT_S = 60
# On torch 2.6 a model that FSDP2 sharded cannot run without a GPU; its parameters can be updated, saved and loaded.
FSDP2_RUNS = hasattr(torch.cpu.Stream, "record_event")


def run_processes(size: int, rank_main: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `rank_main(*args)` on `size` gloo ranks; return each rank's result or exception, in rank order.

    `rank_main` is a function of an importable module; it finds the world in `torch.distributed`.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = fork_server()
        # It listens before anybody asks: on torch 2.6 a rank that comes too early may wait for half a minute.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [
            context.Process(target=_rank, args=(r, size, store.port, folder, rank_main, args)) for r in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(4 * TIMEOUT_S)  # a collective gives up after one; a world of many jobs takes its time
        for process in ranks:
            if process.is_alive():
                process.kill()
        return [_result(Path(folder) / f"{rank}.pkl", rank) for rank in range(size)]


class Job(NamedTuple):
    """A program for the ranks of a world: an importable function and its arguments."""

    rank_main: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run_jobs(size: int, jobs: Mapping[str, Job]) -> dict[str, list[Any]]:
    """Run the jobs in turn in one world, since starting it costs more than most jobs. Results by job, then by rank."""
    by_rank = run_processes(size, _all_jobs, dict(jobs))
    for result in by_rank:
        if isinstance(result, Exception):
            raise result
    return {name: [result[name] for result in by_rank] for name in jobs}


def _all_jobs(jobs: Mapping[str, Job]) -> dict[str, Any]:
    return {name: job.rank_main(*job.args) for name, job in jobs.items()}


def _rank(rank: int, size: int, port: int, folder: str, rank_main: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    read_entry_points_once()
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store, timeout = dist.TCPStore("127.0.0.1", port, is_master=False), timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        result = rank_main(*args)
    except Exception as error:
        error.add_note(traceback.format_exc())
        result = error
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    leave(dist.group.WORLD)


def _result(path: Path, rank: int) -> Any:
    if not path.exists():
        raise RuntimeError(f"rank {rank} died or hung without a result")
    return pickle.loads(path.read_bytes())


@cache
def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The same mesh for all models of a world: making one takes longer than a step, and each slows what follows."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def refusal(build: Callable[[], object]) -> str:
    """Return the message of the ValueError that `build` raises on this rank, or "built" if it raises none."""
    try:
        build()
    except ValueError as error:
        return str(error)
    return "built"


# --- the model ------------------------------------------------------------------------------------

DIM, CONTEXT, VOCAB = 16, 12, 31
_SEEDED = threading.Lock()  # ranks that are threads share torch's generator


class Tiny(nn.Module):
    """A transformer of one layer: matrices, biases, norms, an embedding, a head. `forward` gives the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        # No biases inside: a key's bias has no effect on the loss, so its gradient is rounding noise, and Adam turns
        # noise into full-size steps that differ between any two orders of summation.
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, 0.0, batch_first=True, norm_first=True, bias=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, codes: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embedding(codes[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), codes[:, 1:].flatten())


def make_model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tiny:
    """The same weights for the same seed, on every rank and in every dtype (rounded)."""
    with _SEEDED:
        torch.manual_seed(seed)
        return Tiny().to(dtype)


def joined_batch(step: int, *, size: int = 8) -> Tensor:
    """The joined batch of all ranks in a step."""
    return torch.randint(VOCAB, (size, CONTEXT + 1), generator=torch.Generator().manual_seed(100 + step))


def my_batch(step: int) -> Tensor:
    """This rank's equal part of the joined batch."""
    return joined_batch(step).chunk(dist.get_world_size())[dist.get_rank()]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
