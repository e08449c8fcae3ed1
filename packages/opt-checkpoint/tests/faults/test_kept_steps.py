"""Which steps stay: damaged ones are skipped and saved again, resumed and best ones are kept."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import error_on_all, on_threads
from series import damage, empty, names_in, saved, step_name, two_tiers
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointManager,
    KeepBest,
    TieredCheckpointManager,
    committed_steps,
    load,
    verify_checkpoint,
)


@pytest.mark.parametrize("how", ["truncated", "flipped bit", "manifest"])
def test_a_damaged_newest_step_is_skipped_and_saved_again(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(saved(tmp_path, 80, 100, 120) / step_name(120), how)
    with CheckpointManager(tmp_path, keep=9) as manager:
        with pytest.warns(match="step-000000120 is damaged and is skipped") as caught:
            assert_is_step(manager.load(empty()).state, 100, 0, 1)
        assert len(caught) == 1
        assert (manager.latest(), manager.steps()) == (100, [80, 100])
        for step in (110, 120):
            manager.save(step, state_at(step, 0, 1))
        manager.wait()
        assert manager.steps() == [80, 100, 110, 120]
    damage(tmp_path / step_name(120), how)
    saved(tmp_path, 120)  # by a run that has loaded nothing here
    assert "120 is damaged (" in caplog.text
    assert verify_checkpoint(tmp_path / step_name(120)) == []
    with pytest.raises(CheckpointExistsError, match="never overwritten"):
        saved(tmp_path, 120)
    assert CheckpointManager(tmp_path).latest() == 120


@pytest.mark.parametrize("how", ["truncated", "missing", "manifest"])
def test_damaged_steps_do_not_count_as_kept(tmp_path: Path, how: str) -> None:
    """A run that went back by number lost the step that it had resumed from."""
    saved(tmp_path, 10, 20, 30)
    for step in (20, 30):
        damage(tmp_path / step_name(step), how)
    load(empty(), tmp_path / step_name(10))
    with CheckpointManager(tmp_path, keep=2) as manager:
        manager.save(31, state_at(31, 0, 1))
    with CheckpointManager(tmp_path, keep=2) as manager:
        manager.save(25, state_at(25, 0, 1))
        manager.wait()
        assert names_in(tmp_path) == [10, 20, 25, 30, 31]  # 31 is abandoned, and 25 and 10 are kept
        assert manager.latest() == 25  # 30 is known to be damaged


@pytest.mark.parametrize("abandoned", [False, True])
def test_the_resumed_step_stays_until_enough_later_ones_exist(tmp_path: Path, abandoned: bool) -> None:
    """Flipped bits, which are found by no size, were kept in its place."""
    saved(tmp_path, 10, 20, 30, 40)
    with CheckpointManager(tmp_path, keep=2, in_background=False) as manager:
        if abandoned:
            manager.load(empty(), step=10)
            manager.save(15, state_at(15, 0, 1))
        manager.load(empty(), step=20)
        manager.save(41, state_at(41, 0, 1))
        assert 20 in names_in(tmp_path)
        assert_is_step(manager.load(empty(), step=20).state, 20, 0, 1)
        for step in (42, 43):
            manager.save(step, state_at(step, 0, 1))
    assert names_in(tmp_path) == [42, 43]


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_tiers_skip_damaged_durable_steps_too(tmp_path: Path, damaged: int) -> None:
    with two_tiers(tmp_path) as tiers:
        for step in (80, 100, 120):
            tiers.save(step, state_at(step, 0, 1))
    steps = [80, 100, 120][:-damaged]
    for step in (120, 100, 80)[:damaged]:
        damage(tmp_path / "durable" / step_name(step))
    assert two_tiers(tmp_path).find().tier == "local"
    shutil.rmtree(tmp_path / "local")
    if not steps:
        with pytest.warns(match="is skipped"), pytest.raises(CheckpointCorruptError, match="every checkpoint"):
            two_tiers(tmp_path).find()
        return
    with two_tiers(tmp_path) as tiers:
        with pytest.warns(UserWarning, match="120 is damaged and is skipped"):
            found = tiers.find()
        assert (found.step, found.tier) == (steps[-1], "durable")
        assert "step 120 of the durable tier is damaged" in found.skipped_reasons
        assert_is_step(tiers.load(empty()).state, steps[-1], 0, 1)
        tiers.save(120, state_at(121, 0, 1))
    shutil.rmtree(tmp_path / "local")
    with two_tiers(tmp_path) as tiers:
        assert_is_step(tiers.load(empty()).state, 121, 0, 1)


NAN = float("nan")


INF = float("inf")


BEST = {  # how many to keep and which are better, the metrics of steps 1, 2, ..., and the steps that are left
    "lower is better": (KeepBest(2, "min"), [0.5, 0.1, 0.3, 0.9, 0.8], [2, 3, 5]),
    "higher is better": (KeepBest(1, "max"), [0.5, 0.1, 0.9, 0.2, 0.8], [3, 5]),
    "the newest is the best": (KeepBest(2, "min"), [3, 2, 1], [2, 3]),
    "of equal ones the later": (KeepBest(1, "max"), [1.0, 1.0, 0.0], [2, 3]),
    "NaN is never the best": (KeepBest(2, "min"), [NAN, 0.2, NAN, INF, 7.0], [2, 5]),
    "infinity is worse than all": (KeepBest(2, "min"), [INF, 0.2, NAN, 8.0], [2, 4]),
    "less than zero": (KeepBest(1, "min"), [-INF, 0.0, 0.0], [1, 3]),
    "some have none": (KeepBest(2, "max"), [None, 0.2, None, None], [2, 4]),
    "none has one": (KeepBest(2, "max"), [None, None], [2]),
}


@pytest.mark.parametrize("case", BEST)
def test_the_steps_with_the_best_metrics_stay(place: Any, case: str) -> None:
    """Each step is saved by another process, which finds the metrics of the steps before."""
    keep_best, metrics, left = BEST[case]
    for step, metric in enumerate(metrics, start=1):
        with CheckpointManager(place, keep=1, keep_best=keep_best) as manager:
            manager.save(step, state_at(step, 0, 1), metric=metric)
    assert committed_steps(place) == left
    known = {step: metric for step, metric in enumerate(metrics, start=1) if metric == metric and metric is not None}
    best = CheckpointManager(place, keep_best=keep_best).best()
    assert (best is None) == (not known)
    if best is not None:
        assert known[best] == (min if keep_best.mode == "min" else max)(known.values())
    with CheckpointManager(place, keep=1) as manager:  # which keeps none for its metric
        manager.save(20, state_at(20, 0, 1))
    assert committed_steps(place) == [20]


def test_best_steps_beside_others(place: Any) -> None:
    """One process; with multiples, a step that is damaged, one that the run has abandoned, and one saved again."""
    options = {"keep": 1, "keep_every": 4, "keep_best": KeepBest(2, "min"), "in_background": False}
    manager = CheckpointManager(place, **options)
    for step, metric in enumerate([0.1, 0.3, 0.2, 0.9, 0.5], start=1):
        manager.save(step, state_at(step, 0, 1), metric=np.float32(metric))
    assert manager.steps() == [1, 3, 4, 5]
    manager.load(empty(), step=3)  # as after a divergence
    manager.save(4, state_at(4, 0, 1), metric=torch.tensor(0.15))
    assert (manager.steps(), manager.best()) == ([1, 4], 1)
    manager.save(5, state_at(5, 0, 1))
    manager.save(6, state_at(6, 0, 1), metric=0.3)
    assert manager.steps() == [1, 4, 6]
    if isinstance(place, Path):
        damage(place / step_name(1), "truncated")
        again = CheckpointManager(place, **options)
        assert again.best() == 4
        again.save(7, state_at(7, 0, 1))
        assert again.steps() == [4, 6, 7]


@pytest.mark.parametrize("metric", ["0.5", 1j, [0.5], torch.ones(2), {}], ids=repr)
def test_what_is_no_number_is_refused_as_a_metric(tmp_path: Path, metric: Any) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match=r"metric=.* must be one real number"):
        manager.save(1, state_at(1, 0, 1), metric=metric)
    assert not list(tmp_path.iterdir())


def test_the_best_need_a_rule(tmp_path: Path) -> None:
    for count, mode in ((0, "min"), (1.5, "min"), (True, "min"), (1, "lowest")):
        with pytest.raises(ValueError, match=r"KeepBest\((count|mode)="):
            KeepBest(count, mode)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"keep_best=2 must be a KeepBest"):
        CheckpointManager(tmp_path, keep_best=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"best\(\) needs"):
        CheckpointManager(tmp_path).best()


def save_with_metrics(ranks: Any, place: Path, metrics: list[float]) -> None:
    manager = CheckpointManager(place, keep_best=KeepBest(1, "min"), in_background=False, process_group=ranks, keep=1)
    for step in (1, 2):
        manager.save(step, state_at(step, ranks.rank, ranks.size), metric=metrics[ranks.rank] * step)
    assert manager.best() == 1


def test_ranks_agree_on_the_metric(tmp_path: Path) -> None:
    failure = error_on_all(2, lambda ranks: save_with_metrics(ranks, tmp_path / "differ", [0.5, 0.25]))
    assert "ranks differ in metric: 0.5 (ranks [0]), 0.25 (ranks [1])" in str(failure)
    assert on_threads(2, lambda ranks: save_with_metrics(ranks, tmp_path / "same", [0.5, 0.5])) == [None, None]
    assert committed_steps(tmp_path / "same") == [1, 2]


def test_the_durable_tier_keeps_its_best_steps(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="are on one node"):
        tiers = TieredCheckpointManager(
            tmp_path / "local", tmp_path / "durable", durable_every=20, keep=1, keep_best=KeepBest(1, "max")
        )
    with tiers:
        for step, metric in ((20, 0.5), (30, 0.9), (40, 0.7), (60, 0.1)):  # 30 is in the local tier only
            tiers.save(step, state_at(step, 0, 1), metric=metric)
    assert committed_steps(tmp_path / "durable") == [40, 60]
