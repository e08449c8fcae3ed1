"""The leaderboard: every contender trains, all are tuned with the same effort, and the table says what was found."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from leaderboard_table import differ

pytestmark = pytest.mark.nightly


@pytest.fixture
def board(small_example: Callable[..., ModuleType]) -> ModuleType:
    board = small_example("leaderboard", dim=16)
    board.STEPS, board.WARMUP = 64, 0.1
    return board


def finish(board: ModuleType, contender: object, directory: Path, best: tuple[float, float], *, seeds: int = 3) -> None:
    """Make the runs of a contender with a loss whose minimum is at the learning rates `best`."""

    def train(run: object) -> dict:
        loss = sum(abs(math.log(rate / at)) for rate, at in zip(run.rates, best)) + 0.01 * run.seed
        return {"curve": [(run.steps // 2, loss + 1), (run.steps, loss)], "state_bytes": 8.0}

    board.train = train
    board.work((contender, directory, seeds))


def test_every_contender_trains(board: ModuleType) -> None:
    for contender in board.CONTENDERS:
        run = board.Run(contender, (contender.lr, contender.rest_lr), board.STEPS, 0)
        found = board.train(run)
        assert found["curve"][-1][0] == board.STEPS, contender.name
        assert all(math.isfinite(bits) for _, bits in found["curve"]), contender.name
        assert board.update_seconds(contender) > 0


@pytest.mark.parametrize("best", [(1.0, 1.0), (3.0, 1 / 3), (1 / 9, 9.0)])
def test_all_pairs_of_the_grid_are_tried_and_halved_to_a_quarter_of_the_length(
    board: ModuleType, tmp_path: Path, best: tuple[float, float]
) -> None:
    contender = board.Contender(name="rule", optimizer="AdamW", lr=1.0, rest_lr=1.0)
    finish(board, contender, tmp_path, best)
    results = board.Results(contender, tmp_path)
    assert [run.steps for run in board.halved(contender, results)] == [2] * 25 + [4] * 12 + [8] * 6 + [16] * 3
    assert board.best_rates(contender, results) == pytest.approx(best)
    full = board.full_runs(contender, results, 5)
    assert [found["run"]["seed"] for found in full] == [0, 1, 2]
    assert all(found["run"]["steps"] == 64 for found in full)


def test_finished_runs_are_not_repeated(board: ModuleType, tmp_path: Path) -> None:
    contender = board.Contender(name="rule", optimizer="AdamW", lr=1.0, rest_lr=1.0)
    finish(board, contender, tmp_path, (1.0, 1.0))
    board.train = lambda run: pytest.fail(f"{run} was repeated")
    board.work((contender, tmp_path, 3))
    board.STEPS = 128  # other settings are other runs
    with pytest.raises(pytest.fail.Exception, match="repeated"):
        board.work((contender, tmp_path, 3))


def test_a_diverged_run_is_never_the_best(board: ModuleType, tmp_path: Path) -> None:
    contender = board.Contender(name="rule", optimizer="AdamW", lr=1.0, rest_lr=1.0)
    diverged = {"curve": [(2, math.nan)], "state_bytes": 8.0}
    results = board.Results(contender, tmp_path)
    results.add(board.Run(contender, (1.0, 1.0), 2, 0), diverged)
    finish(board, contender, tmp_path, (1.0, 1.0))
    assert board.best_rates(contender, board.Results(contender, tmp_path)) != (1.0, 1.0)


def test_hidden_matrices_and_the_rest_have_rates_of_their_own(board: ModuleType) -> None:
    for contender in (board.CONTENDERS[0], board.CONTENDERS[1]):
        model, optimizer = board.setup(board.Run(contender, (0.5, 0.25), board.STEPS, 0))
        rates = {param: group["lr"] for group in optimizer.param_groups for param in group["params"]}
        found = {name: rates[param] for name, param in model.named_parameters()}
        hidden = {name for name, rate in found.items() if rate == 0.5}
        assert hidden == {f"blocks.0.{name}.weight" for name in ("qkv", "proj", "up", "down")}
        assert set(found.values()) == {0.5, 0.25}


def test_rules_that_seeds_cannot_tell_apart_share_places(board: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["AdamW", "near", "far", "not run"]
    board.CONTENDERS = [board.Contender(name=name, optimizer="AdamW", lr=1.0, rest_lr=1.0) for name in names]
    for contender, best in zip(board.CONTENDERS, (1.05, 1.051, 1.5)):
        finish(board, contender, tmp_path, (best, 1.0))
    board.report(tmp_path, tmp_path)
    table = (tmp_path / "leaderboard.md").read_text()
    assert [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:] == [
        [" AdamW ", " 1–2 "],
        [" near ", " 1–2 "],
        [" far ", " 3 "],
    ]
    assert "the mean of 3 seeds" in table
    assert table.endswith("Not run, for want of time: not run.\n")
    assert (tmp_path / "leaderboard.svg").read_text().startswith("<?xml")
    assert [contender.name for contender in board.first_four(tmp_path)] == ["AdamW", "near", "far"]
    finish(board, board.CONTENDERS[0], tmp_path, (1.05, 1.0), seeds=5)
    board.report(tmp_path, tmp_path)
    table = (tmp_path / "leaderboard.md").read_text()
    assert "the mean of 3 to 5 seeds" in table
    assert "AdamW's final 0.069 bits" in table  # log(1.05), and a mean of 0.02 over its seeds
    assert "| AdamW | 1–2 | 0.069 ± 0.007 |" in table


def test_two_means_differ_beyond_the_deviation_of_their_seeds() -> None:
    # Deviations of 0.05, three seeds: t = 0.1 / (0.05 * sqrt(2/3)) = 2.449 < 2.776, and 0.2 gives 4.899.
    assert not differ([1.0, 1.05, 1.1], [1.1, 1.15, 1.2])
    assert differ([1.0, 1.05, 1.1], [1.2, 1.25, 1.3])
