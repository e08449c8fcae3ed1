"""Cost of tiers: the time a step is blocked, the time until its copy is on the other node, and the time of a resume.

    python packages/opt-checkpoint/benchmarks/bench_tiers.py [--mb 256] [--rounds 3] [--local DIR] [--durable DIR]

Two ranks on gloo stand for two nodes with a directory each. Copies use the loopback interface; both ranks share the
processors and the disk of this machine. Ratios are within a round, to a plain copy of the same tensors and to a
resume from the durable tier.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Figure, timed, write_results

from opt_checkpoint import CheckpointManager, ShardedTensor, TieredCheckpointManager

MB = 1 << 20
CHUNKS = 8


def state_of(rank: int, size: int, nbytes: int) -> dict[str, Any]:
    """The state of a rank: its rows of eight tensors."""
    rows = nbytes // CHUNKS // 4 // 1024
    return {
        f"w{i}": ShardedTensor.from_rank_offsets(f"w{i}", torch.randn(rows, 1024), (0, rank, size))
        for i in range(CHUNKS)
    }


def seconds(work: Any) -> float:
    """Seconds until all ranks have done their work."""
    dist.barrier()
    return timed(lambda: (work(), dist.barrier())).wall


def measure(rank: int, size: int, options: argparse.Namespace, folder: str, meeting: str) -> None:
    """All figures, on every rank; rank 0 prints them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    local = f"{options.local}/{Path(folder).name}/node-{rank}"
    durable = f"{folder}/durable"
    state = state_of(rank, size, options.mb * MB)
    copies = [torch.empty_like(shard.data) for shard in state.values()]
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    def open_tiers() -> TieredCheckpointManager:
        return TieredCheckpointManager(local, durable, durable_every=1_000_000, node=f"node-{rank}")

    manager = open_tiers()
    plain = CheckpointManager(durable, in_background=False, keep=1)
    for number in range(options.rounds + 1):
        took: dict[str, float] = {}
        for what in ("copy", "save") if number % 2 else ("save", "copy"):
            os.sync()
            if what == "copy":
                took[what] = seconds(lambda: [c.copy_(s.data) for c, s in zip(copies, state.values(), strict=True)])
            else:
                took[what] = seconds(lambda n=number: manager.save(n, state))
                took["wait"] = seconds(manager.wait)
        if number:
            note("plain copy", took["copy"])
            note("blocked by a local save", took["save"])
            note("then, until it is on both nodes", took["wait"])
    note("save to the durable tier", seconds(lambda: plain.save(0, state)))
    manager.close()
    for _ in range(options.rounds):
        with open_tiers() as found:
            note("resume from the own node", seconds(lambda m=found: m.load(state)))
        if rank == 1:
            shutil.rmtree(local)
        with open_tiers() as found:
            note("resume after a node is lost", seconds(lambda m=found: m.load(state)))
        note("resume from the durable tier, cached", seconds(lambda: plain.load(state)))
    if rank == 0:
        report(times, options)
    plain.close()
    shutil.rmtree(local, ignore_errors=True)
    dist.barrier()
    os._exit(0)


def report(times: dict[str, list[float]], options: argparse.Namespace) -> None:
    """One line per figure, and the ratios within the rounds: medians and quartiles."""
    print(f"{options.mb} MB a rank, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    figures = {f"s, {name}": Figure.of(values) for name, values in times.items()}
    for ours, base in (
        ("blocked by a local save", "plain copy"),
        ("resume from the own node", "resume from the durable tier, cached"),
        ("resume after a node is lost", "resume from the durable tier, cached"),
    ):
        figures[f"{ours} / {base}"] = Figure.of([a / b for a, b in zip(times[ours], times[base], strict=True)])
    for name, figure in figures.items():
        print(f"{figure}  {name}")
    if options.json:
        write_results(options.json, {"mb": options.mb, "rounds": options.rounds}, figures)


def main() -> None:
    """Start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="of state per rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--local", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--durable", type=Path, default=Path.cwd())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.durable, prefix="bench-tiers-") as folder:
        ranks = [
            mp.get_context("spawn").Process(target=measure, args=(rank, 2, options, folder, f"{folder}/meeting"))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        shutil.rmtree(options.local / Path(folder).name, ignore_errors=True)


if __name__ == "__main__":
    main()
