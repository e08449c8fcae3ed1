"""Runs that go back to an older step: in a directory, a bucket, and two tiers."""

import contextlib
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from failing_calls import Calls, error, failing
from series import SUPERSEDED, empty, saved, step_name, two_tiers
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointingException,
    CheckpointManager,
    committed_steps,
    verify_checkpoint,
)


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
