"""Layouts: Megatron-Core's positions to the number, what holds for every list of sizes and world, and who computes."""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise, product
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
    owner_load,
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


def longest_shard(layout: Layout) -> int:
    """Elements of the rank that stores most."""
    bounds = [bucket.shard_bounds(layout.num_shards) for bucket in layout.buckets]
    return max(sum(of[rank + 1] - of[rank] for of in bounds) for rank in range(layout.num_shards))


# --- Megatron-Core's numbers ------------------------------------------------------------------------------------------

MEASURED: dict[str, tuple[list[ParamShape], int, dict[str, Any], list[tuple[int, int]], list[int]]] = {
    "ten 95x95": (vectors(*[9025] * 10), 2, {"bucket_size": 9050}, [(18176 * i, 18176 * i + 18176) for i in range(5)],
                  [18113] * 5),
    "one bucket": (vectors(1000, 1000), 4, {}, [(0, 2048)], [2024]),
    "shared embedding": (vectors(1000, 1000, shared=[0]), 3, {}, [(0, 1152), (1152, 2304)], [1024, 1000]),
    "three 5000": (vectors(*[5000] * 3), 2, {"bucket_size": 8000}, [(0, 10112), (10112, 15232)], [10056, 5000]),
    "high busbw": (vectors(1000), 2, {"pad_for_high_busbw": True}, [(0, 65536)], [1000]),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_flat_buckets_are_megatron_cores(name: str) -> None:
    params, world, options, at, numels = MEASURED[name]
    layout = flat_layout(params, num_shards=world, shard_multiple=1, **options)
    assert (bounds(layout), unpadded(layout)) == (at, numels)
    if name == "ten 95x95":  # in the order of backward
        assert starts(layout, params)[::-1][:6] == [0, 9088, 18176, 27264, 36352, 45440]


def test_shard_ranges_equal_megatron_cores_across_parameters() -> None:
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
    assert (bounds(layout), starts(layout, params)) == ([(0, 66), (66, 73)], [66, 1, 0])
    assert layout.numel == layout.params_numel == 73


# --- what holds for every layout --------------------------------------------------------------------------------------

SIZES = st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 1000, 1025, 4096]) | st.integers(0, 5000), max_size=30)
WORLDS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 24, 64])
BUCKETS = st.none() | st.sampled_from([1, 100, 1000, 3000, 10**6])
MULTIPLES = st.sampled_from([1, 16, 64, 128, 192])
Case = tuple[list[ParamShape], Layout, int]


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    """Any planner, any sizes, any world."""
    params = vectors(*draw(SIZES), shared=draw(st.lists(st.integers(0, 30), max_size=2)))
    num_shards = draw(WORLDS)
    bucket_size = draw(BUCKETS)
    plan = draw(st.sampled_from([flat_layout, whole_layout, None]))
    if plan is None:
        return params, replicated_layout(params, bucket_size=bucket_size), 1
    multiple = draw(MULTIPLES)
    return params, plan(params, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=multiple), multiple


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_every_element_has_exactly_one_owner(case: Case) -> None:
    """A piece is the same elements in its parameter and in its shard. Cuts fall on multiples."""
    params, layout, multiple = case
    owners: dict[ParamId, list[int]] = {param.id: [0] * param.numel for param in params}
    slots = {slot.id: slot for slot in layout.slots()}
    for rank in range(layout.num_shards):
        for index, piece in layout.owned(rank):
            for element in range(piece.of_param.start, piece.of_param.stop):
                owners[piece.id][element] += 1
            shard = layout.buckets[index].shard(rank, layout.num_shards)
            start = slots[piece.id].start
            assert start + piece.of_param.start == shard.start + piece.of_shard.start
            assert start + piece.of_param.stop == shard.start + piece.of_shard.stop <= shard.stop
            assert piece.of_param.start % multiple == piece.of_shard.start % multiple == 0
    assert all(count == 1 for counts in owners.values() for count in counts)


@given(SIZES, WORLDS, BUCKETS, MULTIPLES)
@settings(max_examples=100, deadline=None)
def test_whole_layouts_cut_no_parameter_and_balance_ownership(
    sizes: list[int], world: int, bucket: int | None, multiple: int
) -> None:
    params = vectors(*sizes)
    layout = whole_layout(params, num_shards=world, bucket_size=bucket, shard_multiple=multiple)
    per_rank = [[piece for _, piece in layout.owned(rank)] for rank in range(world)]
    found = {piece.id: piece.numel for pieces in per_rank for piece in pieces}
    assert found == {param.id: param.numel for param in params if param.numel}
    spans = [round_up(size, start_multiple(multiple)) for size in sizes]
    tail = len(layout.buckets) * world * 128 * multiple  # padding of bucket ends, which shards may include
    assert layout.numel <= sum(spans) + tail
    largest = sum(spans) / world + max(spans, default=0)
    assert all(sum(piece.numel for piece in pieces) <= largest for pieces in per_rank)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_shards_receive_in_ascending_order_what_chunks_send(case: Case) -> None:
    """An exchange sends runs of elements from the ranks of chunks to the ranks of shards, or back: no run is lost,
    and each lands where it lies in the bucket."""
    _, layout, _ = case
    size = layout.num_shards
    for bucket in layout.buckets:
        sent = [bucket.of_chunk(rank, size) for rank in range(size)]
        assert [list(column) for column in zip(*sent, strict=True)] == [bucket.of_shard(r, size) for r in range(size)]
        assert all(min(row) >= 0 for row in sent)
        bounds = bucket.shard_bounds(size)
        assert [sum(bucket.of_shard(r, size)) for r in range(size)] == [b - a for a, b in pairwise(bounds)]
        ends = bucket.chunk_bounds(size)[1:]
        assert [sum(map(sum, sent[: r + 1])) for r in range(size)] == [min(e, bounds[-1]) - bucket.start for e in ends]


@given(SIZES, WORLDS, BUCKETS)
@settings(max_examples=60, deadline=None)
def test_a_shared_embedding_is_alone_in_its_bucket(sizes: list[int], world: int, bucket: int | None) -> None:
    params = vectors(*sizes, 100, shared=[len(sizes)])
    for plan in (flat_layout, whole_layout):
        layout = plan(params, num_shards=world, bucket_size=bucket)
        assert layout.buckets[0].slots == (Slot(params[-1].id, 0, 100),)
        layout = plan(vectors(100, 200, 300, shared=[1]), num_shards=2)
        assert [[slot.id.name for slot in bucket.slots] for bucket in layout.buckets] == [["p2"], ["p1"], ["p0"]]


# --- figures ----------------------------------------------------------------------------------------------------------


def test_whole_parameters_go_to_the_cheapest_rank_with_room() -> None:
    layout = whole_layout(matrices((32, 32), *[(2, 1024)] * 3), num_shards=2)
    owned = [[piece.id.name for _, piece in layout.owned(rank)] for rank in range(2)]
    assert owned == [["w0", "w1"], ["w3", "w2"]]


LLAMA_405B_TP8_PP16 = matrices(*[(2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656)] * 8)
DEEPSEEK_V3_DENSE = matrices(
    *[(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432)] * 3
)
LLAMA_405B_TP1 = matrices(*[(18432, 16384), (16384, 16384), (106496, 16384), (16384, 53248)] * 126)


@pytest.mark.parametrize(
    ("params", "world"),
    [
        (LLAMA_405B_TP8_PP16, 8),
        (LLAMA_405B_TP8_PP16, 128),
        (DEEPSEEK_V3_DENSE, 8),
        (DEEPSEEK_V3_DENSE, 128),
        (LLAMA_405B_TP1, 4096),
    ],
    ids=["405B tp8 pp16, 8", "128", "V3, 8", "128", "405B, 4096"],
)
def test_whole_layouts_of_large_models_have_the_models_size(params: list[ParamShape], world: int) -> None:
    """Padded to the longest shard, these took 1.1 to 16 times the model from 32 ranks on, in one bucket."""
    layout = whole_layout(params, num_shards=world, bucket_size=default_bucket_size(world))
    numel = sum(param.numel for param in params)
    largest = max(param.numel for param in params)
    assert layout.params_numel == numel
    assert layout.numel <= 1.01 * numel
    assert longest_shard(layout) <= 1.01 * numel / world + largest
    assert len(layout.buckets) >= 4
    assert max(bucket.numel for bucket in layout.buckets) <= max(default_bucket_size(world) + largest, 3.01 * largest)
    # An exchange ends with its busiest rank, which moves the largest shard of a bucket.
    busiest = [max(b - a for a, b in pairwise(bucket.shard_bounds(world))) for bucket in layout.buckets]
    assert sum(busiest) <= 0.6 * numel


# --- refusals and fingerprints ----------------------------------------------------------------------------------------


def layout_of(num_shards: int, *slots: tuple[int, int], start: int = 0, stop: int = 4, **fields: Any) -> Layout:
    at = tuple(Slot(ParamId(0, "p"), *slot) for slot in slots)
    bucket = Bucket(slots=at, start=start, stop=stop, numel_unpadded=stop - start, **fields)
    return Layout(buckets=(bucket,), num_shards=num_shards)


REFUSALS: dict[str, Callable[[], object]] = {
    "num_shards is 0; pass the size": lambda: flat_layout(vectors(1), num_shards=0),
    "bucket_size is 0; pass": lambda: whole_layout(vectors(1), num_shards=1, bucket_size=0),
    "shard_multiple is 0": lambda: flat_layout(vectors(1), num_shards=1, shard_multiple=0),
    "one parameter was passed twice": lambda: replicated_layout(vectors(1) * 2),
    r"shape of .*p0.* is \(-1,\)": lambda: vectors(-1),
    "does not divide into 2 equal shards": lambda: layout_of(2, (0, 5), stop=5),
    "must start at 0": lambda: layout_of(1, (2, 4), start=2),
    r"cuts \(0, 2\) for 2 shards": lambda: layout_of(2, (0, 4), cuts=(0, 2)),
    r"cuts \(1, 2, 4\) for 2 shards": lambda: layout_of(2, (0, 4), cuts=(1, 2, 4)),
    r"cuts \(0, 3, 2\) for 2 shards": lambda: layout_of(2, (0, 4), cuts=(0, 3, 2)),
    r"cuts \(0, 1, 3\) .*after the last slot": lambda: layout_of(2, (0, 4), cuts=(0, 1, 3)),
    "holds no parameter": lambda: layout_of(1),
    "outside the bucket or overlaps": lambda: layout_of(1, (0, 3), (2, 4)),
    "more than one slot: p; each has one": lambda: layout_of(1, (0, 2), (2, 4)),
    "split along dim 2": lambda: split((4, 4), dims=(2,)),
    r"w0.* is cut along dims \(0,\) by 2 axes": lambda: compute_layout(
        split((4, 4)), sizes=(2, 2), computes=Computes.OWNER
    ),
    r"w0.* of shape \(5, 4\) does not divide into \(2,\) equal parts .*; pad it": lambda: compute_layout(
        split((5, 4)), sizes=(2,), computes=Computes.JOINT
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_laid_out_is_refused(message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        REFUSALS[message]()


def test_fingerprints_are_equal_for_equal_layouts_only() -> None:
    def digest(names: str, numels: Sequence[int] = (1000, 1000), num_shards: int = 2, **options: int) -> str:
        params = [ParamShape(id=ParamId(0, name), shape=(n,)) for name, n in zip(names, numels, strict=True)]
        return flat_layout(params, num_shards=num_shards, **options).fingerprint()

    assert digest("ab") == digest("ab")
    others = [digest("ab", (1000, 1001)), digest("ab", num_shards=4), digest("ab", bucket_size=500), digest("ba")]
    assert len({digest("ab"), *others, digest("cb")}) == 6


# --- who computes -----------------------------------------------------------------------------------------------------


def test_a_matrix_costs_long_side_times_short_side_squared() -> None:
    costs: dict[tuple[int, ...], int] = {(): 1, (7,): 7, (0, 5): 0, (3, 5): 45, (5, 3): 45, (2, 5, 3): 90}
    assert {shape: update_cost(shape) for shape in costs} == costs


def split(*shapes: tuple[int, ...], dims: tuple[int, ...] = (0,)) -> list[SplitMatrix]:
    return [SplitMatrix(id=ParamId(0, f"w{index}"), shape=shape, dims=dims) for index, shape in enumerate(shapes)]


def owners(layout: ComputeLayout) -> dict[str, tuple[int, ...]]:
    return {matrix.id.name: matrix.owner for matrix in layout.matrices}


def test_the_costliest_matrix_goes_first_to_the_emptiest_rank() -> None:
    for computes in (Computes.PART, Computes.JOINT):
        layout = compute_layout(split((8, 4), (4, 4)), sizes=(2,), computes=computes)
        assert owners(layout) == {"w0": (), "w1": ()}
    layout = compute_layout(split((4, 4), (16, 8), (8, 8), (8, 4), (5, 4)), sizes=(2,), computes=Computes.OWNER)
    assert owners(layout) == {"w0": (1,), "w1": (0,), "w2": (1,), "w3": (1,), "w4": (1,)}


def test_a_block_of_a_kept_axis_is_owned_by_a_sharing_rank() -> None:
    layout = compute_layout(split((8, 8), (8, 8), dims=(1, 0)), sizes=(2, 2), computes=Computes.OWNER, kept=1)
    assert (owners(layout), layout.num_ranks) == ({"w0": (0,), "w1": (1,)}, 2)
    assert layout.whole(layout.matrices[0], (1, 0)) == ((0, 4), (8, 4))


def names(runs: list[list[ParamId]]) -> list[str]:
    return [" ".join(id.name for id in run) for run in runs]


def test_a_run_is_bounded_by_the_elements_that_a_rank_computes() -> None:
    """At least one matrix for each rank, in descending cost."""
    matrices = split((4, 4), (6, 4), (8, 4), (4, 4), (2, 4))
    ids = [matrix.id for matrix in matrices]
    owners = compute_layout(matrices, sizes=(2,), computes=Computes.OWNER)
    assert names(owners.runs(ids, run_numel=56)) == ["w2 w1 w0 w3 w4"]
    assert names(owners.runs(ids[:4], run_numel=0)) == ["w2 w1 w0 w3"]
    assert names(owners.runs(ids[:4], run_numel=0)) == names(owners.runs(ids[3::-1], run_numel=0))
    assert owners.runs([]) == []


def dense(layers: int, hidden: int, kv: int, ffn: int) -> list[tuple[int, ...]]:
    """The matrices of a Llama: q, k, v, o, gate, up, down."""
    block = [
        (hidden, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, hidden),
        (ffn, hidden),
        (ffn, hidden),
        (hidden, ffn),
    ]
    return block * layers


MODELS = {
    "8B": dense(32, 4096, 1024, 14336),
    "32B": dense(64, 5120, 1024, 27648),
    "70B": dense(80, 8192, 1024, 28672),
    "405B": dense(126, 16384, 1024, 53248),
    "stacks of 32 experts": [(32, 2048, 7168)] * 174,
}


@pytest.mark.parametrize(
    ("model", "ranks", "most"),
    [
        ("8B", 8, 1.02),
        ("32B", 8, 1.02),
        ("70B", 8, 1.02),
        ("stacks of 32 experts", 16, 1.02),
        ("70B", 64, 1.15),
        ("405B", 64, 1.15),
        ("405B", 512, 1.15),
    ],
)
def test_owners_are_busy_in_every_run_of_published_shapes(model: str, ranks: int, most: float) -> None:
    """The work of the slowest owner of each run, over the mean. Bounds from the shapes alone: one run gives 1.12."""
    matrices = split(*MODELS[model])
    layout = compute_layout(matrices, sizes=(ranks,), computes=Computes.OWNER)
    owner_of = {matrix.id: matrix.owner for matrix in layout.matrices}
    cost_of = {matrix.id: update_cost(matrix.shape) for matrix in matrices}
    slowest = 0
    for run in layout.runs(cost_of):
        work = dict.fromkeys(owner_of.values(), 0)
        for id in run:
            work[owner_of[id]] += cost_of[id]
        slowest += max(work.values())
    assert slowest * ranks / sum(cost_of.values()) <= most
    assert owner_load(layout).slowest == slowest * ranks / sum(cost_of.values())


def test_the_load_of_empty_matrices_is_zero() -> None:
    layout = compute_layout(split((0, 4)), sizes=(2,), computes=Computes.OWNER)
    assert owner_load(layout)[:3] == (1, 0, 0)


@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.data())
def test_parts_equal_torch_chunks_and_cover_the_matrix_once(
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
        (top, left), shape = layout.matrices[0].block(layout.sizes, at)
        assert torch.equal(whole[top : top + shape[0], left : left + shape[1]], part)
        seen += part.flatten().tolist()
    assert sorted(seen) == list(range(rows * cols))
