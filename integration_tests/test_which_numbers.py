"""Which numbers should I use: every format trains, finished runs are kept, and the table says what was found."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples/which_numbers.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, on a model and a budget of a second."""
    spec = importlib.util.spec_from_file_location("which_numbers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "which_numbers", module)
    spec.loader.exec_module(module)
    module.STEPS, module.WARMUP, module.EVAL_EVERY, module.BATCH = 4, 2, 2, 2
    module.MODEL = {"dim": 32, "depth": 1, "num_heads": 2}
    return module


@pytest.fixture(autouse=True)
def threads() -> object:
    """A run sets the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_format_trains_and_its_bytes_are_told(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    example.train_missing(tmp_path)
    monkeypatch.setattr(example, "train", lambda mode, seed: pytest.fail(f"{mode} was finished"))
    example.train_missing(tmp_path)
    example.report(tmp_path, tmp_path)
    recorded = json.loads((tmp_path / "numbers.json").read_text())
    rows = {row["mode"]: row for row in recorded["rows"]}
    assert [*rows] == [*example.MODES]
    assert rows["fp32"]["weight_bytes"] == 4
    assert rows["fp32"]["state_bytes"] == pytest.approx(8, abs=0.1)
    assert rows["bf16, 16-bit remainders"]["state_bytes"] == pytest.approx(10, abs=0.1)
    # The linear layers' weights take a byte; embeddings and norms, half of this small model, two.
    assert 1 < rows["fp8 (tensorwise), fp32 mains"]["weight_bytes"] < 2
    assert all(math.isfinite(loss) for row in rows.values() for _, loss in row["curve"])
    assert "| fp32 | 4.00 | 8.00 |" in (tmp_path / "numbers.md").read_text()
    assert (tmp_path / "numbers.svg").read_text().startswith("<?xml")
