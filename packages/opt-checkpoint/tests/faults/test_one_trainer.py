"""A series has one trainer: saves of a second one are refused."""

import errno
import warnings
from pathlib import Path
from typing import Any

import pytest
from failing_calls import Calls, error, objects_in
from series import empty, names_in, saved, two_tiers
from states import assert_is_step, state_at

from opt_checkpoint import (
    AsyncSaver,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointManager,
    ObjectPath,
    async_save,
    committed_steps,
    load,
    save,
)


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


def test_a_failed_step_that_another_trainer_saved_is_seen(place: Any) -> None:
    """A step was known from the beginning of its save, whoever committed it then."""
    saved(place, 10)
    manager = CheckpointManager(place, in_background=False)
    no_space = Calls(lambda name, key: error(errno.ENOSPC) if ".distcp" in key else None)
    with no_space, pytest.raises(CheckpointFailedError, match="No space left"):
        manager.save(20, state_at(20, 0, 1))
    saved(place, 20)
    with pytest.raises(CheckpointExistsError, match=r"step 20 .* another trainer"):
        manager.save(30, state_at(30, 0, 1))


@pytest.mark.parametrize("num_calls", range(4))
def test_a_save_that_ends_while_a_tier_checks_is_its_own(place: Any, num_calls: int) -> None:
    """The local tier checks in another thread than that in which a durable save ends."""
    manager = CheckpointManager(place, in_background=False)
    note_saved = manager.trainer.note_saved
    notes: list[tuple[int, str]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manager.trainer, "note_saved", lambda *note: notes.append(note))
        manager.save(20, state_at(20, 0, 1))

    def end(name: str, key: str) -> None:
        if len(calls.made) > num_calls and notes:
            note_saved(*notes.pop())

    with Calls(after=end) as calls:
        manager.trainer.check_alone()
    for note in notes:
        note_saved(*note)
    manager.save(30, state_at(30, 0, 1))


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
