"""Nested states and factories: paths, prefixes, building and merging; lists never meet by position."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import load_as_ranks, save_as_ranks

from opt_checkpoint import (
    CheckpointingException,
    LocalNonpersistentObject,
    PerParam,
    ScopedState,
    Segment,
    ShardedTensor,
    ShardedTensorFactory,
    add_prefix_for_sharding,
    apply_factories,
    apply_factory_merges,
    apply_prefix_mapping,
    load,
    make_sharded_optimizer_tensor,
    make_sharded_state,
    read_index,
    replace_prefix_for_sharding,
    save,
    sharded_like,
)
from opt_checkpoint.state import flatten_state
from opt_checkpoint.state.tree import leaves


def tensor(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(2))


def swiglu(rank: int, size: int, data: torch.Tensor) -> ShardedTensorFactory:
    """Megatron-Core's way: two halves of one key, by functions."""

    def build(key: str, t: torch.Tensor, replica: Any, flat: slice | None) -> list[ShardedTensor]:
        offsets = ((0, rank + half * size, 2 * size) for half in (0, 1))
        return [
            ShardedTensor.from_rank_offsets(key, part, offset, replica_id=replica)
            for part, offset in zip(t.chunk(2), offsets)
        ]

    return ShardedTensorFactory("up", data, build, torch.cat)


def segments(rank: int, size: int, rows: int, columns: int) -> tuple[Segment, ...]:
    """The same, declared: works for flat ranges too."""
    whole = (rows * size, columns)
    half = rows // 2
    gate = Segment(row_start=0, row_stop=half, global_shape=whole, global_offset=(rank * half, 0))
    value = Segment(row_start=half, row_stop=rows, global_shape=whole, global_offset=((rank + size) * half, 0))
    return gate, value


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_flat_shards_of_a_fused_weight_are_stored_as_its_parts(tmp_path: Path, shards: int) -> None:
    """Tensor parallel 2, and each rank's fused block cut into flat ranges; loaded whole, unfused, in one process."""
    blocks = [torch.randn(6, 5) for _ in range(2)]
    states = []
    for rank, block in enumerate(blocks):
        for shard in range(shards):
            a, b = (30 * (shard + k) // shards for k in (0, 1))
            factory = ShardedTensorFactory(
                "up", None, segments=segments(rank, 2, 6, 5), local_shape=(6, 5), flattened_range=slice(a, b)
            )
            state = make_sharded_optimizer_tensor(factory, block.reshape(-1)[a:b], "optimizer.state.exp_avg")
            states.append({"s": state})
    save_as_ranks(states, tmp_path / "x")
    target = torch.empty(12, 5)
    load({"w": sharded_like("optimizer.state.exp_avg.up", target)}, tmp_path / "x")
    halves = [block.chunk(2) for block in blocks]
    assert torch.equal(target, torch.cat([h[0] for h in halves] + [h[1] for h in halves]))


def test_a_built_factory_is_loaded_merged_and_in_place(tmp_path: Path) -> None:
    blocks, targets = ([make(4, 3) for _ in range(2)] for make in (torch.randn, torch.zeros))
    save_as_ranks([{"w": swiglu(r, 2, b)} for r, b in enumerate(blocks)], tmp_path / "x")
    loaded = load_as_ranks([{"w": swiglu(r, 2, t)} for r, t in enumerate(targets)], tmp_path / "x")
    for block, target, state in zip(blocks, targets, loaded):
        assert torch.equal(target, block)
        assert state["w"] is target


BUILD: dict[str, Any] = {"build_fn": lambda *a: None, "merge_fn": lambda x: x}
FACTORY_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of the two forms"),
    ({"build_fn": lambda *a: None}, "exactly one of the two forms"),
    ({**BUILD, "flattened_range": slice(0, 3)}, "declare it by segments"),
    ({"row_start": 1, "row_stop": 2}, "expected a start at row 0"),
    ({"row_start": 0, "row_stop": 1}, "cover 1 rows"),
]


def test_factories_that_cannot_work_are_refused() -> None:
    for options, text in FACTORY_ERRORS:
        if "row_start" in options:
            rows = Segment(**options, global_shape=(2,), global_offset=(0,))
            options = {"segments": (rows,), "local_shape": (2,)}
        with pytest.raises(CheckpointingException, match=text):
            ShardedTensorFactory("up", None, **options)


def test_factories_are_applied_in_place_and_merged_back() -> None:
    data = torch.randn(4, 3)
    state: Any = {"a": {"w": swiglu(0, 1, data)}, "l": [1, swiglu(0, 1, data)]}
    factories = {"a": {"w": state["a"]["w"]}, "l": {1: state["l"][1]}}
    apply_factories(state)
    assert [piece.key for piece in state["a"]["w"]] == ["up", "up"]
    loaded = {"a": {"w": [p.data for p in state["a"]["w"]]}, "l": [1, [p.data for p in state["l"][1]]]}
    merged = apply_factory_merges(loaded, factories)
    assert torch.equal(merged["a"]["w"], data)
    assert merged["l"][0] == 1
    assert torch.equal(merged["l"][1], data)


def test_merges_that_do_not_fit_are_refused() -> None:
    cases: list[tuple[Any, Any, str]] = [
        ({"a": 1}, {"b": 2}, "Different dict keys"),
        ([1, 2], [3], "Cannot merge two lists with different lengths"),
        ([1], {"x": 2}, "positions in it"),
        ([1], {5: 2}, "positions in it"),
        (1, 2, "Duplicate non-dict and non-list values"),
    ]
    for loaded, factories, text in cases:
        with pytest.raises(ValueError, match=text):
            apply_factory_merges(loaded, factories)


def test_prefixes_of_all_sharded_keys() -> None:
    state = {"a": tensor("x.a"), "l": [tensor("x.b"), 5], "plain": 3}
    add_prefix_for_sharding(state, "m.")
    assert [state["a"].key, state["l"][0].key] == ["m.x.a", "m.x.b"]
    replace_prefix_for_sharding(state, "m.x.", "n.")
    assert [state["a"].key, state["l"][0].key] == ["n.a", "n.b"]
    with pytest.raises(ValueError, match=r"Expected 'n\.b' to begin with prefix 'n\.a'"):
        replace_prefix_for_sharding(state, "n.a", "q")
    assert state["a"].key == "n.a"
    apply_prefix_mapping(state, {"n.a": "first", "n.": "second."})
    assert [state["a"].key, state["l"][0].key] == ["first", "second.b"]


def test_unsharded_lists_are_one_leaf_and_lengths_may_differ(tmp_path: Path) -> None:
    nested = {"groups": [{"lr": 1}], "tensors": [tensor("a"), 7], "nothing": {}, 3: "three"}
    assert [leaf.path for leaf in leaves(nested)] == [("groups",), ("tensors", 0), ("tensors", 1), ("nothing",), (3,)]
    save({"l": [tensor("a"), {"x": 1}], "groups": [1, 2, 3]}, tmp_path / "x")
    state = load({"l": [tensor("a")], "groups": []}, tmp_path / "x").state
    assert state["groups"] == [1, 2, 3]
    assert len(state["l"]) == 1


def test_local_objects_are_not_stored_and_come_back(tmp_path: Path) -> None:
    save({"params": LocalNonpersistentObject(object()), "x": 1}, tmp_path / "x")
    mine = object()
    assert load({"params": LocalNonpersistentObject(mine), "x": None}, tmp_path / "x").state == {"params": mine, "x": 1}


def test_states_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        ({"t": (tensor("a"),)}, "'t' is a tuple that contains sharded"),
        ({1.5: tensor("a")}, "must be a str or an int"),
        ({"f": ShardedTensorFactory("f", torch.zeros(1), lambda *a: [3], lambda x: x)}, "built a list where only"),
    ]
    for state, text in cases:
        with pytest.raises(CheckpointingException, match=text):
            save(state, tmp_path / "x")


def test_a_function_that_cuts_rows_is_declared_by_its_rows() -> None:
    data = torch.randn(6, 5)
    declared = swiglu(1, 2, data).declared()
    assert declared.segments == segments(1, 2, 6, 5)
    assert [piece.data.tolist() for piece in declared.build()] == [half.tolist() for half in data.chunk(2)]


def test_a_function_that_cuts_columns_stays_a_function() -> None:
    def build(key: str, data: torch.Tensor, replica_id: object, flat: object) -> list[ShardedTensor]:
        return [sharded_like(f"{key}{half}", part) for half, part in enumerate(data.chunk(2, dim=1))]

    factory = ShardedTensorFactory("up", torch.randn(4, 6), build, lambda loaded: torch.cat(loaded, dim=1))
    assert factory.declared() is factory
    made = make_sharded_state(factory, 3.0, "step", PerParam())
    assert (made.key, made.global_shape, made.replica_id) == ("optimizer.state.step.up", (), 0)


def test_a_block_twice_on_one_rank_is_saved_once_if_equal(tmp_path: Path) -> None:
    first = sharded_like("w", torch.ones(3))
    second = sharded_like("w", torch.ones(3))
    save({"chunk0": {"w": first}, "chunk1": {"w": second}}, tmp_path / "equal")
    targets = [torch.zeros(3), torch.zeros(3)]
    load({str(i): sharded_like("w", t) for i, t in enumerate(targets)}, tmp_path / "equal")
    assert len(read_index(tmp_path / "equal").tensors["w"].chunks) == 1
    assert [target.tolist() for target in targets] == [[1.0] * 3] * 2
    second.data.add_(1)
    for second.replica_id in (0, 1):
        with pytest.raises(CheckpointingException, match=r"chunk0.w and chunk1.w would both .*add_prefix") as caught:
            save({"chunk0": {"w": first}, "chunk1": {"w": second}}, tmp_path / "different")
        assert "replica_id" not in str(caught.value)


def test_wider_parameters_and_mains_are_read_from_each_other(tmp_path: Path) -> None:
    exact = torch.randn(5)
    mains = "optimizer.state.fp32_param.w"
    save({"w": sharded_like("w", exact.bfloat16()), "m": sharded_like(mains, exact)}, tmp_path / "bf16")
    wide = sharded_like("w", torch.zeros(5))
    wide.has_mains = True
    report = load({"w": wide}, tmp_path / "bf16")
    assert torch.equal(wide.data, exact)
    assert report.missing == ()
    save({"w": sharded_like("w", exact)}, tmp_path / "fp32")
    narrow = sharded_like("w", torch.zeros(5).bfloat16())
    main = sharded_like(mains, torch.zeros(5))
    narrow.has_mains = True
    load({"w": narrow, "m": main}, tmp_path / "fp32")
    assert torch.equal(main.data, exact)
    assert torch.equal(narrow.data, exact.bfloat16())


def test_the_work_for_many_scopes_grows_with_their_number_only() -> None:
    """A model may have an optimizer for each of a thousand parameters."""

    def calls(scopes: int) -> int:
        state = {str(n): ScopedState({"w": sharded_like("w", torch.zeros(1))}) for n in range(scopes)}
        events: list[str] = []
        earlier = sys.getprofile()
        sys.setprofile(lambda frame, event, arg: events.append(event))
        try:
            flatten_state(state)
        finally:
            sys.setprofile(earlier)
        return len(events)

    calls(1)  # fills caches
    assert calls(80) < 2.5 * calls(40)
