"""The leaderboard: every contender trains, all are tuned with the same effort, and the table says what was found."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture
def board(small_example: Callable[..., ModuleType]) -> ModuleType:
    return small_example("leaderboard", dim=16)


def finish(board: ModuleType, contender: object, directory: Path, best: float) -> list[float]:
    """Run the tuning with a loss whose minimum is at the learning rate `best`; return the rates tried with seed 0."""
    rates = []
    while runs := board.next_runs(contender, directory):
        for run in runs:
            loss = abs(math.log(run.lr / best)) + 0.01 * run.seed
            if run.seed == 0:
                rates.append(run.lr)
            found = {"lr": run.lr, "seed": run.seed, "curve": [[2, loss + 1], [4, loss]], "state_bytes": 8.0}
            (directory / f"{run.key()}.json").write_text(json.dumps(found))
    return rates


def test_every_contender_trains(board: ModuleType, tmp_path: Path) -> None:
    for contender in board.CONTENDERS:
        run = board.Run(contender, contender.lr, 0)
        board.train(run, tmp_path)
        found = board.result(run, tmp_path)
        assert [step for step, _ in found["curve"]] == [2, 4], contender.name
        assert all(math.isfinite(loss) for _, loss in found["curve"]), contender.name
        assert board.update_seconds(contender) > 0


@pytest.mark.parametrize(("best", "tried"), [(1.0, 3), (3.0, 4), (1 / 3, 4), (9.0, 5), (1000.0, 5)])
def test_rates_are_tried_beyond_the_end_and_no_more_than_five(
    board: ModuleType, tmp_path: Path, best: float, tried: int
) -> None:
    contender = board.Contender(name="one", optimizer="AdamW", lr=1.0)
    rates = finish(board, contender, tmp_path, best)
    assert len(rates) == len(set(rates)) == tried
    runs = board.tuned(contender, tmp_path)
    assert [run["seed"] for run in runs] == [0, 1, 2]
    assert {run["lr"] for run in runs} == {min(rates, key=lambda rate: abs(math.log(rate / best)))}


def test_a_diverged_run_is_never_the_best(board: ModuleType, tmp_path: Path) -> None:
    contender = board.Contender(name="one", optimizer="AdamW", lr=1.0)
    finish(board, contender, tmp_path, 1.0)
    run = board.Run(contender, 1.0, 0)
    (tmp_path / f"{run.key()}.json").write_text(json.dumps({"lr": 1.0, "seed": 0, "curve": [[2, math.nan]]}))
    finish(board, contender, tmp_path, 1.0)
    assert board.tuned(contender, tmp_path)[0]["lr"] != 1.0


def test_other_settings_are_other_runs(board: ModuleType) -> None:
    run = board.Run(board.CONTENDERS[0], 1.0, 0)
    before = run.key()
    board.STEPS = 5
    assert run.key() != before


def test_the_report_says_when_the_baselines_loss_is_reached(board: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    board.CONTENDERS = [
        board.Contender(name="AdamW", optimizer="AdamW", lr=1.0),
        board.Contender(name="other", optimizer="Lion", lr=1.0),
        board.Contender(name="not run", optimizer="Lion", lr=2.0),
    ]
    finish(board, board.CONTENDERS[0], tmp_path, 1.5)
    finish(board, board.CONTENDERS[1], tmp_path, 4.0)
    board.report(tmp_path, tmp_path)
    rows = json.loads((tmp_path / "leaderboard.json").read_text())["rows"]
    assert [row["rule"] for row in rows] == ["other", "AdamW"]  # best first
    assert rows[0]["steps_to_target"] == 4
    assert rows[0]["spread"] == pytest.approx(0.02 / math.log(2))
    table = (tmp_path / "leaderboard.md").read_text()
    assert "| other | 3 |" in table
    assert "not run" not in table
    assert (tmp_path / "leaderboard.svg").read_text().startswith("<?xml")
