"""Speed and memory of saving and loading, as ratios to raw writes, plain copies and stock DCP in adjacent pairs.

    python packages/opt-checkpoint/benchmarks/bench_io.py [--only save load ...] [--chunk-mb 64] [--chunks 8]
    [--rounds 9] [--folder DIR] [--json FILE]

Runs in one process. A second core is needed, because another thread computes checksums. The folder should be on the
disk that checkpoints are written to; it must hold two checkpoints a round, because files are kept until the end.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from measure import Figure, PeakMemory, Took, drop_cache, in_pairs, speed, timed, write_results
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

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
from opt_checkpoint.disk.data_file import bytes_view

MB = 1 << 20


def tensors(count: int, nbytes: int) -> dict[str, Tensor]:
    """Random float32 matrices."""
    return {f"w{i}": torch.randn(nbytes // 4 // 1024, 1024) for i in range(count)}


def write_raw(values: dict[str, Tensor], path: Path) -> None:
    """Lower bound of a save: write the bytes to one file, then fsync, with writeback as early as in a save."""
    with path.open("wb", buffering=0) as file:
        for tensor in values.values():
            view = bytes_view(tensor)
            for start in range(0, len(view), 16 * MB):
                file.write(view[start : start + 16 * MB])
                os.posix_fadvise(file.fileno(), file.tell() - 16 * MB, 16 * MB, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())


def read_raw(file: Path) -> None:
    """Read a file and discard the bytes."""
    buffer = bytearray(16 * MB)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def sharded(values: dict[str, Tensor]) -> dict[str, ShardedTensor]:
    return {key: sharded_like(key, tensor) for key, tensor in values.items()}


def bench_save(values: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, Figure]:
    """Compare saving with a raw write and with stock DCP, which also syncs its files."""
    paths = (folder / str(number) for number in itertools.count())

    def on_next(write: Callable[[Path], object]) -> Callable[[], Took]:
        return lambda: (lambda path: timed(lambda: write(path)))(next(paths))

    ours = on_next(lambda path: save(sharded(values), path))
    raw = in_pairs(ours, on_next(lambda path: write_raw(values, path)), rounds)
    stock = on_next(lambda path: dcp_save(dict(values), storage_writer=FileSystemWriter(path)))
    return {
        "save / raw write, CPU time (>= 0.85)": speed(raw, "cpu"),
        "save / raw write (stated)": speed(raw),
        "save / stock DCP (>= 1.15)": speed(in_pairs(ours, stock, rounds)),
    }


def bench_load(values: dict[str, Tensor], folder: Path, rounds: int, *, cold: bool) -> dict[str, Figure]:
    """Compare loading in place with stock DCP, for the same tensors, each from its own checkpoint."""
    ours = folder / "ours"
    stock = folder / "stock"
    save(sharded(values), ours)
    dcp_save(dict(values), checkpoint_id=stock)
    target = {key: torch.empty_like(tensor) for key, tensor in values.items()}

    def prepared(path: Path, work: Callable[[], object]) -> Callable[[], Took]:
        def run() -> Took:
            if cold:
                drop_cache(path)
            return timed(work)

        return run

    loaded = prepared(ours, lambda: load(sharded(target), ours))
    by_stock = prepared(stock, lambda: dcp_load(target, checkpoint_id=stock))
    foreign = prepared(stock, lambda: load(sharded(target), stock))
    verified = prepared(ours, lambda: verify_checkpoint(ours))
    read = prepared(ours, lambda: list(map(read_raw, ours.iterdir())))
    hashed = lambda: timed(lambda: [zlib.crc32(bytes_view(t)) for t in values.values()])
    how = "cold" if cold else "cached"
    figures = {
        f"load / stock DCP, {how} ({'>= 1.0' if cold else '>= 6'})": speed(in_pairs(loaded, by_stock, rounds)),
        f"load of a stock checkpoint / stock DCP, {how}": speed(in_pairs(foreign, by_stock, rounds)),
        f"verify / raw read, {how}": speed(in_pairs(verified, read, rounds)),
        f"verify / zlib's hash, {how}": speed(in_pairs(verified, hashed, rounds)),
    }
    assert all(torch.equal(target[k], values[k]) for k in values)
    return figures


def bench_load_optimizer(values: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, Figure]:
    """Compare loading AdamW's state into a new optimizer, as after a restart, with `torch.distributed.checkpoint`."""
    model = torch.nn.ParameterDict({key: torch.nn.Parameter(tensor) for key, tensor in list(values.items())[:4]})
    trained = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    trained.step()
    trained.zero_grad()
    save({"optimizer": sharded_optimizer(model, trained)}, folder / "ours")
    dcp_save({"optimizer": get_optimizer_state_dict(model, trained)}, checkpoint_id=folder / "stock")

    def ours() -> Took:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return timed(lambda: load_optimizer(model, optimizer, folder / "ours"))

    def load_stock(optimizer: torch.optim.Optimizer) -> None:
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp_load(state, checkpoint_id=folder / "stock")
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])

    def stock() -> Took:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return timed(lambda: load_stock(optimizer))

    return {"load_optimizer / stock DCP, cached (>= 6)": speed(in_pairs(ours, stock, rounds))}


def bench_reshard(values: dict[str, Tensor], folder: Path) -> dict[str, Figure]:
    """Bytes read when loading flat thirteenths of every tensor that was saved in sevenths, and when loading columns."""
    path = folder / "flat"
    save({f"{k}-{i}": s for k, t in values.items() for i, s in enumerate(flat_parts(k, t, 7))}, path)
    read = wanted = 0
    for part in range(13):
        state = {k: flat_parts(k, torch.empty_like(t), 13)[part] for k, t in values.items()}
        report = load(state, path)
        read = read + report.bytes_read
        wanted = wanted + report.bytes_wanted
    columns = {
        k: ShardedTensor(k, torch.empty(t.shape[0], 256), t.dtype, (t.shape[0], 256), tuple(t.shape), (0, 256), None)
        for k, t in values.items()
    }
    report = load(columns, path)
    unchecked = [
        load({k: flat_parts(k, torch.empty_like(t), 13)[part] for k, t in values.items()}, path, verify="none")
        for part in range(13)
    ]
    ratios = {
        "bytes read / needed, flat reshard (no gate)": read / wanted,
        "... with verify='none' (<= 1.05)": sum(r.bytes_read for r in unchecked)
        / sum(r.bytes_wanted for r in unchecked),
        "bytes read / needed, a quarter of the columns (no gate)": report.bytes_read / report.bytes_wanted,
    }
    return {name: Figure.of([ratio]) for name, ratio in ratios.items()}


def flat_parts(key: str, tensor: Tensor, count: int) -> list[ShardedTensor]:
    numel = tensor.numel()
    cuts = [numel * i // count for i in range(count + 1)]
    whole = sharded_like(key, tensor)
    return [whole.flat(tensor.view(-1)[a:b], a, b) for a, b in pairwise(cuts)]


def bench_background(values: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, Figure]:
    """Compare the time that a background save blocks with a plain copy of the bytes into allocated memory."""
    saver = AsyncSaver()
    paths = (folder / str(number) for number in itertools.count())
    copy = {key: torch.zeros_like(tensor) for key, tensor in values.items()}

    def in_background() -> Took:
        path = next(paths)
        blocked = timed(lambda: saver.save(sharded(values), path))
        saver.wait()
        return blocked

    pairs = in_pairs(
        in_background, lambda: timed(lambda: [copy[key].copy_(tensor) for key, tensor in values.items()]), rounds
    )
    saver.close()
    blocks = Figure.of([ours.wall / base.wall for ours, base in pairs])
    return {"background save blocks / plain copy (stated; aim 1.05)": blocks}


def bench_memory(values: dict[str, Tensor], folder: Path) -> dict[str, Figure]:
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
    return {name: Figure.of([value]) for name, value in found.items()}


def bench_small_items(folder: Path, rounds: int, count: int) -> dict[str, Figure]:
    """Time per item for many states of 64 bytes, as in a mixture of experts."""
    values = {f"s{i}": torch.full((16,), float(i)) for i in range(count)}
    target = {key: torch.empty_like(tensor) for key, tensor in values.items()}
    paths = [folder / f"{number}" for number in range(2 * (rounds + 1))]
    mine = iter(paths[::2])
    theirs = iter(paths[1::2])
    save_ours = lambda: (lambda path: timed(lambda: save(sharded(values), path)))(next(mine))
    save_stock = lambda: (lambda path: timed(lambda: dcp_save(dict(values), checkpoint_id=path)))(next(theirs))
    saves = in_pairs(save_ours, save_stock, rounds)
    loads = [timed(lambda: load(sharded(target), paths[0])) for _ in range(rounds)]
    return {
        "microseconds per small item, save (<= 50)": Figure.of([ours.wall / count * 1e6 for ours, _ in saves]),
        "microseconds per small item, load": Figure.of([took.wall / count * 1e6 for took in loads]),
        "microseconds per small item, stock save": Figure.of([stock.wall / count * 1e6 for _, stock in saves]),
    }


def main() -> None:
    """Run everything and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-mb", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--items", type=int, default=20_000, help="of the part `small`")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    values = tensors(options.chunks, options.chunk_mb * MB)
    rounds = options.rounds
    benches: dict[str, Callable[[Path], dict[str, Figure]]] = {
        "save": lambda folder: bench_save(values, folder, rounds),
        "load": lambda folder: bench_load(values, folder, rounds, cold=False),
        "cold": lambda folder: bench_load(values, folder, rounds, cold=True),
        "load_optimizer": lambda folder: bench_load_optimizer(values, folder, rounds),
        "reshard": lambda folder: bench_reshard(values, folder),
        "background": lambda folder: bench_background(values, folder, rounds),
        "memory": lambda folder: bench_memory(values, folder),
        "small": lambda folder: bench_small_items(folder, rounds, options.items),
    }
    figures: dict[str, Figure] = {}
    for name in options.only or benches:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-") as folder:
            found = benches[name](Path(folder))
        for figure, value in found.items():
            print(f"{value}  {figure}", flush=True)
        figures.update(found)
    if options.json:
        setup = {"chunk_mb": options.chunk_mb, "chunks": options.chunks, "rounds": rounds}
        write_results(options.json, setup, figures)


if __name__ == "__main__":
    main()
