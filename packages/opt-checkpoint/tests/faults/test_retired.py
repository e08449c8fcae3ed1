"""Readers of a series whose trainer saves the next step, and removes the one that is read, at any call of theirs."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_calls import Calls
from states import assert_is_step, state_at
from tiers import NIGHT, SEED

from opt_checkpoint import (
    CheckpointManager,
    CheckpointNotFoundError,
    TieredCheckpointManager,
    committed_steps,
    load,
    load_optimizer,
    sharded_optimizer,
    verify_checkpoint,
)
from opt_checkpoint.__main__ import main

SAMPLED = 5  # of the calls of a reader
MODEL = torch.nn.Linear(2, 2)


def empty() -> Any:
    return state_at(0, 0, 1, filled=False)


def adam(step: int) -> torch.optim.Adam:
    """An optimizer whose state is the step."""
    optimizer = torch.optim.Adam(MODEL.parameters())
    for param in MODEL.parameters():
        moments = {"exp_avg": torch.full_like(param, float(step)), "exp_avg_sq": torch.full_like(param, float(step))}
        optimizer.state[param] = {"step": torch.tensor(float(step)), **moments}
    return optimizer


def steps_of(optimizer: torch.optim.Adam) -> set[float]:
    states = [state for of_param in optimizer.state.values() for state in of_param.values()]
    return {value for state in states for value in state.flatten().tolist()}


@contextmanager
def trainer_at(
    number: int, place: Any, monkeypatch: pytest.MonkeyPatch, *, in_tiers: bool = False
) -> Iterator[list[str]]:
    """A trainer that keeps one step saves step 2 before the call of this number, counted from 1; yields the calls."""
    trainer: Any = tiers_at(place) if in_tiers else CheckpointManager(place, keep=1)

    def save(step: int) -> None:
        trainer.save(step, state_at(step, 0, 1) | {"optimizer": sharded_optimizer(MODEL, adam(step))})
        trainer.wait()

    save(1)
    made = list[str]()
    busy = list[int]()

    def note(name: str, key: str) -> None:
        if "run" in str(key) and not busy:
            made.append(f"{name} {key}")
            if len(made) == number:
                busy.append(number)
                save(2)
                busy.clear()

    def noted(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            note(act.__name__, path)
            return act(path, *arguments, **options)

        return call

    with monkeypatch.context() as patched, Calls(note):
        for name in ("open", "stat", "listdir"):
            patched.setattr(os, name, noted(getattr(os, name)))
        yield made


def load_newest(place: Any) -> int:
    state = CheckpointManager(place).load(empty()).state
    assert_is_step(state, state["step"], 0, 1)
    return int(state["step"])


def load_newest_unverified(place: Any) -> int:
    state = CheckpointManager(place).load(empty(), verify="none").state
    assert_is_step(state, state["step"], 0, 1)
    return int(state["step"])


def load_newest_optimizer(place: Any) -> int:
    optimizer = torch.optim.Adam(MODEL.parameters())
    CheckpointManager(place).load_optimizer(MODEL, optimizer)
    (step,) = steps_of(optimizer)
    return int(step)


def load_model_and_optimizer(place: Any) -> int:
    manager = CheckpointManager(place)
    optimizer = torch.optim.Adam(MODEL.parameters())
    step = manager.load(empty()).state["step"]
    manager.load_optimizer(MODEL, optimizer)
    assert steps_of(optimizer) == {step}
    return int(step)


def tiers_at(place: Any) -> TieredCheckpointManager:
    """Tiers of which the local one is in use only on disk."""
    local = f"{place}-local" if isinstance(place, Path) else "/nowhere"
    with pytest.warns(UserWarning, match="are on one node"):
        return TieredCheckpointManager(local, place, durable_every=9)


def load_from_tiers(place: Any) -> int:
    state = tiers_at(place).load(empty()).state
    assert_is_step(state, state["step"], 0, 1)
    return int(state["step"])


def load_optimizer_from_tiers(place: Any) -> int:
    optimizer = torch.optim.Adam(MODEL.parameters())
    tiers_at(place).load_optimizer(MODEL, optimizer)
    (step,) = steps_of(optimizer)
    return int(step)


def find_and_load_from_tiers(place: Any) -> int:
    tiers = tiers_at(place)
    found = tiers.find()
    assert found is not None
    assert_is_step(tiers.load(empty()).state, found.step, 0, 1)
    return found.step


def newest(place: Any) -> int | None:
    return CheckpointManager(place).latest()


def number_of_steps(place: Any) -> int:
    return len(CheckpointManager(place).steps())


def number_of_committed_steps(place: Any) -> int:
    return len(committed_steps(place))


def list_at_the_shell(place: Any) -> int:
    assert main(["ls", str(place)]) == 0
    return 1


def load_by_number(place: Any) -> int:
    state = CheckpointManager(place).load(empty(), step=1).state
    assert_is_step(state, 1, 0, 1)
    return 1


def load_by_path(place: Any) -> int:
    assert_is_step(load(empty(), f"{place}/step-000000001").state, 1, 0, 1)
    return 1


def load_optimizer_by_path(place: Any) -> int:
    optimizer = torch.optim.Adam(MODEL.parameters())
    load_optimizer(MODEL, optimizer, f"{place}/step-000000001")
    assert steps_of(optimizer) == {1.0}
    return 1


def verify_by_path(place: Any) -> int:
    assert verify_checkpoint(f"{place}/step-000000001") == []
    return 1


CHOOSE = [load_newest, load_newest_unverified, load_newest_optimizer, load_from_tiers, load_optimizer_from_tiers]
CHOOSE += [list_at_the_shell, newest, number_of_steps, number_of_committed_steps]
NAMED = [load_by_number, load_by_path, load_optimizer_by_path, verify_by_path, load_model_and_optimizer]
NAMED += [find_and_load_from_tiers]
TIERS = [load_from_tiers, load_optimizer_from_tiers, find_and_load_from_tiers]


@pytest.fixture(params=["disk", pytest.param("memory", marks=pytest.mark.needs_extra)])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Any]:
    """A new place for each number."""
    if request.param == "disk":
        return lambda number: tmp_path / str(number) / "run"
    pytest.importorskip("obstore")
    return lambda number: f"memory://{tmp_path.name}-{number}/run"


def answers(read: Callable[[Any], int | None], places: Callable[[int], Any], trainer: Callable[..., Any]) -> set[Any]:
    """What a reader is told, if the trainer saves before any of its calls; by default, before some of them."""
    found = set[Any]()
    numbers = [0]
    for number in numbers:
        with trainer(number, places(number)) as calls:
            try:
                found.add(read(places(number)))
            except CheckpointNotFoundError as gone:
                found.add("removed" if "removed while" in str(gone) else str(gone).replace(str(places(number)), ""))
        if number == 0:
            every = range(1, len(calls) + 1)
            numbers += every if NIGHT else random.Random(SEED).sample(every, min(len(every), SAMPLED))
    assert len(numbers) > 2
    return found


@pytest.mark.parametrize("read", [*CHOOSE, *NAMED], ids=lambda read: read.__name__)
def test_a_step_that_is_removed_while_it_is_read_is_not_damaged(
    places: Callable[[int], Any],
    read: Callable[[Any], int | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """18 of 40 loads beside a trainer with `keep=1` raised an error of a damaged or missing checkpoint."""
    found = answers(read, places, partial(trainer_at, monkeypatch=monkeypatch))
    assert found <= {1, 2} or read in NAMED
    told = found - {1, 2, "removed"}
    assert all("step-000000001 does not exist" in text or "000001 is not a dist" in text for text in told), told
    assert "does not count" not in caplog.text
    assert "damaged" not in caplog.text + capsys.readouterr().out


@pytest.mark.parametrize("read", TIERS, ids=lambda read: read.__name__)
def test_a_local_step_that_is_removed_while_it_is_read(
    tmp_path: Path,
    read: Callable[[Any], int | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    places = lambda number: tmp_path / str(number) / "run"
    found = answers(read, places, partial(trainer_at, monkeypatch=monkeypatch, in_tiers=True))
    assert found <= {1, 2} | ({"removed"} if read in NAMED else set())
    assert "damaged" not in caplog.text
