"""Megatron-Core's `dp_reshardable` directories: converted where their layout is given, refused where it is not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from opt_checkpoint import BucketSlot, CheckpointingException, CheckpointKeyError, load, read_index, sharded_like
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.megatron import megatron_to_checkpoint

STATES = ("param", "exp_avg", "exp_avg_sq")
# Two tensor-parallel ranks, each with two buckets: of `w` half the columns each, a bias that both have, a matrix.
SLOTS = [
    BucketSlot(name="w", shape=(4, 3), start=64, group=0, global_shape=(4, 6), global_offset=(0, 0)),
    BucketSlot(name="w", shape=(4, 3), start=64, group=1, global_shape=(4, 6), global_offset=(0, 3)),
    BucketSlot(name="b", shape=(50,), start=0),
    BucketSlot(name="b2", shape=(50,), start=0, group=1),
    BucketSlot(name="top", shape=(2, 5), start=0, bucket=1, global_shape=(4, 5), global_offset=(0, 0)),
    BucketSlot(name="top", shape=(2, 5), start=0, bucket=1, group=1, global_shape=(4, 5), global_offset=(2, 0)),
]


def key_of(group: int, bucket: int, state: str) -> str:
    dtypes = "dtype_(torch.bfloat16, torch.float32)"
    return f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.{dtypes}.bucket_idx_{bucket}.{state}"


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As Megatron-Core's `torch_dist`: a stock directory and its mark."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=path)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


@pytest.fixture
def buckets(tmp_path: Path) -> dict[str, torch.Tensor]:
    keys = {key_of(group, bucket, state): bucket for group in (0, 1) for bucket in (0, 1) for state in STATES}
    generator = torch.Generator().manual_seed(0)
    found = {key: torch.randn((76, 10)[bucket], generator=generator) for key, bucket in keys.items()}
    write(tmp_path / "theirs", found)
    return found


def load_whole(path: Path, key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    target = torch.empty(shape, dtype=dtype)
    load({"x": sharded_like(key, target)}, path)
    return target


def test_buckets_become_parameters_by_their_slots(tmp_path: Path, buckets: dict[str, torch.Tensor]) -> None:
    megatron_to_checkpoint(tmp_path / "theirs", tmp_path / "ours", slots=SLOTS, step=7)
    for state in STATES:
        name = f"optimizer.state.{'fp32_param' if state == 'param' else state}"
        first, second = (buckets[key_of(group, 0, state)] for group in (0, 1))
        halves = [flat[64:76].view(4, 3) for flat in (first, second)]
        assert torch.equal(load_whole(tmp_path / "ours", f"{name}.w", (4, 6)), torch.cat(halves, 1))
        assert torch.equal(load_whole(tmp_path / "ours", f"{name}.b", (50,)), first[:50])
        tops = [buckets[key_of(group, 1, state)].view(2, 5) for group in (0, 1)]
        assert torch.equal(load_whole(tmp_path / "ours", f"{name}.top", (4, 5)), torch.cat(tops))
    assert load_whole(tmp_path / "ours", "optimizer.state.step.w", (), torch.int64).item() == 7
    assert {p.name for p in tmp_path.iterdir()} == {"theirs", "ours"}


def moved(number: int, **changes: Any) -> list[BucketSlot]:
    fields = {name: getattr(SLOTS[number], name) for name in BucketSlot.__slots__}
    return [*SLOTS[:number], BucketSlot(**{**fields, **changes}), *SLOTS[number + 1 :]]


REFUSED = [
    (moved(2, bucket=5), r"b: no bucket has \(group, buffer, bucket\) \(0, 0, 5\); there are \(0, 0, 0\)"),
    (moved(0, start=40), r"w: elements \[40, 52\) .* must begin less than .* after element 50"),
    (moved(0, start=72), r"w: elements \[72, 84\) .* end within its 76 elements"),
    (SLOTS[:2] + SLOTS[3:], r"w: elements \[64, 76\) .* must begin .* after element 0"),  # a gap that is not padding
    (SLOTS[:-1], r"elements \[0, 10\) of .*bucket_idx_1.* belong to no slot"),
    (moved(1, global_offset=(0, 0)), r"has other values in group 1 than in an earlier one"),  # a hole in a parameter
]


def test_slots_of_another_layout_and_remainders_are_refused(tmp_path: Path, buckets: Any) -> None:
    for slots, text in REFUSED:
        with pytest.raises(CheckpointingException, match=text):
            megatron_to_checkpoint(tmp_path / "theirs", tmp_path / "ours", slots=slots)
    write(tmp_path / "narrow", {key_of(0, 0, "param"): torch.zeros(10, dtype=torch.int16)})
    slots = [BucketSlot(name="w", shape=(10,), start=0)]
    with pytest.raises(CheckpointingException, match=r"param is stored as torch.int16: 16-bit remainders"):
        megatron_to_checkpoint(tmp_path / "narrow", tmp_path / "ours", slots=slots)
    assert {p.name for p in tmp_path.iterdir()} == {"theirs", "narrow"}


def test_the_command_line_converts_and_a_load_says_so(
    tmp_path: Path, buckets: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointKeyError, match=r"dp_reshardable, .* convert it first: optckpt convert"):
        load({"x": sharded_like("optimizer.state.exp_avg.w", torch.zeros(4, 6))}, tmp_path / "theirs")
    command = ["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--from", "megatron"]
    assert main(command) == 2
    assert "Pass slots= (--slots FILE)" in capsys.readouterr().err
    rows = [{name: getattr(slot, name) for name in BucketSlot.__slots__} for slot in SLOTS]
    (tmp_path / "slots.json").write_text(json.dumps(rows))
    assert main([*command, "--slots", str(tmp_path / "slots.json"), "--step", "3"]) == 0
    assert "optimizer.state.step.top" in read_index(tmp_path / "ours").tensors
