"""A series of steps: runs that go back, damaged steps that are saved again, and one trainer."""

import contextlib
import errno
import json
import os
import shutil
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import error_on_all, on_threads
from failing_calls import Calls, error, failing, flip_bit, objects_in, put
from states import assert_is_step, state_at

from opt_checkpoint import (
    AsyncSaver,
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointingException,
    CheckpointManager,
    KeepBest,
    ObjectPath,
    TieredCheckpointManager,
    async_save,
    committed_steps,
    load,
    read_index,
    save,
    verify_checkpoint,
)
from opt_checkpoint.run.series import SUPERSEDED, step_name


def empty() -> Any:
    return state_at(0, 0, 1, filled=False)


def saved(place: Any, *steps: int, **options: Any) -> Any:
    with CheckpointManager(place, keep=9, **options) as manager:
        for step in steps:
            manager.save(step, state_at(step, 0, 1))
    return place


def damage(path: Path, how: str = "flipped bit") -> None:
    """Damage a checkpoint: its data file, or its manifest."""
    file = path / ("manifest.bin" if "manifest" in how else "__0_0.distcp")
    flip_bit(file)
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 8)
    if how == "missing":
        file.unlink()


@pytest.fixture(params=["directory", pytest.param("memory", marks=pytest.mark.needs_extra)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "directory":
        return tmp_path / "run"
    pytest.importorskip("obstore")
    return f"memory://{uuid.uuid4().hex}/run"


def test_a_rollback_stays_rolled_back(place: Any) -> None:
    saved(place, 80, 100, 120)
    with CheckpointManager(place, keep=9) as manager:
        assert manager.load(empty(), step=100).state["step"] == 100
        manager.save(110, state_at(110, 0, 1))
        manager.wait()
        assert (manager.latest(), manager.steps()) == (110, [80, 100, 110])
    again = CheckpointManager(place, keep=9)
    assert again.latest() == 110
    assert_is_step(again.load(empty(), step=120).state, 120, 0, 1)  # a reader may still hold it
    assert_is_step(again.load(empty()).state, 110, 0, 1)
    with again:
        again.save(120, state_at(121, 0, 1))  # training reaches it again
    assert CheckpointManager(place).steps() == [80, 100, 110, 120]
    assert_is_step(CheckpointManager(place).load(empty()).state, 121, 0, 1)


def test_abandoned_steps_are_deleted_once_the_run_passed_them(place: Any) -> None:
    saved(place, 100, 120, 130)
    with CheckpointManager(place, keep=1) as manager:
        manager.load(empty(), step=100)
        for step in (110, 125):
            manager.save(step, state_at(step, 0, 1))  # 110 itself is old after this, and 130 stays abandoned
        manager.wait()
        assert manager.steps() == [125]
        with pytest.raises(CheckpointingException):
            manager.load(empty(), step=120)
        manager.save(140, state_at(140, 0, 1))
    assert CheckpointManager(place).steps() == [140]
    if isinstance(place, Path):
        assert [path.name for path in place.iterdir()] == [step_name(140)]


class Died(BaseException):
    """Stands for the end of the process."""


def die() -> None:
    raise Died


def test_a_crash_in_a_rollback_leaves_the_old_or_new_newest_step(tmp_path: Path) -> None:
    seen = set()
    numbers = [0]
    for number in numbers:
        place = saved(tmp_path / str(number), 100, 120)
        manager = CheckpointManager(place, keep=9, in_background=False)
        manager.load(empty(), step=100)
        with Calls() as calls, contextlib.suppress(Died):
            calls.before = lambda *_, calls=calls, last=number or 10_000: die() if len(calls.made) >= last else None
            manager.save(110, state_at(110, 0, 1))
        numbers += range(1, len(calls.made) + 1) if number == 0 else ()
        newest = CheckpointManager(place).latest()
        assert newest == (110 if (place / step_name(110)).exists() else 120), number
        seen.add(newest)
        assert verify_checkpoint(place / step_name(newest)) == []
        saved(place, 130)
        assert CheckpointManager(place).latest() == 130
    assert seen == {110, 120}


def test_failed_saves_do_not_make_the_record_of_rollbacks_grow(tmp_path: Path) -> None:
    saved(tmp_path, 100, 120)
    manager = CheckpointManager(tmp_path, in_background=False)
    manager.load(empty(), step=100)
    with Calls(lambda name, key: error(errno.EIO) if ".distcp" in key else None):
        for _ in range(20):
            with pytest.raises(CheckpointFailedError, match="Input/output"):
                manager.save(110, state_at(110, 0, 1))
    assert CheckpointManager(tmp_path).latest() == 120
    assert 1 <= len(json.loads((tmp_path / SUPERSEDED).read_text())["pending"]) <= 8


def test_removing_a_step_that_is_a_link_keeps_its_target(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    run = saved(tmp_path / "run", 1)
    (run / step_name(1)).rename(moved)
    (run / step_name(1)).symlink_to(moved)
    with CheckpointManager(run, keep=1) as manager:
        manager.save(2, state_at(2, 0, 1))
    assert [path.name for path in run.iterdir()] == [step_name(2)]
    assert verify_checkpoint(moved) == []


def test_a_damaged_record_of_abandoned_steps_is_named(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for content in (b"", b"[]", b'{"steps": {}, "pending": 3}', b'{"steps": {"x": 1}, "pending": []}'):
        (tmp_path / SUPERSEDED).write_bytes(content)
        with pytest.raises(CheckpointCorruptError, match=r"superseded\.json is damaged.*remove it"):
            CheckpointManager(tmp_path).latest()


def two_tiers(folder: Path) -> TieredCheckpointManager:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return TieredCheckpointManager(folder / "local", folder / "durable", durable_every=20, keep=9)


def test_a_rollback_of_the_local_tier_is_one_of_the_durable_tier(tmp_path: Path) -> None:
    saved(tmp_path / "durable", 80, 100, 120)
    CheckpointManager(tmp_path / "durable").load(empty(), step=80)
    with two_tiers(tmp_path) as manager:
        assert not manager.save(90, state_at(90, 0, 1))
    found = two_tiers(tmp_path).find()
    assert found is not None
    assert (found.step, found.tier) == (90, "local")
    shutil.rmtree(tmp_path / "local")  # the node is lost
    assert two_tiers(tmp_path).latest() == 80
    with two_tiers(tmp_path) as manager:
        manager.load(empty())
        assert manager.save(100, state_at(101, 0, 1))
    assert_is_step(CheckpointManager(tmp_path / "durable").load(empty()).state, 101, 0, 1)


def test_the_durable_tier_follows_a_run_that_went_back(tmp_path: Path) -> None:
    """Symptom: after going back with the same manager, nothing durable was saved up to the step of before."""
    with two_tiers(tmp_path) as manager:
        assert [step for step in range(10, 90, 10) if manager.save(step, state_at(step, 0, 1))] == [20, 40, 60, 80]
        assert [step for step in range(30, 70, 10) if manager.save(step, state_at(step, 0, 1))] == [40, 60]
    shutil.rmtree(tmp_path / "local")
    assert two_tiers(tmp_path).latest() == 60


def test_a_durable_save_that_failed_is_due_again(tmp_path: Path) -> None:
    """Symptom: it counted as saved, so that nothing durable was saved for many steps."""
    with two_tiers(tmp_path) as manager:
        is_of_data = lambda name, key: name == "write" and "/durable/" in key and key.endswith(".distcp")
        with Calls(failing(1, is_of_data, errno.ENOSPC)):
            assert manager.save(20, state_at(20, 0, 1))
            with pytest.raises(CheckpointFailedError):
                manager.wait()
        assert manager.save(30, state_at(30, 0, 1))
    assert committed_steps(tmp_path / "durable") == [30]


def test_a_crash_before_the_durable_tier_knows_a_local_rollback(tmp_path: Path, monkeypatch: Any) -> None:
    saved(tmp_path / "durable", 80, 120)
    manager = two_tiers(tmp_path)
    monkeypatch.setattr(manager._durable.series, "finish", lambda *a: (_ for _ in ()).throw(OSError(5, "gone")))
    manager.save(90, state_at(90, 0, 1))
    with pytest.raises(CheckpointFailedError, match="it is in the local tier"):
        manager.close()
    assert two_tiers(tmp_path).latest() == 90
    shutil.rmtree(tmp_path / "local")
    assert two_tiers(tmp_path).latest() == 120


def test_a_step_that_was_saved_again_is_not_replaced_once_more(tmp_path: Path, monkeypatch: Any) -> None:
    """Symptom: after a crash between its commit and the record of it, the good step was saved again without a word."""
    saved(tmp_path, 100, 110)
    with CheckpointManager(tmp_path, keep=9, in_background=False) as manager:
        manager.load(empty(), step=100)
        manager.save(105, state_at(105, 0, 1))
        monkeypatch.setattr(manager.series, "finish", lambda *_: (_ for _ in ()).throw(OSError(5, "killed")))
        manager.save(110, state_at(111, 0, 1))
    with CheckpointManager(tmp_path, keep=9, in_background=False) as manager:
        assert_is_step(manager.load(empty()).state, 111, 0, 1)
        with pytest.raises(CheckpointExistsError):
            manager.save(110, state_at(110, 0, 1))


def test_a_reader_sees_that_steps_were_saved_again(place: Any) -> None:
    """Symptom: it went on with the metrics, and the damage, of what had been there."""
    rule = KeepBest(1, "min")
    with CheckpointManager(place, keep=9, keep_best=rule, in_background=False) as trainer:
        for step, metric in ((100, 0.8), (110, 0.5)):
            trainer.save(step, state_at(step, 0, 1), metric=metric)
        reader = CheckpointManager(place, keep=9, keep_best=rule)
        assert reader.best() == 110
        trainer.load(empty(), step=100)
        trainer.save(110, state_at(110, 0, 1), metric=0.9)
        assert trainer.best() == reader.best() == 100


def test_a_reader_loads_a_damaged_step_that_was_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / step_name(2))
    reader = CheckpointManager(tmp_path)
    for manager in (reader, CheckpointManager(tmp_path, in_background=False)):
        with pytest.warns(UserWarning, match="is damaged and is skipped"):
            manager.load(empty())
    assert reader.latest() == 1
    manager.save(2, state_at(3, 0, 1))
    assert (reader.latest(), reader.steps()) == (2, [1, 2])
    assert_is_step(reader.load(empty()).state, 3, 0, 1)


@pytest.mark.needs_extra
def test_a_listing_that_fails_after_a_load_fails_on_all_ranks() -> None:
    """Symptom: rank 0 raised alone, and the others waited for it in their next exchange."""
    pytest.importorskip("obstore")
    place = saved(f"memory://{uuid.uuid4().hex}/run", 1)

    opened: list[CheckpointManager] = []

    def reload(ranks: Any) -> None:
        manager = CheckpointManager(place, process_group=ranks)
        ranks.gather_objects(opened.append(manager))
        manager.load({}, step=1)

    with Calls(failing(9, lambda name, _: name == "folders" and len(opened) == 2)):
        assert isinstance(error_on_all(2, reload), CheckpointFailedError)


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


def names_in(place: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in place.iterdir() if path.name.startswith("step-"))


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


def test_two_trainers_of_one_series_are_refused(place: Any) -> None:
    saved(place, 10)
    first = CheckpointManager(place, in_background=False)
    second = CheckpointManager(place, in_background=False)
    for manager in (first, second):
        manager.load(empty())
    first.save(20, state_at(20, 0, 1))
    for step in (20, 30):
        with pytest.raises(CheckpointExistsError, match=r"step 20 .* another trainer"):
            second.save(step, state_at(step, 0, 1))
    first.save(30, state_at(30, 0, 1))
    taken_over = CheckpointManager(place, in_background=False)
    taken_over.load(empty())
    taken_over.save(40, state_at(40, 0, 1))
    with pytest.raises(CheckpointExistsError, match=r"step 40 .* another trainer"):
        first.save(40, state_at(40, 0, 1))
    assert taken_over.latest() == 40


@contextlib.contextmanager
def until_it_is_waited_for(*, fails: bool = False) -> Iterator[None]:
    """Saves in the background make their first call when somebody waits for them."""
    waited = threading.Event()
    wait = AsyncSaver.wait

    def note_and_wait(saver: AsyncSaver) -> None:
        if saver._last is not None:
            waited.set()
        wait(saver)

    def stop(name: str, key: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            waited.wait()
        if fails and ".distcp" in key:
            error(errno.ENOSPC)

    with pytest.MonkeyPatch.context() as patched, Calls(stop):
        patched.setattr(AsyncSaver, "wait", note_and_wait)
        try:
            yield
        finally:
            waited.set()


QUESTIONS: dict[str, Callable[[Any], Any]] = {  # to a manager beside its own save, whose answer is its step
    "latest": lambda manager: manager.latest(),
    "load": lambda manager: manager.load(empty()).state["step"],
    "load by number": lambda manager: manager.load(empty(), step=20).state["step"],
    "steps": lambda manager: manager.steps()[-1],
    "tiers: latest": lambda tiers: tiers.latest(),
    "tiers: load": lambda tiers: tiers.load(empty()).state["step"],
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_manager_waits_for_its_own_save(tmp_path: Path, question: str, fails: bool) -> None:
    """It loaded the step before, and its next save failed, as if another trainer had saved."""
    saved(tmp_path / "durable", 10)
    manager = two_tiers(tmp_path) if "tiers" in question else CheckpointManager(tmp_path / "durable", keep=9)
    manager.load(empty())
    with until_it_is_waited_for(fails=fails):
        manager.save(20, state_at(20, 0, 1))
        if fails:
            with pytest.raises(CheckpointFailedError, match="No space left"):
                QUESTIONS[question](manager)
        else:
            assert QUESTIONS[question](manager) == 20
    with contextlib.suppress(CheckpointFailedError):  # of the other tier
        manager.wait()
    manager.save(40, state_at(40, 0, 1))
    manager.close()
    assert CheckpointManager(tmp_path / "durable").latest() == 40


def test_a_refused_save_is_told_by_the_call_that_begins_it(place: Any) -> None:
    saved(place, 10)
    manager = CheckpointManager(place)
    saved(place, 20)
    with pytest.raises(CheckpointExistsError, match=r"step 20 .* another trainer"):
        manager.save(30, state_at(30, 0, 1))
    manager.close()
    with CheckpointManager(place) as manager, pytest.raises(CheckpointExistsError, match="never overwritten"):
        manager.save(20, state_at(20, 0, 1))
    target = place / "x" if isinstance(place, Path) else f"{place}/x"
    save(state_at(1, 0, 1), target)
    saver = AsyncSaver()
    for begin in (saver.save, async_save):
        with pytest.raises(CheckpointExistsError, match="never overwritten"):
            begin(state_at(1, 0, 1), target)
    saver.close()


def test_tiers_tell_a_refused_save_by_the_call_that_begins_it(tmp_path: Path) -> None:
    saved(tmp_path / "durable", 10)
    with two_tiers(tmp_path) as tiers:
        saved(tmp_path / "durable", 20)
        with pytest.raises(CheckpointExistsError, match=r"step 20 .* another trainer"):
            tiers.save(40, state_at(40, 0, 1))
    assert list((tmp_path / "local").rglob("manifest.bin")) == []


def test_a_save_under_way_at_opening_belongs_to_another_trainer(place: Any) -> None:
    """In a bucket, the folder of the uncommitted step was taken for a step that this manager knew."""
    saved(place, 10)
    opened: list[CheckpointManager] = []

    def open_another(name: str, key: str) -> None:
        if not opened and name in ("upload", "fsync"):
            opened.append(CheckpointManager(place, in_background=False))

    with Calls(after=open_another):
        saved(place, 20)
    with pytest.raises(CheckpointExistsError, match=r"step 20 .* another trainer"):
        opened[0].save(15, state_at(15, 0, 1))


def test_a_step_stays_whose_save_is_overtaken_by_another_trainer(place: Any) -> None:
    """Its save deletes what need not be kept after the other one has committed a later step."""

    def overtake(name: str, key: str) -> None:
        if not overtaken and name in ("upload", "fsync"):
            overtaken.append(20)
            saved(place, *overtaken)

    overtaken: list[int] = []
    with CheckpointManager(place, keep=1, in_background=False) as manager, Calls(after=overtake):
        manager.save(10, state_at(10, 0, 1))
    assert overtaken
    assert committed_steps(place) == [10, 20]


def test_a_step_saved_again_by_another_trainer_is_not_replaced(place: Any) -> None:
    saved(place, 100, 120)
    one, two = (CheckpointManager(place, in_background=False) for _ in range(2))
    for manager in (one, two):
        manager.load(empty(), step=100)
    one.save(120, state_at(121, 0, 1))
    for step in (120, 140):
        with pytest.raises(CheckpointExistsError, match=r"step 120 .* saved by another trainer"):
            two.save(step, state_at(step, 0, 1))
    assert_is_step(CheckpointManager(place).load(empty()).state, 121, 0, 1)
    one.save(140, state_at(140, 0, 1))


def test_a_trainer_whose_steps_were_abandoned_is_refused(place: Any) -> None:
    """Its next steps outnumbered those of the run that went back, which were deleted."""
    one, two = (CheckpointManager(place, in_background=False) for _ in range(2))
    for step in (100, 110, 120):
        one.save(step, state_at(step, 0, 1))
    two.load(empty(), step=100)
    two.save(110, state_at(111, 0, 1))
    with pytest.raises(CheckpointExistsError, match=r"step 120 .* or abandoned by it"):
        one.save(130, state_at(130, 0, 1))
    two.save(140, state_at(140, 0, 1))
    assert CheckpointManager(place).steps() == [100, 110, 140]
    two.load(empty(), step=110)  # its own way back
    two.save(130, state_at(130, 0, 1))
    two.save(150, state_at(150, 0, 1))
    assert CheckpointManager(place).latest() == 150


def test_steps_left_by_another_run_are_abandoned_with_a_warning(place: Any) -> None:
    saved(place, 500, 1000)
    with CheckpointManager(place, in_background=False) as manager:
        with pytest.warns(UserWarning, match=r"has later steps, up to 1000, and this manager has loaded none"):
            manager.save(70, state_at(70, 0, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(80, state_at(80, 0, 1))
            manager.load(empty(), step=70)
            manager.save(75, state_at(75, 0, 1))


def test_an_interrupted_replacing_commit_keeps_the_old_step(tmp_path: Path) -> None:
    saved(tmp_path, 100, 120)
    with CheckpointManager(tmp_path, in_background=False) as manager:
        manager.load(empty(), step=100)

        def stop(name: str, key: str) -> None:
            if name == "rename" and calls.names.count("rename") == 2:  # the first one moves the old step away
                raise KeyboardInterrupt

        with Calls(stop) as calls, pytest.raises(KeyboardInterrupt):
            manager.save(120, state_at(121, 0, 1))
    assert names_in(tmp_path) == [100, 120]
    assert_is_step(CheckpointManager(tmp_path).load(empty()).state, 120, 0, 1)


def test_one_of_two_saves_of_a_step_is_committed_the_other_gone(place: Any) -> None:
    target = place / "x" if isinstance(place, Path) else f"{place}/x"
    raced = list[str]()

    def race(name: str, key: str) -> None:
        if not raced and name == ("rename" if isinstance(place, Path) else "create"):
            raced.append(key)
            save(state_at(5, 0, 1), target)

    with Calls(race), pytest.raises(CheckpointExistsError, match="never overwritten"):
        save(state_at(1, 0, 1), target)
    assert_is_step(load(empty(), target).state, 5, 0, 1)
    if isinstance(place, Path):
        assert [path.name for path in place.iterdir()] == ["x"]
    else:  # the files of one save, and its commit
        assert len({name.partition("/")[0] for name in objects_in(ObjectPath.at(target))}) == 2


def test_a_failing_close_does_not_replace_trainings_exception(tmp_path: Path) -> None:
    broken = Calls(lambda name, key: error(errno.EIO))
    with broken, pytest.raises(ZeroDivisionError) as caught, CheckpointManager(tmp_path) as manager:
        manager.save(1, state_at(1, 0, 1 // 0 if manager.save(1, state_at(1, 0, 1)) else 1))
    assert "closing CheckpointManager failed: CheckpointStorageError" in caught.value.__notes__[0]
    with broken, pytest.raises(OSError, match="Input/output"), CheckpointManager(tmp_path) as manager:
        manager.save(1, state_at(1, 0, 1))


@pytest.mark.needs_extra
def test_requests_of_a_save_do_not_grow_with_kept_steps_or_files(tmp_path: Path) -> None:
    """Retention goes by step numbers: at 4,096 files and three kept steps, 16,000 requests a save were made before."""
    pytest.importorskip("obstore")
    requests = []
    for kept, files in ((2, 1), (20, 1), (2, 200)):
        place = ObjectPath.at(f"memory://{tmp_path.name}-{kept}-{files}/run")
        with CheckpointManager(place, keep=kept, in_background=False) as manager:
            for step in range(1, kept + 3):
                manager.save(step, state_at(step, 0, 1))
                folder = read_index(place / step_name(step)).path
                for number in range(files - 1):
                    put(folder / f"__{number + 1}_0.distcp", b"another rank's file")
            with Calls() as calls:
                manager.save(kept + 3, state_at(kept + 3, 0, 1))
                assert manager.latest() == kept + 3
        requests.append(sorted(calls.names))
        # The commit first: a crash in between would else leave a step that claims to be complete and is not.
        deleted = [key for name, keys in calls.made if name == "delete" for key in keys.split(",")]
        of_oldest = [key.rpartition("/")[2] for key in deleted if f"/{step_name(3)}/" in key]
        assert of_oldest[:2] == ["commit.json", "manifest.bin"]
        assert len(of_oldest) > 3
    assert requests[0] == requests[1] == requests[2]
    assert len(requests[0]) < 40


def test_steps_are_any_integers_and_numbers_to_keep_positive(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest() is None
        for step in (np.int64(5), torch.tensor(6), 7):
            manager.save(step, state_at(5, 0, 1))
        for wrong in (-1, 2.5, "7", None):
            with pytest.raises(ValueError, match=r"step=.* must"):
                manager.save(wrong, {})  # type: ignore[arg-type]
    assert committed_steps(tmp_path) == [5, 6, 7]
    for options in ({"keep": 0}, {"keep_every": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            CheckpointManager(tmp_path, **options)
