"""Checkpoints of every released format and of stock DCP, kept in the repository, load bit-equal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from opt_checkpoint import ShardedObject, load, read_index, sharded_like, verify_checkpoint
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
    targets = {k: torch.zeros_like(v) for k, v in golden_values().items()}
    wanted = {k: sharded_like(k, t) for k, t in targets.items()}
    load(wanted, path, verify="chunks")
    for key, value in golden_values().items():
        assert_same_bits(targets[key], value)
    scales, step = torch.zeros(9, 2), torch.zeros((), dtype=torch.float64)
    rest = {
        "s": sharded_like("optimizer.state.scale.w", scales),
        "step": sharded_like("optimizer.state.step.w", step),
        "rng": ShardedObject("rng", None, (3,), (2,)),
        "common": {"lr": None, "betas": None, "names": None, 3: 3},
    }
    state = load(rest, path).state
    assert torch.equal(scales, torch.arange(18.0).view(9, 2))
    assert (step.item(), state["rng"]) == (12.0, {"rank": 2})
    assert state["common"] == golden_state(0, 1)["common"]
    assert read_index(path).details["torch"]


@pytest.mark.parametrize("path", STOCK, ids=lambda p: p.name)
def test_stock_golden_checkpoints_load_bit_equal(path: Path) -> None:
    assert verify_checkpoint(path) == []
    targets = {f"nested.{k}": torch.zeros_like(v) for k, v in golden_values().items()}
    report = load({k: sharded_like(k, t) for k, t in targets.items()}, path)
    assert report.unexpected == ("number",)
    report = load({"number": None}, path)
    assert report.state == {"number": 5}
    assert "number" not in report.unexpected
    for key, value in golden_values().items():
        assert_same_bits(targets[f"nested.{key}"], value)


def test_there_are_golden_checkpoints_and_they_are_small() -> None:
    assert OURS
    assert STOCK
    assert sum(f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file()) < 600_000
