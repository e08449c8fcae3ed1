"""The bench of damage: `why` names what was done to a run in its first sentence, and is silent about healthy runs."""

import re
from pathlib import Path

import pytest
from damage_models import begin, train
from damaged_runs import HEALTHY, HELD_OUT, LAST, OTHERS, REVIEWED, Run

from opt_stack import StepStats, why
from opt_stack.diagnosis import History, find

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SEEDS = 5
NUM_STEPS = 200


def first_sentence(folder: Path) -> str:
    """The first sentence of `why`, or nothing. It says at most three."""
    sentences = [
        line for line in str(why(folder)).replace("\n  ", " ").splitlines() if re.match("First: |Then: ", line)
    ]
    assert len(sentences) <= 3
    return sentences[0] if sentences else ""


def is_named(run: Run, sentence: str) -> bool:
    """Whether the step, within two records, and the cause are in a sentence."""
    steps = [int(step) for step in re.findall(r"step (\d+)", sentence)]
    return any(abs(step - run.at) <= 2 for step in steps[:2]) and re.search(run.named, sentence) is not None


def judged(runs: dict[str, Run], folder: Path) -> tuple[list[str], list[str]]:
    """The runs that are not named, and those of them about which something else is said."""
    missed = []
    wrong = []
    for name, run in runs.items():
        run.record(folder / name, 1)
        sentence = first_sentence(folder / name)
        if not is_named(run, sentence):
            missed.append(name)
            wrong += [f"{name}: {sentence}"] * bool(sentence)
    return missed, wrong


QUICK = ("token embedding drawn again", "labels shifted", "loss summed", "decay x 1000 on norms")


@pytest.mark.parametrize("name", QUICK)
def test_why_names_the_damage_first(name: str, tmp_path: Path) -> None:
    REVIEWED[name].record(tmp_path, 1)
    sentence = first_sentence(tmp_path)
    assert is_named(REVIEWED[name], sentence), sentence


@pytest.mark.nightly
def test_nearly_all_damage_is_named(tmp_path: Path) -> None:
    missed, wrong = judged({**REVIEWED, **OTHERS}, tmp_path)
    assert len(missed) <= 4, missed
    assert len(wrong) <= 2, wrong


@pytest.mark.nightly
def test_two_of_three_unseen_damages_are_named(tmp_path: Path) -> None:
    missed, wrong = judged(HELD_OUT, tmp_path)
    assert len(missed) <= len(HELD_OUT) / 3, missed
    assert len(wrong) <= 3, wrong


def records_of(name: str, seed: int, num_steps: int) -> tuple[list[StepStats], StepStats | None]:
    """The records of a healthy run, and the first after a resume."""
    records: list[StepStats] = []
    trial = begin(None, seed=seed, **HEALTHY[name])
    trial.optimizer.stats_every(1, records.append)
    if name != "a resume":
        train(trial, num_steps)
        return records, None
    middle = num_steps // 2 + 10
    train(trial, middle)
    again = begin(None, seed=seed, **HEALTHY[name])
    again.model.load_state_dict(trial.model.state_dict())
    again.optimizer.load_state_dict(trial.optimizer.state_dict())
    again.optimizer.stats_every(1, records.append)
    again.step = middle
    train(again, num_steps)
    assert [stats.step for stats in records] == [*range(1, num_steps + 1)]
    return records, records[middle]


def test_why_is_silent_about_a_healthy_resumed_run() -> None:
    records, resumed = records_of("a resume", 0, LAST)
    assert find(History(records, resumed)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("every", [1, 10])
def test_why_is_silent_about_healthy_runs(every: int) -> None:
    alarms = []
    for name in HEALTHY:
        for seed in range(SEEDS):
            records, resumed = records_of(name, seed, NUM_STEPS)
            kept = [stats for stats in records if not stats.success or (stats.step - 1) % every == 0][-100:]
            alarms += [f"{name}, seed {seed}: {finding.text}" for finding in find(History(kept, resumed))[:1]]
    assert len(alarms) <= 1, alarms
