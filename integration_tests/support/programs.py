"""Run programs as a launcher does, on ranks that are forked from a process that has imported torch and the packages.

A started interpreter spends about five seconds on these imports, on every rank, which is longer than most programs run.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 240


def fork_server() -> Any:
    """Return a context whose processes are as clean as spawned ones: the server has imported, and computed nothing."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["opt_stack", "opt_checkpoint", "torch.distributed.fsdp"])
    return context


def run_program(program: Path, *arguments: object, ranks: int = 1, folder: Path | None = None) -> str:
    """Run `python program *arguments` on `ranks` ranks, with torchrun's variables; return what they print, in turn.

    They run in `folder`, by default in the folder in which this process was started.

    Raises AssertionError, with the end of what a rank wrote to stderr, if that rank fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [Path(scratch) / str(rank) for rank in range(ranks)]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the ranks', as torchrun's agent
        world = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": "lo"}
        argv = [str(word) for word in (program, *arguments)]
        processes = [
            fork_server().Process(target=_rank, args=(world | {"RANK": rank, "LOCAL_RANK": rank}, argv, output, folder))
            for rank, output in enumerate(outputs)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_S)
            process.kill()
        for process, output in zip(processes, outputs, strict=True):
            errors = output.with_suffix(".err")
            assert process.exitcode == 0, errors.read_text()[-3000:] if errors.exists() else process.exitcode
        return "".join(output.with_suffix(".out").read_text() for output in outputs)


def _rank(world: dict[str, object], argv: list[str], output: Path, folder: Path | None) -> None:
    torch.set_num_threads(1)
    if folder is not None:
        os.chdir(folder)
    os.environ.update({name: str(value) for name, value in world.items()})
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
