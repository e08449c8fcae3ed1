"""Which numbers should I use: every format trains, finished runs are kept, and the table says what was found."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture
def example(small_example: Callable[..., ModuleType]) -> ModuleType:
    return small_example("which_numbers", dim=32)


def test_every_format_trains_and_its_bytes_are_reported(
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
