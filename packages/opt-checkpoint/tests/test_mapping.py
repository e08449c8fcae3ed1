"""The sharded types: fields, checks in their order, rank offsets, narrowing, names on disk."""

from typing import Any

import pytest
import torch

from opt_checkpoint import CheckpointingException, ShardedObject, ShardedTensor, is_main_replica


def sharded(**changes: Any) -> ShardedTensor:
    fields: dict[str, Any] = {
        "key": "w",
        "data": torch.zeros(4, 3),
        "dtype": torch.float32,
        "local_shape": (4, 3),
        "global_shape": (8, 3),
        "global_offset": (4, 0),
        "axis_fragmentations": (2, 1),
    }
    return ShardedTensor(**{**fields, **changes})


def test_positions_of_the_fields_are_megatron_cores() -> None:
    names = [name for name, field in ShardedTensor.__dataclass_fields__.items() if not field.kw_only]
    assert names == [
        "key",
        "data",
        "dtype",
        "local_shape",
        "global_shape",
        "global_offset",
        "axis_fragmentations",
        "replica_id",
        "prepend_axis_num",
        "allow_shape_mismatch",
        "flattened_range",
    ]


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float16, "local_shape": (1,)}, "Data dtype should match"),
    ({"local_shape": (4, 4), "global_shape": (8,)}, "does not match local_shape"),
    ({"global_shape": (8, 3, 1), "prepend_axis_num": 2}, "as many axes as each other"),
    ({"prepend_axis_num": 1}, "1 prepended axes"),
    ({"global_offset": (3, 0)}, r"Global offset \(3\) must be divisible by local shape \(4\)"),
    ({"global_offset": (8, 0)}, "outside the global shape"),
    ({"global_offset": (5, 0), "axis_fragmentations": None}, "outside the global shape"),
    ({"data": torch.zeros(13), "flattened_range": slice(0, 13)}, "within the 12 elements"),
    ({"data": torch.zeros(3), "flattened_range": slice(0, 6, 2)}, "step 1"),
    ({"data": torch.zeros(4), "flattened_range": slice(2, 7)}, "1-D of that length"),
    ({"flattened_range": slice(0, 12)}, "1-D of that length"),
]


def test_contradictions_are_refused_in_megatron_cores_order() -> None:
    for changes, text in CONTRADICTIONS:
        with pytest.raises(CheckpointingException, match=text):
            sharded(**changes)


def test_rank_offsets_count_prepended_axes_and_are_checked() -> None:
    made = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), (0, 5, 8), (1, 1, 2), prepend_axis_num=1)
    assert (made.global_shape, made.global_offset) == ((8, 8, 3), (5, 4, 0))
    assert made.axis_fragmentations == (8, 2, 1)
    for triples in ([(-1, 0, 1)], [(2, 0, 1)], [(0, -1, 2)], [(0, 0, 0)], [(0, 2, 2)], [(0, 0, 2)] * 2):
        with pytest.raises(CheckpointingException, match=r"Invalid rank offsets: .*axis"):
            ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), *triples)


@pytest.mark.parametrize("prepended", [0, 1])
def test_narrow_scales_the_global_tensor_and_views_the_data(prepended: int) -> None:
    data = torch.arange(12.0).view(4, 3)
    shard = ShardedTensor.from_rank_offsets("w", data, (prepended, 2, 3), prepend_axis_num=prepended)
    (part,) = shard.narrow(0, 1, 2)
    assert part.global_shape == (1,) * prepended + (6, 3)
    assert part.global_offset == (0,) * prepended + (4, 0)
    assert part.local_shape == (2, 3)
    assert torch.equal(part.data, data[1:3])
    assert part.data.data_ptr() == data[1:].data_ptr()


def test_narrow_beyond_the_block_or_of_uneven_blocks_is_refused() -> None:
    for bounds in ((0, 3, 2), (0, -1, 2), (1, 0, 4), (-1, 0, 1), (2, 0, 1)):
        with pytest.raises(CheckpointingException, match="narrow"):
            sharded().narrow(*bounds)
    with pytest.raises(CheckpointingException, match="not cut into equal blocks"):
        sharded(global_offset=(3, 0), axis_fragmentations=None).narrow(0, 0, 2)


def test_data_is_made_only_where_there_is_none() -> None:
    shard = sharded()
    data = shard.data
    shard.init_data("cpu")
    assert shard.data is data
    bare = shard.without_data()
    assert bare.data is None
    bare.init_data("cpu", torch.ones)
    assert torch.equal(bare.data, torch.ones(4, 3))
    flat = bare.without_data().flat(None, 2, 7)
    flat.init_data("cpu")
    assert flat.data.shape == (5,)


def test_a_flat_range_is_one_of_a_whole_block() -> None:
    with pytest.raises(ValueError, match="flattened_range of 2"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(4), flattened_range=slice(0, 2))
    with pytest.raises(CheckpointingException, match="is a flat range already"):
        sharded().flat(torch.zeros(3), 0, 3).flat(torch.zeros(1), 0, 1)


def test_replicas_share_an_identity_and_the_main_one_has_zeros() -> None:
    assert sharded(replica_id=3).identity == sharded().identity
    assert sharded().flat(torch.zeros(3), 0, 3).identity != sharded().identity
    replicas: list[Any] = [0, 1, (0, 0, 0), (0, 1, 0), ()]
    assert [is_main_replica(replica) for replica in replicas] == [True, False, True, False, True]


def test_an_object_is_found_again_by_its_name_on_disk() -> None:
    for key in ("rng", "a/b", "x_y/shard_0_1"):
        made = ShardedObject(key, None, (4, 2), (3, 0))
        assert made.unique_key == f"{key}/shard_3.0_4.2"
        again = ShardedObject.empty_from_unique_key(made.unique_key)
        assert (again.key, again.global_shape, again.global_offset) == (key, (4, 2), (3, 0))
        assert ShardedObject.empty_from_unique_key(f"{key}/shard_3.0_4").global_shape == (4, -1)  # an early form
    for text in ("rng", "rng/shard_3.0", "rng/part_3_4", "rng/shard_a_b", "/shard_0_1"):
        with pytest.raises(CheckpointingException, match="does not have the form key/shard_OFFSET_SHAPE"):
            ShardedObject.empty_from_unique_key(text)


def test_an_object_outside_its_grid_is_refused() -> None:
    for shape, offset in (((4,), (3, 0)), ((4, 2), (4, 0)), ((4, 2), (0, -1))):
        with pytest.raises(CheckpointingException, match=r"differ in length|lies outside the grid"):
            ShardedObject("rng", None, shape, offset)
