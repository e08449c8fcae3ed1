"""Speed and memory of saving and loading, as ratios to raw writes, plain copies and stock DCP in the same run.

    python packages/opt-checkpoint/benchmarks/bench_io.py [--only save load ...] [--chunk-mb 64] [--chunks 8]
    [--rounds 5] [--folder DIR] [--json FILE]

Runs in one process. A second core is needed, because another thread computes checksums. The folder should be on the
disk that checkpoints are written to.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from measure import PeakMemory, drop_cache, interleaved, timed, write_results
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from opt_checkpoint import (
    AsyncSaver,
    ShardedTensor,
    load,
    load_optimizer,
    save,
    sharded_like,
    sharded_optimizer,
    verify_checkpoint,
)
from opt_checkpoint.disk.files import LocalFiles

MB = 1 << 20


def tensors(count: int, nbytes: int) -> dict[str, Tensor]:
    """Random float32 matrices."""
    return {f"w{i}": torch.randn(nbytes // 4 // 1024, 1024) for i in range(count)}


def fresh_paths(folder: Path) -> Iterator[Path]:
    """Yield new paths. Each call first deletes the previous path, so that the disk does not fill up."""
    number = 0
    while True:
        path = folder / str(number)
        yield path
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        number += 1


def write_raw(values: dict[str, Tensor], path: Path, *, early: bool = False) -> None:
    """Lower bound of a save: write the bytes to one file, then fsync. `early`: start writeback as early as a save
    does."""
    files = LocalFiles()
    with path.open("wb", buffering=0) as file:
        for tensor in values.values():
            view = memoryview(tensor.view(-1).numpy()).cast("B")
            for start in range(0, len(view), 16 * MB):
                file.write(view[start : start + 16 * MB])
                if early:
                    files.start_writeback(file.fileno(), file.tell() - 16 * MB, 16 * MB)
        os.fsync(file.fileno())


def read_raw(file: Path) -> None:
    """Read a file and discard the bytes."""
    buffer = bytearray(16 * MB)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def sharded(values: dict[str, Tensor]) -> dict[str, ShardedTensor]:
    return {key: sharded_like(key, tensor) for key, tensor in values.items()}


def bench_save(values: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, float]:
    """Compare saving with a raw write and with stock DCP, which also syncs its files."""
    paths = fresh_paths(folder)

    def on_next(write: Callable[[Path], object]) -> Callable[[], float]:
        return lambda: (lambda path: timed(lambda: write(path)))(next(paths))

    times = interleaved(
        {
            "raw": on_next(lambda path: write_raw(values, path)),
            "early": on_next(lambda path: write_raw(values, path, early=True)),
            "ours": on_next(lambda path: save(sharded(values), path)),
            "stock": on_next(lambda path: dcp_save(dict(values), storage_writer=FileSystemWriter(path))),
        },
        rounds,
    )
    total = sum(t.nbytes for t in values.values())
    return {
        "save GB/s": total / times["ours"] / 1e9,
        "save / raw write+fsync (no gate)": times["raw"] / times["ours"],
        "save / raw write+fsync where the disk begins as early (>= 0.95)": times["early"] / times["ours"],
        "save / stock DCP (>= 1.15)": times["stock"] / times["ours"],
    }


def bench_load(values: dict[str, Tensor], folder: Path, rounds: int, *, cold: bool) -> dict[str, float]:
    """Compare loading in place with stock DCP, for the same tensors, each from its own checkpoint."""
    ours, stock = folder / "ours", folder / "stock"
    save(sharded(values), ours)
    dcp_save(dict(values), checkpoint_id=stock)
    target = {key: torch.empty_like(tensor) for key, tensor in values.items()}

    def prepared(path: Path, work: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            if cold:
                drop_cache(path)
            return timed(work)

        return run

    times = interleaved(
        {
            "ours": prepared(ours, lambda: load(sharded(target), ours)),
            "stock": prepared(stock, lambda: dcp_load(target, checkpoint_id=stock)),
            "stock by us": prepared(stock, lambda: load(sharded(target), stock)),
            "verify": prepared(ours, lambda: verify_checkpoint(ours)),
            "read": prepared(ours, lambda: [read_raw(file) for file in ours.iterdir()]),
            "hash": lambda: timed(lambda: [zlib.crc32(t.view(-1).numpy()) for t in values.values()]),
        },
        rounds,
    )
    assert all(torch.equal(target[k], values[k]) for k in values)
    total, how = sum(t.nbytes for t in values.values()), "cold" if cold else "cached"
    return {
        f"load GB/s, {how}": total / times["ours"] / 1e9,
        f"load / stock DCP, {how} ({'>= 1.0' if cold else '>= 6'})": times["stock"] / times["ours"],
        f"load of a stock checkpoint / stock DCP, {how}": times["stock"] / times["stock by us"],
        f"verify GB/s, {how}": total / times["verify"] / 1e9,
        f"verify / slower of raw read and hash, {how} (>= 0.9)": max(times["read"], times["hash"]) / times["verify"],
    }


def bench_load_optimizer(values: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, float]:
    """Compare loading AdamW's state into a new optimizer, as after a restart, with `torch.distributed.checkpoint`."""
    model = torch.nn.ParameterDict({key: torch.nn.Parameter(tensor) for key, tensor in list(values.items())[:4]})
    trained = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    trained.step()
    trained.zero_grad()
    save({"optimizer": sharded_optimizer(model, trained)}, folder / "ours")
    dcp_save({"optimizer": get_optimizer_state_dict(model, trained)}, checkpoint_id=folder / "stock")

    def ours() -> float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return timed(lambda: load_optimizer(model, optimizer, folder / "ours"))

    def load_stock(optimizer: torch.optim.Optimizer) -> None:
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp_load(state, checkpoint_id=folder / "stock")
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])

    def stock() -> float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return timed(lambda: load_stock(optimizer))

    times = interleaved({"ours": ours, "stock": stock}, rounds)
    return {"load_optimizer / stock DCP, cached (>= 6)": times["stock"] / times["ours"]}


def bench_reshard(values: dict[str, Tensor], folder: Path) -> dict[str, float]:
    """Bytes read when loading flat thirteenths of every tensor that was saved in sevenths, and when loading columns."""
    path = folder / "flat"
    save({f"{k}-{i}": s for k, t in values.items() for i, s in enumerate(flat_parts(k, t, 7))}, path)
    read = wanted = 0
    for part in range(13):
        state = {k: flat_parts(k, torch.empty_like(t), 13)[part] for k, t in values.items()}
        report = load(state, path)
        read, wanted = read + report.bytes_read, wanted + report.bytes_wanted
    columns = {
        k: ShardedTensor(k, torch.empty(t.shape[0], 256), t.dtype, (t.shape[0], 256), tuple(t.shape), (0, 256), None)
        for k, t in values.items()
    }
    report = load(columns, path)
    unchecked = [
        load({k: flat_parts(k, torch.empty_like(t), 13)[part] for k, t in values.items()}, path, verify="none")
        for part in range(13)
    ]
    return {
        "bytes read / needed, flat reshard (no gate)": read / wanted,
        "... with verify='none' (<= 1.05)": sum(r.bytes_read for r in unchecked)
        / sum(r.bytes_wanted for r in unchecked),
        "bytes read / needed, a quarter of the columns (no gate)": report.bytes_read / report.bytes_wanted,
    }


def flat_parts(key: str, tensor: Tensor, count: int) -> list[ShardedTensor]:
    numel = tensor.numel()
    cuts = [numel * i // count for i in range(count + 1)]
    whole = sharded_like(key, tensor)
    return [whole.flat(tensor.view(-1)[a:b], a, b) for a, b in pairwise(cuts)]


def bench_background(values: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, float]:
    """Compare the time that a background save blocks with a plain copy of the bytes into allocated memory.

    Nothing is deleted in between, because the system frees a checkpoint's blocks asynchronously, on a core that copies
    need.
    """
    saver, paths = AsyncSaver(), (folder / f"background-{number}" for number in itertools.count())
    copy = {key: torch.zeros_like(tensor) for key, tensor in values.items()}

    def plain_copy() -> float:
        return timed(lambda: [copy[key].copy_(tensor) for key, tensor in values.items()])

    def in_background() -> float:
        path = next(paths)
        blocked = timed(lambda: saver.save(sharded(values), path))
        saver.wait()
        return blocked

    times = interleaved({"copy": plain_copy, "save": in_background}, rounds)
    saver.close()
    for path in folder.glob("background-*"):
        shutil.rmtree(path)
    return {"background save blocks / plain copy (<= 1.05)": times["save"] / times["copy"]}


def bench_memory(values: dict[str, Tensor], folder: Path) -> dict[str, float]:
    """Memory in addition to the tensors: in place, and with a transposed tensor, which is copied piece by piece."""
    turned = {key: tensor.t() for key, tensor in values.items()}
    target = {key: torch.zeros_like(tensor) for key, tensor in values.items()}
    found = {}
    with PeakMemory() as peak:
        save(sharded(values), folder / "plain")
    found["extra MB, save"] = peak.extra / MB
    with PeakMemory() as peak:
        save(sharded(turned), folder / "turned")
    found["extra MB, save of transposed tensors (<= 256)"] = peak.extra / MB
    with PeakMemory() as peak:
        load(sharded(target), folder / "plain")
    found["extra MB, load"] = peak.extra / MB
    with PeakMemory() as peak:
        load(sharded({key: t.t() for key, t in target.items()}), folder / "turned")
    found["extra MB, load of transposed tensors (<= 256)"] = peak.extra / MB
    return found


def bench_small_items(folder: Path, rounds: int, count: int = 20_000) -> dict[str, float]:
    """Time per item for many states of 64 bytes, as in a mixture of experts."""
    values = {f"s{i}": torch.full((16,), float(i)) for i in range(count)}
    target = {key: torch.empty_like(tensor) for key, tensor in values.items()}
    paths = fresh_paths(folder)
    held: list[Path] = []

    def save_ours() -> float:
        held[:] = [next(paths)]
        return timed(lambda: save(sharded(values), held[0]))

    stock_paths = fresh_paths(folder / "stock")
    times = interleaved(
        {
            "save": save_ours,
            "load": lambda: timed(lambda: load(sharded(target), held[0])),
            "stock": lambda: (lambda path: timed(lambda: dcp_save(dict(values), checkpoint_id=path)))(
                next(stock_paths)
            ),
        },
        rounds,
    )
    return {
        "microseconds per small item, save (<= 40)": times["save"] / count * 1e6,
        "microseconds per small item, load": times["load"] / count * 1e6,
        "microseconds per small item, stock save": times["stock"] / count * 1e6,
    }


def main() -> None:
    """Run everything and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-mb", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    values, rounds = tensors(options.chunks, options.chunk_mb * MB), options.rounds
    benches: dict[str, Callable[[Path], dict[str, float]]] = {
        "save": lambda folder: bench_save(values, folder, rounds),
        "load": lambda folder: bench_load(values, folder, rounds, cold=False),
        "cold": lambda folder: bench_load(values, folder, rounds, cold=True),
        "load_optimizer": lambda folder: bench_load_optimizer(values, folder, rounds),
        "reshard": lambda folder: bench_reshard(values, folder),
        "background": lambda folder: bench_background(values, folder, rounds),
        "memory": lambda folder: bench_memory(values, folder),
        "small": lambda folder: bench_small_items(folder, rounds),
    }
    figures: dict[str, float] = {}
    for name in options.only or benches:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-") as folder:
            found = benches[name](Path(folder))
        for figure, value in found.items():
            print(f"{value:10.3f}  {figure}", flush=True)
        figures.update(found)
    if options.json:
        setup = {"chunk_mb": options.chunk_mb, "chunks": options.chunks, "rounds": rounds}
        write_results(options.json, setup, figures)


if __name__ == "__main__":
    main()
