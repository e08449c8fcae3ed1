"""A manager and its series: its own saves, a reader beside a trainer, failures."""

import contextlib
import errno
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_ranks import error_on_all
from failing_calls import Calls, error, failing, put
from series import damage, empty, saved, step_name, two_tiers
from states import assert_is_step, state_at

from opt_checkpoint import (
    AsyncSaver,
    CheckpointFailedError,
    CheckpointManager,
    KeepBest,
    ObjectPath,
    committed_steps,
    read_index,
)


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
