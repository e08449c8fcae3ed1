"""Planning for thousands of ranks, simulated in one process: the work of rank 0 in a save, and of one rank in a load.

    python packages/opt-checkpoint/benchmarks/bench_planning.py [--params 20000] [--states 3] [--ranks 512 4096]
    [--tensor-parallel 8] [--folder DIR] [--json FILE]

For each state, every rank holds a flat shard (ZeRO-1) of its tensor-parallel part of a bucket of matrices and vectors.
The time of a save includes unpickling the messages of all ranks, agreeing on the plan, making and checking it, pickling
the replies, and writing and syncing the index, `.metadata` and the manifest. It does not include the network. A load
runs in a separate process, which reads data files of zeros.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import highest_resident_bytes, write_results

from opt_checkpoint import ShardedTensor, load, read_index
from opt_checkpoint.boxes import boxes_of
from opt_checkpoint.dcp.layout import MAIN, LocalContents, LocalLayout
from opt_checkpoint.dcp.plan import AssignedParts, Offer, PlanCache
from opt_checkpoint.dcp.saving import agree, assign, describe, take, to_cache
from opt_checkpoint.dcp.writing import CheckpointWriter, WrittenFile
from opt_checkpoint.disk.archives import dump_object
from opt_checkpoint.disk.data_file import crc32, file_header
from opt_checkpoint.disk.index import COMMON_KEY, PIECE_BYTES, ByteRange, StoredFile, StoredTensors
from opt_checkpoint.store import target_at

_SHAPES = [(512, 128), (128,), (128, 512), (512,), (120, 125)]
_FRAME_BYTES = (448, 256)  # before and after the values of a chunk


def shards_of_rank(params: int, states: int, tensor_parallel: int, ranks: int, rank: int) -> Iterator[ShardedTensor]:
    """The shards of one rank, described without memory for their values."""
    copies = ranks // tensor_parallel
    part = rank % tensor_parallel
    place = rank // tensor_parallel
    blocks = [(s[0] // tensor_parallel, *s[1:]) for s in _SHAPES]
    numels = [torch.Size(blocks[i % len(blocks)]).numel() for i in range(params)]
    ends = list(accumulate(numels))
    low, high = (ends[-1] * (place + k) // copies for k in (0, 1))
    for number in range(bisect_right(ends, low), params):
        start = ends[number] - numels[number]
        if start >= high:
            return
        block = blocks[number % len(blocks)]
        whole = _SHAPES[number % len(blocks)]
        offset = (part * block[0], *(0 for _ in block[1:]))
        flat = slice(max(low, start) - start, min(high, ends[number]) - start)
        for state in range(states):
            key = f"optimizer.state.{('exp_avg', 'exp_avg_sq', 'param')[state % 3]}.decoder.layers.p{number}.weight"
            yield ShardedTensor(key, None, torch.float32, block, whole, offset, None, flattened_range=flat)


def contents_of(shards: Sequence[ShardedTensor]) -> LocalContents:
    """The message of one rank to rank 0."""
    held = [(shard, tuple(boxes_of(shard))) for shard in shards]
    layout = LocalLayout.of(held, [MAIN] * len(held))
    return LocalContents(layout=layout, digests=np.zeros(0, np.int64))


@lru_cache(maxsize=1 << 16)
def crc_of_zeros(nbytes: int) -> int:
    return crc32(bytes(nbytes))


def written_by(rank: int, assigned: AssignedParts, objects: dict[str, ByteRange]) -> WrittenFile:
    """The report of a rank as if it had written zeros."""
    nbytes = np.prod(assigned.sizes, axis=1) * 4
    lengths = nbytes + sum(_FRAME_BYTES)
    start = 4096 + np.cumsum(lengths) - lengths
    sums = [crc_of_zeros(min(PIECE_BYTES, n - at)) for n in nbytes.tolist() for at in range(0, n, PIECE_BYTES)]
    whole = StoredFile(size=4096 + int(lengths.sum()), crc=0)
    places = np.stack([start + _FRAME_BYTES[0], start, lengths], axis=1)
    return WrittenFile(f"__{rank}_0.distcp", whole, assigned.crc, places, np.array(sums, np.uint32), objects)


class Clock:
    """Seconds of each step, and the processor time of all steps. `lap` ends a step."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}
        self.cpu = 0.0
        self._last = time.perf_counter(), time.process_time()

    def lap(self, step: str | None = None) -> None:
        if step is not None:
            self.steps[step] = time.perf_counter() - self._last[0]
            self.cpu += time.process_time() - self._last[1]
        self._last = time.perf_counter(), time.process_time()


def save(path: Path, contents: list[LocalContents], cache: PlanCache, ranks_remember: list[Any]) -> dict[str, float]:
    """Run rank 0's part of one save. Writes the plan that each rank caches to `ranks_remember`."""
    remembered = cache.plan.name
    layouts = [own.layout for own in contents if own.layout is not None]
    offers = [pickle.dumps(Offer({}, layout.fingerprint, b"", remembered)) for layout in layouts]
    save_id = uuid.uuid4().hex
    (store, name) = target_at(path)
    temporary = path.parent / store.folder(name, save_id)
    writer = CheckpointWriter(path, store, name, save_id, {})
    held = describe({}, 0, policy="equal", cached=cache.plan, lists_values=True)
    clock = Clock()
    agreed = agree("equal", [pickle.loads(offer) for offer in offers])
    clock.lap("agree")
    sent = [LocalContents(layout=None if agreed.is_cached else o.layout, digests=o.digests) for o in contents]
    messages = [pickle.dumps(own) for own in sent]
    clock.lap()
    received = [pickle.loads(message) for message in messages]
    clock.lap("unpickle plans")
    assigned = assign(held, agreed, received, lists_values=True)
    clock.lap("global plan")
    messages_back = writer.begin(assigned)
    clock.lap("prepare")
    answers = [pickle.dumps(answer) for answer in zip(assigned.to_ranks, messages_back, strict=True)]
    clock.lap("pickle plans")
    results = []
    common = dump_object({}, "common")
    for rank, answer in enumerate(answers):
        parts = pickle.loads(answer)[0] or ranks_remember[rank]
        ranks_remember[rank] = parts
        place = ByteRange(file="__0_0.distcp", start=64, nbytes=len(common), sums=(crc32(common),), archive=True)
        own = written_by(rank, parts, {COMMON_KEY: place} if rank == 0 else {})
        with (temporary / own.name).open("wb") as file:
            file.write(file_header(messages_back[0]) + (common if rank == 0 else b""))
            file.truncate(own.stored.size)
        results.append(pickle.dumps(own))
    cache.plan = to_cache(agreed, take(held, ranks_remember[0], assigned), assigned)
    clock.lap()
    unpickled = [pickle.loads(result) for result in results]
    clock.lap("unpickle results")
    writer.finish(assigned, unpickled)
    clock.lap("index, .metadata, manifest")
    clock.steps |= {"rank 0, all": sum(clock.steps.values()), "rank 0, all, of the processor": clock.cpu}
    tensors = read_index(path).tensors
    assert isinstance(tensors, StoredTensors)
    return clock.steps | {
        "bytes sent to rank 0 MB": sum(map(len, messages)) / 1e6,
        "chunks": len(tensors.columns["start"]),
    }


def load_of_a_rank(path: Path, options: argparse.Namespace, ranks: int) -> dict[str, float]:
    """Load in a separate process the shards of one rank, with 3/4 as many ranks as in the save."""
    here = [
        sys.executable,
        __file__,
        "--load",
        str(path),
        "--params",
        str(options.params),
        "--states",
        str(options.states),
    ]
    done = subprocess.run(
        [*here, "--ranks", str(ranks), "--tensor-parallel", str(options.tensor_parallel)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, megabytes, wanted = map(float, done.stdout.split())
    return {"load of a rank s": seconds, "load of a rank, peak MB": megabytes, "load of a rank, MB of tensors": wanted}


def load_here(options: argparse.Namespace) -> None:
    """Load one rank's shards for another number of ranks. Print seconds, extra megabytes, and those of the tensors."""
    ranks = max(1, options.ranks[0] * 3 // 4 // options.tensor_parallel) * options.tensor_parallel
    shards = list(shards_of_rank(options.params, options.states, options.tensor_parallel, ranks, ranks // 2))
    for shard in shards:
        shard.init_data("cpu", torch.ones)
    state = {str(number): shard for number, shard in enumerate(shards)}
    before = highest_resident_bytes()
    started = time.perf_counter()
    load(state, options.load)
    seconds = time.perf_counter() - started
    loaded = [shard.data for shard in shards if shard.data is not None]
    assert not any(bool(values.any()) for values in loaded)
    extra = (highest_resident_bytes() - before) / 1e6
    print(seconds, extra, sum(values.nbytes for values in loaded) / 1e6)


def measure(options: argparse.Namespace, ranks: int) -> dict[str, float]:
    """A first and a later save, and a load."""
    contents = [
        contents_of(list(shards_of_rank(options.params, options.states, options.tensor_parallel, ranks, rank)))
        for rank in range(ranks)
    ]
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="bench-"))
    try:
        cache = PlanCache()
        remembered = [None] * ranks
        gc.collect()
        first = save(folder / "1", contents, cache, remembered)
        later = save(folder / "2", contents, cache, remembered)
        row = {"ranks": ranks, "chunks": first.pop("chunks")}
        row |= {
            f"first save: {name} {'' if name.endswith('MB') else 's'}".strip(): value for name, value in first.items()
        }
        later.pop("chunks")
        row |= {
            f"later save: {name} {'' if name.endswith('MB') else 's'}".strip(): value for name, value in later.items()
        }
        del contents, cache, remembered
        gc.collect()
        for name in (".metadata", "manifest.bin"):
            row[f"{name} MB"] = (folder / "2" / name).stat().st_size / 1e6
        return row | load_of_a_rank(folder / "2", options, ranks)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Print a table, one column per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=20_000)
    parser.add_argument("--states", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--tensor-parallel", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.load:
        load_here(options)
        return
    rows = [measure(options, ranks) for ranks in options.ranks]
    for name in rows[0]:
        print(f"{name:44}" + "".join(f"{row[name]:14,.2f}" for row in rows))
    if options.json:
        setup = {"params": options.params, "states": options.states, "tensor_parallel": options.tensor_parallel}
        write_results(options.json, setup, rows)


if __name__ == "__main__":
    main()
