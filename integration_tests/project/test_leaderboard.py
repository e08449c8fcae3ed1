"""The leaderboard and "which numbers should I use": everything trains."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from leaderboard_table import differ

pytestmark = pytest.mark.nightly


EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch, *, dim: int) -> Any:
    """A fresh copy of the example, on a model and a budget of a second."""
    spec: Any = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    module.STEPS, module.WARMUP, module.EVAL_EVERY, module.BATCH = 4, 2, 2, 2
    module.MODEL = {"dim": dim, "depth": 1, "num_heads": 2}
    return module


def test_every_contender_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    board = loaded("leaderboard", monkeypatch, dim=16)
    board.STEPS, board.WARMUP = 64, 0.1
    for contender in board.CONTENDERS:
        found = board.train(board.Run(contender, (contender.lr, contender.rest_lr), board.STEPS, 0))
        assert found["curve"][-1][0] == board.STEPS, contender.name
        assert all(math.isfinite(bits) for _, bits in found["curve"]), contender.name
        assert board.update_seconds(contender) > 0


def test_rules_that_seeds_cannot_tell_apart_do_not_differ() -> None:
    # Deviations of 0.05, three seeds: t = 0.1 / (0.05 * sqrt(2/3)) = 2.449 < 2.776, and 0.2 gives 4.899.
    assert not differ([1.0, 1.05, 1.1], [1.1, 1.15, 1.2])
    assert differ([1.0, 1.05, 1.1], [1.2, 1.25, 1.3])


def test_every_format_trains_and_its_bytes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    example = loaded("which_numbers", monkeypatch, dim=32)
    example.train_missing(tmp_path)
    example.report(tmp_path, tmp_path)
    rows = {row["mode"]: row for row in json.loads((tmp_path / "numbers.json").read_text())["rows"]}
    assert [*rows] == [*example.MODES]
    assert rows["bf16, 16-bit remainders"]["state_bytes"] == pytest.approx(10, abs=0.1)
    # The linear layers' weights take a byte; embeddings and norms, half of this small model, two.
    assert 1 < rows["fp8 (tensorwise), fp32 mains"]["weight_bytes"] < 2
    assert all(math.isfinite(loss) for row in rows.values() for _, loss in row["curve"])
    assert "| fp32 | 4.00 | 8.00 |" in (tmp_path / "numbers.md").read_text()
