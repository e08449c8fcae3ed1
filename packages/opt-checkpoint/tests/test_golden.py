"""Checkpoints of every released format and of stock DCP, kept in the repository, load bit-equal."""

import sys
from pathlib import Path

import pytest
import torch
from states import whole_tensors

from opt_checkpoint import ShardedObject, load, read_index, verify_checkpoint
from opt_checkpoint.disk.data_file import bytes_view

sys.path.insert(0, str(Path(__file__).parent / "golden"))

from make_golden import golden_state, golden_values

GOLDEN = Path(__file__).parent / "golden"
OURS = sorted(GOLDEN.glob("*-ours"))
STOCK = sorted(GOLDEN.glob("*-stock"))


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert bytes(bytes_view(a.contiguous())) == bytes(bytes_view(b.contiguous()))


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.name)
def test_our_golden_checkpoints_load_bit_equal(path: Path) -> None:
    assert verify_checkpoint(path) == []
    tensors = whole_tensors(path, verify="chunks")
    for key, value in golden_values().items():
        assert_same_bits(tensors[key], value)
    assert torch.equal(tensors["optimizer.state.scale.w"], torch.arange(18.0).view(9, 2))
    assert tensors["optimizer.state.step.w"].item() == 12.0
    common = {"lr": None, "betas": None, "names": None, 3: 3}
    state = load({"rng": ShardedObject("rng", None, (3,), (2,)), "common": common}, path).state
    assert state["rng"] == {"rank": 2}
    assert state["common"] == golden_state(0, 1)["common"]
    assert read_index(path).details["torch"]


@pytest.mark.parametrize("path", STOCK, ids=lambda p: p.name)
def test_stock_golden_checkpoints_load_bit_equal(path: Path) -> None:
    assert verify_checkpoint(path) == []
    report = load({"number": None}, path)
    assert report.state == {"number": 5}
    tensors = whole_tensors(path)
    assert report.unexpected == tuple(sorted(tensors))
    for key, value in golden_values().items():
        assert_same_bits(tensors[f"nested.{key}"], value)


def test_there_are_golden_checkpoints_and_they_are_small() -> None:
    assert OURS
    assert STOCK
    assert sum(f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file()) < 700_000
