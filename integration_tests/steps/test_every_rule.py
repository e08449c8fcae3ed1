"""Every elementwise rule, the one of the README of opt-kernels, and `slow_tiger`, under the factory: sharded over ranks
as on one, and resumed on others. Real processes over gloo."""

import re
from pathlib import Path
from typing import NamedTuple

import every_rule_ranks as ranks
import pytest
import torch
from processes import Job, run_jobs
from torch import Tensor

from opt_kernels.formulas.registry import FORMULAS
from opt_kernels.optim import drop_in

README = Path(__file__).parents[2] / "packages/opt-kernels/README.md"
(SOURCE,) = re.findall(r"```py\n(# soft_step\.py.*?)```", README.read_text(), flags=re.DOTALL)
OPTIONS = {"ademamix": {"alpha": 8.0, "beta3_steps": 4}, "schedule_free": {"warmup_steps": 2}}
THEIRS = {"softness": 0.25}
SLOW_TIGER = Path(__file__).parents[1] / "support" / "slow_tiger.py"  # three states and a branch on the step

Weights = dict[str, Tensor]


class Runs(NamedTuple):
    """The weights after all steps, by case."""

    on_one: dict[str, Weights]
    on_two: list[dict[str, Weights]]  # by rank
    back_on_one: dict[str, Weights]
    on_three: list[dict[str, Weights]]
    refusals: list[str]
    evaluated: list[dict[str, ranks.Evaluated]]


def cases(file: str) -> dict[str, ranks.Case]:
    rules = {name: (OPTIONS.get(name, {}), "") for name in FORMULAS}
    rules |= {"soft_step": (THEIRS, file), "slow_tiger": ({"nesterov": False, "period": 2}, str(SLOW_TIGER))}
    return {
        f"{name}-{'narrow' if narrow else 'wide'}": ranks.Case(name, narrow, options, path)
        for name, (options, path) in rules.items()
        for narrow in (False, True)
    }


NAMES = [*cases("")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("rules")
    file = folder / "soft_step.py"
    file.write_text(SOURCE)
    every = cases(str(file))
    wrong = ranks.Case("soft_step", False, {"softnes": 0.25}, str(file))
    saved, again = str(folder / "of two"), str(folder / "of one")
    averaged = {name: case for name, case in every.items() if case.formula().evaluation is not None}
    jobs = {
        "save": Job(ranks.run_and_save, (every, saved)),
        "wrong": Job(ranks.refused, (wrong,)),
        "evaluate": Job(ranks.evaluate, (averaged,)),
    }
    on_one = {}  # first: ranks that start together would all compile the same sweeps
    for name, case in every.items():
        model, optimizer = ranks.begin(case, sharded=False)
        on_one[name] = ranks.train(model, optimizer, range(ranks.AFTER))
    two = run_jobs(2, jobs)
    back_on_one = ranks.resume(every, saved, again, sharded=False)
    three = run_jobs(3, {"resume": Job(ranks.resume, (every, again, ""))})
    return Runs(
        on_one,
        two["save"],
        back_on_one,
        three["resume"],
        two["wrong"],
        [*two["evaluate"], ranks.evaluate(averaged, sharded=False)],
    )


def assert_same(found: Weights, expected: Weights) -> None:
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("name", NAMES)
def test_shards_move_as_the_whole(name: str, runs: Runs) -> None:
    for of_rank in runs.on_two:
        assert_same(of_rank[name], runs.on_one[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_then_with_three(name: str, runs: Runs) -> None:
    assert_same(runs.back_on_one[name], runs.on_one[name])
    for of_rank in runs.on_three:
        assert_same(of_rank[name], runs.on_one[name])


def test_a_misspelt_number_of_the_readmes_rule_is_refused_by_name_on_every_rank(runs: Runs) -> None:
    message = "optimizer_options has 'softnes'=0.25, which optimizer='soft_step' does not read"
    assert all(message in refusal and "Did you mean softness" in refusal for refusal in runs.refusals)
    assert len(runs.refusals) == 2


@pytest.mark.parametrize("name", ["schedule_free-wide", "schedule_free-narrow"])
def test_all_ranks_evaluate_the_average_and_go_on_from_the_trained_weights(name: str, runs: Runs) -> None:
    *of_ranks, alone = (found[name] for found in runs.evaluated)
    for evaluated in (*of_ranks, alone):
        assert_same(evaluated.shown, alone.shown)
        assert not any(torch.equal(evaluated.shown[key], weight) for key, weight in evaluated.trained.items())
        assert_same(evaluated.after, runs.on_one[name])
        assert_same(evaluated.resumed, evaluated.after)
        assert len(evaluated.refusals) == 3


def test_the_drop_in_of_the_readmes_rule_moves_as_its_formula_says(tmp_path: Path) -> None:
    file = tmp_path / "soft_step.py"
    file.write_text(SOURCE)
    formula = ranks.Case("soft_step", False, {}, str(file)).formula()
    param = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    p = param.detach().double()
    optimizer = drop_in(formula)([param], lr=0.1, weight_decay=0.5, softness=0.25)
    trace = peak = torch.zeros(9, dtype=torch.float64)
    for step in range(1, 4):
        g = torch.linspace(2, -1, 9).double() * step
        param.grad = g.float()
        optimizer.step()
        trace = 0.9 * trace + 0.1 * g
        peak = torch.maximum(0.99 * peak, g.abs())
        p = p - 0.1 * 0.5 * p - 0.1 * trace / (peak + 0.25)
    torch.testing.assert_close(param.detach().double(), p, rtol=1e-6, atol=1e-6)
