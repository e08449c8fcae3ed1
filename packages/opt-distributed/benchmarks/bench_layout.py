"""Cost of planning: seconds and peak memory of layouts up to 405 B parameters over 4,096 ranks, and how they grow.

python benchmarks/bench_layout.py [--json results.json]
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from opt_distributed.layout import Layout, ParamShape, flat_layout, whole_layout
from opt_paramgroups import ParamId


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The cost of one plan."""

    planner: str
    num_params: int
    params_numel: int
    num_shards: int
    num_buckets: int
    num_pieces: int  # over all ranks
    plan_s: float
    owned_s: float  # to list the pieces of every rank
    peak_mib: float  # of Python objects, while planning and listing
    padding: float  # of the buffer, as a part of the parameters


def decoder(
    *, layers: int, width: int = 16384, ffn: int = 53248, kv: int = 1024, vocab: int = 128256
) -> list[ParamShape]:
    """Weights of a decoder of the Llama 3.1 405B kind, in registration order; 126 layers are the 405 B model."""
    block = [(width,), (width + 2 * kv, width), (width, width), (width,), (2 * ffn, width), (width, ffn)]
    shapes = [(vocab, width), *(shape for _ in range(layers) for shape in block), (width,), (vocab, width)]
    return [ParamShape(id=ParamId(0, f"p{index}"), shape=shape) for index, shape in enumerate(shapes)]


def measure(name: str, plan: Callable[[], Layout], *, num_params: int) -> Figure:
    """Plan twice: once for the time, once with memory traced, which is several times slower."""
    began = time.perf_counter()
    layout = plan()
    planned = time.perf_counter()
    num_pieces = sum(1 for rank in range(layout.num_shards) for _ in layout.owned(rank))
    listed = time.perf_counter()
    tracemalloc.start()
    again = plan()
    kept = [list(again.owned(rank)) for rank in range(again.num_shards)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(map(len, kept)) == num_pieces
    return Figure(
        planner=name,
        num_params=num_params,
        params_numel=layout.params_numel,
        num_shards=layout.num_shards,
        num_buckets=len(layout.buckets),
        num_pieces=num_pieces,
        plan_s=planned - began,
        owned_s=listed - planned,
        peak_mib=peak / 2**20,
        padding=layout.numel / layout.params_numel - 1,
    )


def figures() -> Iterator[Figure]:
    """The 405 B model over growing worlds, then a many-expert model's parameter count over growing depth."""
    model = decoder(layers=126)
    for num_shards in (64, 512, 4096):
        size = max(40_000_000, 1_000_000 * num_shards)
        plan = partial(flat_layout, model, num_shards=num_shards, bucket_size=size)
        yield measure("flat", plan, num_params=len(model))
    for layers in (1250, 2500, 5000, 10000):
        deep = decoder(layers=layers, width=512, ffn=2048, kv=128, vocab=8192)
        for name, planner in (("flat", flat_layout), ("whole", whole_layout)):
            plan = partial(planner, deep, num_shards=256, bucket_size=256_000_000)
            yield measure(name, plan, num_params=len(deep))


def main() -> None:
    """Print a table, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    target = parser.parse_args().json
    found = []
    columns = ("planner", "params", "numel", "ranks", "pieces", "plan s", "owned s", "MiB", "padding")
    print("".join(f"{column:>9}" for column in columns))
    for f in figures():
        found.append(f)
        print(
            f"{f.planner:>9}{f.num_params:9}{f.params_numel:9.1e}{f.num_shards:9}{f.num_pieces:9}"
            f"{f.plan_s:9.3f}{f.owned_s:9.3f}{f.peak_mib:9.1f}{f.padding:9.2%}",
            flush=True,
        )
    if target is not None:
        target.write_text(json.dumps([asdict(f) for f in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
