"""Layouts: Megatron-Core's positions to the number, what holds for every list of sizes and world, and who computes."""

import random
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_distributed.buffers import default_bucket_size
from opt_distributed.layout import (
    Bucket,
    ComputeLayout,
    Computes,
    Layout,
    LayoutError,
    ParamShape,
    Slot,
    SplitMatrix,
    compute_layout,
    flat_layout,
    replicated_layout,
    update_cost,
    whole_layout,
)
from opt_distributed.layout.layout import round_up, start_multiple
from opt_paramgroups import ParamId


def vectors(*numels: int, shared: Collection[int] = ()) -> list[ParamShape]:
    """Parameters p0, p1, ... in registration order; those at `shared` are shared embeddings."""
    return [
        ParamShape(id=ParamId(0, f"p{index}"), shape=(numel,), shared_embedding=index in shared)
        for index, numel in enumerate(numels)
    ]


def matrices(*shapes: tuple[int, ...]) -> list[ParamShape]:
    return [ParamShape(id=ParamId(0, f"w{index}"), shape=shape) for index, shape in enumerate(shapes)]


def bounds(layout: Layout) -> list[tuple[int, int]]:
    return [(bucket.start, bucket.stop) for bucket in layout.buckets]


def unpadded(layout: Layout) -> list[int]:
    return [bucket.numel_unpadded for bucket in layout.buckets]


def starts(layout: Layout, params: Sequence[ParamShape]) -> list[int]:
    """Starts in registration order."""
    found = {slot.id: slot.start for slot in layout.slots()}
    return [found[param.id] for param in params]


# --- Megatron-Core's numbers -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Oracle:
    """One measured layout of Megatron-Core's flat planner."""

    params: list[ParamShape]
    dp: int
    bounds: list[tuple[int, int]]
    unpadded: list[int]
    bucket_size: int | None = None
    pad_for_high_busbw: bool = False


FLAT_ORACLES = {
    "ten-95x95-bucket-9050-dp2": Oracle(
        vectors(*[9025] * 10),
        2,
        [(18176 * i, 18176 * (i + 1)) for i in range(5)],
        [18113] * 5,
        bucket_size=9050,
    ),
    "two-1000-one-bucket-dp4": Oracle(vectors(1000, 1000), 4, [(0, 2048)], [2024]),
    "shared-embedding-first-dp3": Oracle(vectors(1000, 1000, shared=[0]), 3, [(0, 1152), (1152, 2304)], [1024, 1000]),
    "three-5000-bucket-8000-dp2": Oracle(
        vectors(*[5000] * 3), 2, [(0, 10112), (10112, 15232)], [10056, 5000], bucket_size=8000
    ),
    "high-busbw-dp2": Oracle(vectors(1000), 2, [(0, 65536)], [1000], pad_for_high_busbw=True),
}


@pytest.mark.parametrize("oracle", FLAT_ORACLES.values(), ids=FLAT_ORACLES.keys())
def test_flat_buckets_are_megatron_cores(oracle: Oracle) -> None:
    layout = flat_layout(
        oracle.params,
        num_shards=oracle.dp,
        bucket_size=oracle.bucket_size,
        shard_multiple=1,
        pad_for_high_busbw=oracle.pad_for_high_busbw,
    )
    assert bounds(layout) == oracle.bounds
    assert unpadded(layout) == oracle.unpadded


def test_flat_starts_are_megatron_cores_in_backward_order() -> None:
    params = vectors(*[9025] * 10)
    layout = flat_layout(params, num_shards=2, bucket_size=9050, shard_multiple=1)
    assert starts(layout, params)[::-1][:6] == [0, 9088, 18176, 27264, 36352, 45440]


def test_whole_parameters_follow_each_other_where_megatron_core_pads_every_shard_to_the_longest() -> None:
    """Megatron-Core's bounds are (0, 2048), and (0, 1024), (1024, 1408): 1.33 and 1.29 times the parameters."""
    equal = whole_layout(vectors(*[256] * 6), num_shards=4, bucket_size=1280)
    assert [(*pair, bucket.cuts) for pair, bucket in zip(bounds(equal), equal.buckets, strict=True)] == [
        (0, 1280, (0, 512, 768, 1024, 1280)),
        (1280, 1536, (1280, 1280, 1536, 1536, 1536)),
    ]
    params = vectors(192, 128, 128, 256, 192, 192)
    layout = whole_layout(params, num_shards=2, bucket_size=448)
    assert bounds(layout) == [(0, 640), (640, 1152)]
    assert unpadded(layout) == [640, 448]
    assert [bucket.cuts for bucket in layout.buckets] == [(0, 256, 640), (640, 960, 1088)]
    assert starts(layout, params) == [640, 832, 960, 0, 448, 256]


def test_shard_ranges_are_megatron_cores_and_ignore_parameter_boundaries() -> None:
    layout = flat_layout(vectors(1000, 1000), num_shards=4, shard_multiple=1)
    pieces = [piece for rank in range(4) for _, piece in layout.owned(rank)]
    assert [(p.id.name, p.of_param.start, p.of_param.stop, p.of_shard.start) for p in pieces] == [
        ("p1", 0, 512, 0),
        ("p1", 512, 1000, 0),
        ("p0", 0, 512, 0),
        ("p0", 512, 1000, 0),
    ]


def test_replicated_layout_is_reversed_and_has_no_padding() -> None:
    params = vectors(7, 65, 1, shared=[1])
    layout = replicated_layout(params, bucket_size=66)
    assert bounds(layout) == [(0, 66), (66, 73)]
    assert starts(layout, params) == [66, 1, 0]
    assert layout.numel == layout.params_numel == 73


def test_the_meanings_of_padded_have_one_name_each() -> None:
    bucket = flat_layout(vectors(1000, 1000), num_shards=3).buckets[0]
    assert (bucket.params_numel, bucket.extent_numel, bucket.numel) == (2000, 2024, 2304)


def longest_shard(layout: Layout) -> int:
    """Elements of the rank that stores most."""
    bounds = [bucket.shard_bounds(layout.num_shards) for bucket in layout.buckets]
    return max(sum(of[rank + 1] - of[rank] for of in bounds) for rank in range(layout.num_shards))


# --- what holds for every layout --------------------------------------------------------------

SIZES = st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 1000, 1025, 4096]) | st.integers(0, 5000), max_size=30)
WORLDS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 24, 64])
BUCKETS = st.none() | st.sampled_from([1, 100, 1000, 3000, 10**6])
MULTIPLES = st.sampled_from([1, 16, 64, 128, 192])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[ParamShape], Layout]:
    """Any planner, any sizes, any world."""
    numels = draw(SIZES)
    params = vectors(*numels, shared=draw(st.lists(st.integers(0, 30), max_size=2)))
    num_shards, bucket_size, multiple = draw(WORLDS), draw(BUCKETS), draw(MULTIPLES)
    plan = draw(st.sampled_from([flat_layout, whole_layout, None]))
    if plan is None:
        return params, replicated_layout(params, bucket_size=bucket_size)
    return params, plan(params, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=multiple)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_every_element_has_exactly_one_owner(case: tuple[list[ParamShape], Layout]) -> None:
    params, layout = case
    owners: dict[ParamId, list[int]] = {param.id: [0] * param.numel for param in params}
    for rank in range(layout.num_shards):
        for _, piece in layout.owned(rank):
            counts = owners[piece.id]
            for element in range(piece.of_param.start, piece.of_param.stop):
                counts[element] += 1
    assert all(count == 1 for counts in owners.values() for count in counts)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_a_piece_is_the_same_elements_in_its_parameter_and_in_its_shard(
    case: tuple[list[ParamShape], Layout],
) -> None:
    _, layout = case
    slots = {slot.id: slot for slot in layout.slots()}
    for rank in range(layout.num_shards):
        for index, piece in layout.owned(rank):
            shard = layout.buckets[index].shard(rank, layout.num_shards)
            assert slots[piece.id].start + piece.of_param.start == shard.start + piece.of_shard.start
            assert slots[piece.id].start + piece.of_param.stop == shard.start + piece.of_shard.stop
            assert shard.start + piece.of_shard.stop <= shard.stop


@given(SIZES, WORLDS, BUCKETS, MULTIPLES)
@settings(max_examples=100, deadline=None)
def test_whole_layouts_cut_no_parameter(sizes: list[int], world: int, bucket: int | None, multiple: int) -> None:
    params = vectors(*sizes)
    layout = whole_layout(params, num_shards=world, bucket_size=bucket, shard_multiple=multiple)
    pieces = [piece for rank in range(world) for _, piece in layout.owned(rank)]
    assert {piece.id: piece.numel for piece in pieces} == {param.id: param.numel for param in params if param.numel}


@given(SIZES, WORLDS, BUCKETS, MULTIPLES)
@settings(max_examples=100, deadline=None)
def test_no_rank_owns_more_than_its_share_and_one_whole_parameter(
    sizes: list[int], world: int, bucket: int | None, multiple: int
) -> None:
    layout = whole_layout(vectors(*sizes), num_shards=world, bucket_size=bucket, shard_multiple=multiple)
    spans = [round_up(size, start_multiple(multiple)) for size in sizes]
    tail = len(layout.buckets) * world * 128 * multiple  # padding of bucket ends, which shards may include
    assert layout.numel <= sum(spans) + tail
    for rank in range(world):
        assert sum(piece.numel for _, piece in layout.owned(rank)) <= sum(spans) / world + max(spans, default=0)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_what_leaves_the_chunks_is_what_shards_receive_in_ascending_order(
    case: tuple[list[ParamShape], Layout],
) -> None:
    """An exchange sends runs of elements from the ranks of chunks to the ranks of shards, or back: no run is lost,
    and each lands where it lies in the bucket."""
    _, layout = case
    size = layout.num_shards
    for bucket in layout.buckets:
        sent = [bucket.of_chunk(rank, size) for rank in range(size)]
        assert [list(column) for column in zip(*sent, strict=True)] == [bucket.of_shard(r, size) for r in range(size)]
        assert all(min(row) >= 0 for row in sent)
        bounds = bucket.shard_bounds(size)
        assert [sum(bucket.of_shard(r, size)) for r in range(size)] == [b - a for a, b in pairwise(bounds)]
        ends = bucket.chunk_bounds(size)[1:]
        assert [sum(map(sum, sent[: r + 1])) for r in range(size)] == [min(e, bounds[-1]) - bucket.start for e in ends]


@given(SIZES, WORLDS, BUCKETS, MULTIPLES)
@settings(max_examples=100, deadline=None)
def test_flat_cuts_fall_on_shard_multiples(sizes: list[int], world: int, bucket: int | None, multiple: int) -> None:
    params = vectors(*sizes)
    layout = flat_layout(params, num_shards=world, bucket_size=bucket, shard_multiple=multiple)
    for rank in range(world):
        for _, piece in layout.owned(rank):
            assert piece.of_param.start % multiple == 0
            assert piece.of_shard.start % multiple == 0


@given(SIZES, WORLDS, BUCKETS)
@settings(max_examples=60, deadline=None)
def test_a_shared_embedding_is_alone_in_its_bucket(sizes: list[int], world: int, bucket: int | None) -> None:
    params = vectors(*sizes, 100, shared=[len(sizes)])
    for plan in (flat_layout, whole_layout):
        layout = plan(params, num_shards=world, bucket_size=bucket)
        assert layout.buckets[0].slots == (Slot(params[-1].id, 0, 100),)


@pytest.mark.parametrize("plan", [flat_layout, whole_layout], ids=["flat", "whole"])
def test_a_shared_embedding_closes_the_bucket_before_it(plan: Callable[..., Layout]) -> None:
    layout = plan(vectors(100, 200, 300, shared=[1]), num_shards=2)
    assert [[slot.id.name for slot in bucket.slots] for bucket in layout.buckets] == [["p2"], ["p1"], ["p0"]]


def test_no_parameters_make_no_buckets() -> None:
    for layout in (flat_layout([], num_shards=3), whole_layout([], num_shards=3), replicated_layout([])):
        assert layout.buckets == ()
        assert layout.numel == longest_shard(layout) == 0
        assert not list(layout.owned(0))


# --- figures ----------------------------------------------------------------------------------


def transformer(*, layers: int, width: int, ffn: int, kv: int, vocab: int) -> list[ParamShape]:
    """Weights of a decoder with grouped-query attention and a gated feed-forward, in registration order."""
    block = [(width,), (width + 2 * kv, width), (width, width), (width,), (2 * ffn, width), (width, ffn)]
    shapes = [(vocab, width), *(shape for _ in range(layers) for shape in block), (width,), (vocab, width)]
    return matrices(*shapes)


LLAMA_405B = transformer(layers=126, width=16384, ffn=53248, kv=1024, vocab=128256)
SMALL = transformer(layers=12, width=512, ffn=1536, kv=128, vocab=8192)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 24, 64])
def test_a_rank_stores_its_share_within_one_percent(world: int) -> None:
    layout = flat_layout(SMALL, num_shards=world, bucket_size=10**7)
    assert layout.params_numel > 10_000_000
    assert longest_shard(layout) * world <= 1.01 * layout.params_numel


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_whole_layouts_balance_cost_within_thirty_percent(world: int) -> None:
    costs = {param.id: update_cost(param.shape) for param in SMALL if param.shape[0] != 8192 and len(param.shape) == 2}
    layout = whole_layout([param for param in SMALL if param.id in costs], num_shards=world)
    loads = [sum(costs[piece.id] for _, piece in layout.owned(rank)) for rank in range(world)]
    assert max(loads) * world <= 1.3 * sum(costs.values())


def test_a_plan_of_405_billion_parameters_over_4096_ranks_covers_them_once() -> None:
    layout = flat_layout(LLAMA_405B, num_shards=4096, bucket_size=4_096_000_000)
    assert layout.params_numel == sum(param.numel for param in LLAMA_405B) > 405 * 10**9
    owned = sum(piece.numel for rank in range(4096) for _, piece in layout.owned(rank))
    assert owned == layout.params_numel
    assert layout.numel < 1.001 * layout.params_numel


def gpt(layers: int, *shapes: tuple[int, int]) -> list[ParamShape]:
    return matrices(*shapes * layers)


LLAMA_405B_TP8_PP16 = gpt(8, (2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656))
DEEPSEEK_V3_DENSE = gpt(
    3, (1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432)
)
LLAMA_405B_TP1 = gpt(126, (18432, 16384), (16384, 16384), (106496, 16384), (16384, 53248))


@pytest.mark.parametrize(
    ("params", "world"),
    [
        *((LLAMA_405B_TP8_PP16, world) for world in (8, 32, 64, 128)),
        *((DEEPSEEK_V3_DENSE, world) for world in (8, 128)),
        (LLAMA_405B_TP1, 4096),
    ],
    ids=["405B tp8 pp16, 8", "32", "64", "128", "V3, 8", "128", "405B, 4096"],
)
def test_whole_layouts_of_large_models_take_no_more_than_the_model(params: list[ParamShape], world: int) -> None:
    """Padded to the longest shard, these took 1.1 to 16 times the model from 32 ranks on, in one bucket."""
    layout = whole_layout(params, num_shards=world, bucket_size=default_bucket_size(world))
    numel, largest = sum(param.numel for param in params), max(param.numel for param in params)
    assert layout.params_numel == numel
    assert layout.numel <= 1.01 * numel
    assert longest_shard(layout) <= 1.01 * numel / world + largest
    assert len(layout.buckets) >= 4
    assert max(bucket.numel for bucket in layout.buckets) <= max(default_bucket_size(world) + largest, 3.01 * largest)
    # An exchange ends with its busiest rank, which moves the largest shard of a bucket.
    busiest = [max(b - a for a, b in pairwise(bucket.shard_bounds(world))) for bucket in layout.buckets]
    assert sum(busiest) <= 0.6 * numel


def lines_run(work: Callable[[], object]) -> int:
    """Python lines executed by `work`: a cost that does not depend on the machine."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("plan", [flat_layout, whole_layout], ids=["flat", "whole"])
@pytest.mark.parametrize("grows", ["parameters", "both"])
def test_cost_grows_linearly(plan: Callable[..., Layout], grows: str) -> None:
    numbers = random.Random(0)
    shapes = [(64,), (20000,), (50, 20), (10, 500), (100, 200), (2, 10000)]
    params = matrices(*(numbers.choice(shapes) for _ in range(1600)))

    def cost(part: int) -> int:
        world = 64 // part if grows == "both" else 16

        def work() -> None:
            layout = plan(params[: 1600 // part], num_shards=world, bucket_size=10_000 * world)
            for rank in range(world):
                list(layout.owned(rank))

        return lines_run(work)

    small, medium, large = cost(4), cost(2), cost(1)
    # Twice the input costs twice the lines, and a quadratic planner four times; the rest is for rounding of buckets.
    assert medium < 2.5 * small
    assert large < 2.5 * medium


# --- refusals ---------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "no ranks": (lambda: flat_layout(vectors(1), num_shards=0), "num_shards is 0; pass the size"),
    "bucket of nothing": (lambda: whole_layout(vectors(1), num_shards=1, bucket_size=0), "bucket_size is 0; pass"),
    "multiple of nothing": (lambda: flat_layout(vectors(1), num_shards=1, shard_multiple=0), "shard_multiple is 0"),
    "twice": (lambda: replicated_layout(vectors(1) * 2), "one parameter was passed twice"),
    "negative shape": (lambda: vectors(-1), r"shape of .*p0.* is \(-1,\)"),
    "bucket indivisible": (
        lambda: Layout(buckets=(Bucket(slots=(slot(0, 5),), start=0, stop=5, numel_unpadded=5),), num_shards=2),
        "does not divide into 2 equal shards",
    ),
    "bucket apart": (
        lambda: Layout(buckets=(Bucket(slots=(slot(2, 4),), start=2, stop=4, numel_unpadded=2),), num_shards=1),
        "must start at 0",
    ),
    "bucket cut twice for two ranks": (
        lambda: Layout(buckets=(cut(0, 2),), num_shards=2),
        r"cuts \(0, 2\) for 2 shards",
    ),
    "cuts go back": (lambda: Layout(buckets=(cut(0, 3, 2),), num_shards=2), r"cuts \(0, 3, 2\) for 2 shards"),
    "cuts lose an element": (lambda: Layout(buckets=(cut(0, 1, 3),), num_shards=2), "after the last slot"),
    "slots overlap": (
        lambda: Layout(
            buckets=(Bucket(slots=(slot(0, 3), slot(2, 4)), start=0, stop=4, numel_unpadded=4),), num_shards=1
        ),
        "outside the bucket or overlaps",
    ),
    "two slots": (
        lambda: Layout(
            buckets=(Bucket(slots=(slot(0, 2), slot(2, 4)), start=0, stop=4, numel_unpadded=4),), num_shards=1
        ),
        "more than one slot: p; each has one",
    ),
}


def cut(*cuts: int) -> Bucket:
    return Bucket(slots=(slot(0, 4),), start=0, stop=4, numel_unpadded=4, cuts=cuts)


def slot(start: int, stop: int) -> Slot:
    return Slot(ParamId(0, "p"), start, stop)


@pytest.mark.parametrize(("build", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_laid_out_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build()


def test_fingerprints_are_equal_for_equal_layouts_only() -> None:
    one = flat_layout(vectors(1000, 1000), num_shards=2)
    assert one.fingerprint() == flat_layout(vectors(1000, 1000), num_shards=2).fingerprint()
    others = [
        flat_layout(vectors(1000, 1001), num_shards=2),
        flat_layout(vectors(1000, 1000), num_shards=4),
        flat_layout(vectors(1000, 1000), num_shards=2, bucket_size=500),
    ]
    exchanged = [ParamShape(id=ParamId(0, name), shape=(1000,)) for name in ("p1", "p0")]
    renamed = [ParamShape(id=ParamId(0, name), shape=(1000,)) for name in ("p9", "p1")]
    others += [flat_layout(params, num_shards=2) for params in (exchanged, renamed)]
    assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 6


@pytest.mark.parametrize(
    ("shape", "cost"),
    [((), 1), ((7,), 7), ((0, 5), 0), ((3, 5), 45), ((5, 3), 45), ((2, 5, 3), 90)],
    ids=str,
)
def test_the_cost_of_a_matrix_is_long_side_times_short_side_squared(shape: tuple[int, ...], cost: int) -> None:
    assert update_cost(shape) == cost


def split(*shapes: tuple[int, ...], dims: tuple[int, ...] = (0,)) -> list[SplitMatrix]:
    return [SplitMatrix(id=ParamId(0, f"w{index}"), shape=shape, dims=dims) for index, shape in enumerate(shapes)]


def computed(layout: ComputeLayout) -> list[list[str]]:
    ranks = product(*map(range, layout.sizes))
    return [[slot.matrix.id.name for slot in layout.slots if slot.owner in (None, at[layout.kept :])] for at in ranks]


@pytest.mark.parametrize("computes", [Computes.PART, Computes.EVERY, Computes.JOINT])
def test_every_rank_takes_part_in_every_matrix_unless_owners_compute(computes: Computes) -> None:
    layout = compute_layout(split((8, 4), (4, 4)), sizes=(2,), computes=computes)
    assert computed(layout) == [["w0", "w1"], ["w0", "w1"]]


def test_owned_matrices_are_assigned_costliest_first_to_the_least_loaded_rank() -> None:
    layout = compute_layout(split((4, 4), (16, 8), (8, 8), (8, 4)), sizes=(2,), computes=Computes.OWNER)
    assert computed(layout) == [["w1"], ["w0", "w2", "w3"]]


sizes_ = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=20), sizes_)
def test_every_owned_matrix_has_exactly_one_owner(shapes: list[tuple[int, int]], sizes: tuple[int, ...]) -> None:
    layout = compute_layout(split(*shapes, dims=(0,) * len(sizes)), sizes=sizes, computes=Computes.OWNER)
    names = [name for of_rank in computed(layout) for name in of_rank]
    assert sorted(names) == sorted(f"w{index}" for index in range(len(shapes)))


def test_a_block_of_a_kept_axis_has_an_owner_among_the_ranks_that_share_it() -> None:
    layout = compute_layout(split((8, 8), (8, 8), dims=(1, 0)), sizes=(2, 2), computes=Computes.OWNER, kept=1)
    assert computed(layout) == [["w0"], ["w1"], ["w0"], ["w1"]]
    assert layout.num_ranks == 2
    assert layout.whole(layout.slots[0], (1, 0)) == ((0, 4), (8, 4))


@given(st.integers(0, 9), st.integers(0, 9), sizes_, st.data())
def test_parts_are_what_torch_chunk_makes_and_cover_the_matrix_once(
    rows: int, cols: int, sizes: tuple[int, ...], data: st.DataObject
) -> None:
    dims = tuple(data.draw(st.integers(0, 1)) for _ in sizes)
    layout = compute_layout(split((rows, cols), dims=dims), sizes=sizes, computes=Computes.OWNER)
    whole = torch.arange(rows * cols).view(rows, cols)
    seen = []
    for at in product(*map(range, sizes)):
        part = whole
        for dim, ranks, index in zip(dims, sizes, at, strict=True):
            chunks = part.chunk(ranks, dim)
            part = chunks[index] if index < len(chunks) else part.narrow(dim, part.shape[dim], 0)
        (top, left), shape = layout.block(layout.slots[0], at)
        assert torch.equal(whole[top : top + shape[0], left : left + shape[1]], part)
        seen += part.flatten().tolist()
    assert sorted(seen) == list(range(rows * cols))


def test_parts_of_a_joint_update_must_be_equal() -> None:
    assert compute_layout(split((5, 4)), sizes=(2,), computes=Computes.OWNER).slots
    with pytest.raises(LayoutError, match=r"w0.* of shape \(5, 4\) does not divide into \(2,\) equal parts .*; pad it"):
        compute_layout(split((5, 4)), sizes=(2,), computes=Computes.JOINT)


def test_a_split_along_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayoutError, match="split along dim 2"):
        split((4, 4), dims=(2,))


def test_a_matrix_cut_by_another_number_of_axes_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"w0.* is cut along dims \(0,\) by 2 axes"):
        compute_layout(split((4, 4)), sizes=(2, 2), computes=Computes.OWNER)
