"""Planning for thousands of ranks, simulated in one process: time, size of the plans, balance; and how they grow.

    python packages/opt-checkpoint/benchmarks/bench_planning.py [--params 20000] [--ranks 512 1024 2048 4096] [--json
    FILE]

Every rank holds a flat shard of one large bucket of matrices and vectors (ZeRO-1), with one moment each.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import time
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import torch
from measure import resident_bytes
from torch.distributed.checkpoint.planner import SavePlan

from opt_checkpoint.boxes.box import cut_flat_range
from opt_checkpoint.dcp.balance import assign_parts
from opt_checkpoint.dcp.local_contents import LocalContents, LocalTensor
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.dcp.validation import validate_sharding_integrity


def shapes(count: int) -> list[tuple[int, ...]]:
    """Matrices and vectors in turn, as a transformer has them."""
    sizes = [(4096, 1024), (1024,), (1024, 4096), (4096,), (1000, 1000)]
    return [sizes[i % len(sizes)] for i in range(count)]


def contents_of_ranks(params: list[tuple[int, ...]], ranks: int) -> list[LocalContents]:
    """What each rank holds, made from integers: no memory for the values is needed."""
    numels = [torch.Size(shape).numel() for shape in params]
    ends = list(accumulate(numels))
    per_rank = []
    for rank in range(ranks):
        low, high = (ends[-1] * (rank + k) // ranks for k in (0, 1))
        own = []
        number = bisect_right(ends, low)
        while number < len(params) and ends[number] - numels[number] < high:
            start = ends[number] - numels[number]
            boxes = tuple(cut_flat_range(params[number], max(low, start) - start, min(high, ends[number]) - start))
            own.append(LocalTensor(f"optimizer.state.exp_avg.p{number}", "float32", params[number], boxes, True))
            number += 1
        per_rank.append(LocalContents(tensors=tuple(own), objects=()))
    return per_rank


def plan(params: int, ranks: int) -> dict[str, float]:
    """Plan one save; seconds, items, bytes of the plans, megabytes of memory, and balance."""
    gc.collect()
    before = resident_bytes()
    per_rank = contents_of_ranks(shapes(params), ranks)
    items = sum(len(o.boxes) for own in per_rank for o in own.tensors)
    sent = sum(len(pickle.dumps(SavePlan([], planner_data=own))) for own in per_rank)
    started = time.perf_counter()
    validate_sharding_integrity(per_rank)
    validated = time.perf_counter()
    parts = assign_parts(per_rank)
    assigned = time.perf_counter()
    planner = ShardedSavePlanner({})
    planner.set_up_planner({}, None, True)
    plans, _ = planner.create_global_plan([SavePlan([], planner_data=own) for own in per_rank])
    planned = time.perf_counter()
    load = [sum(part.box.numel for part in own) for own in parts]
    return {
        "ranks": ranks,
        "items": items,
        "items / parameter": items / params,
        "validate s": validated - started,
        "assign s": assigned - validated,
        "whole global plan s": planned - assigned,
        "microseconds / item": (planned - assigned) / items * 1e6,
        "bytes sent to the coordinator / item": sent / items,
        "bytes sent back / item": sum(len(pickle.dumps(p)) for p in plans) / items,
        "memory MB": (resident_bytes() - before) / (1 << 20),
        "max / mean elements per rank": max(load) / (sum(load) / ranks),
    }


def main() -> None:
    """Print a table, one column per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [plan(options.params, ranks) for ranks in options.ranks]
    for name in rows[0]:
        print(f"{name:40}" + "".join(f"{row[name]:14,.2f}" for row in rows))
    if options.json:
        options.json.write_text(json.dumps({"params": options.params, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
