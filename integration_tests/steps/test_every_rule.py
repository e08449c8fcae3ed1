"""Every elementwise rule, the one of the page on own rules, and `slow_tiger`, under the factory: sharded over ranks
as on one, and resumed on others. Real processes over gloo."""

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import Job, run_jobs
from torch import Tensor, nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_kernels.formulas import FORMULAS, Formula
from opt_stack import Optimizer, Registry, get_optimizer

BEFORE, AFTER = 3, 5  # steps until the save, and in all
SHAPES = {"weight": (64, 40), "bias": (40,), "odd": (301,)}


class Case(NamedTuple):
    """A rule in numbers."""

    rule: str
    narrow: bool  # bfloat16 parameters with remainders, and 8-bit states
    options: dict[str, Any]  # `optimizer_options`
    file: str = ""  # that defines the formula `RULE`; empty: one of ours

    def formula(self) -> Formula:
        if not self.file:
            return FORMULAS[self.rule]
        names: dict[str, Any] = {"__name__": "their_rule"}
        exec(compile(Path(self.file).read_text(), self.file, "exec"), names)
        found: Formula = names["RULE"]
        return found


def begin(case: Case, *, sharded: bool) -> tuple[nn.Module, Optimizer]:
    dtype, formula = torch.bfloat16 if case.narrow else torch.float32, case.formula()
    model = nn.Module()
    for seed, (name, shape) in enumerate(SHAPES.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        model.register_parameter(name, nn.Parameter(values.to(dtype)))
    narrow: dict[str, Any] = {}
    options = dict(case.options)
    if case.narrow:
        narrow = {"bf16": True, "use_precision_aware_optimizer": True}
        options |= {f"{state.name}_dtype": "int8" if state.signed else "uint8" for state in formula.states}
    config = OptimizerConfig(
        optimizer=case.rule,
        lr=0.01,
        weight_decay=0.1,
        clip_grad=0.0,
        use_distributed_optimizer=sharded,
        optimizer_options=options,
        **narrow,
    )
    rules = Registry().with_formula(formula) if case.file else None
    return model, get_optimizer(config, [model], rules=rules)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> dict[str, Tensor]:
    """The parameters after these steps. Sums and means of these gradients over three ranks are exact."""
    for step in steps:
        for seed, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + seed))
            param.grad = grad.to(torch.bfloat16).to(param.dtype)
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def run_and_save(cases: dict[str, Case], folder: str) -> dict[str, dict[str, Tensor]]:
    """Save sharded state after some steps; return the final weights."""
    found = {}
    for name, case in cases.items():
        model, optimizer = begin(case, sharded=True)
        train(model, optimizer, range(BEFORE))
        save(state_of(model, optimizer), f"{folder}/{name}")
        found[name] = train(model, optimizer, range(BEFORE, AFTER))
    return found


def resume(cases: dict[str, Case], folder: str, again: str, *, sharded: bool = True) -> dict[str, dict[str, Tensor]]:
    """Resume from `folder`, save the loaded state to `again`, and return the final weights."""
    found = {}
    for name, case in cases.items():
        model, optimizer = begin(case, sharded=sharded)
        loaded = load(state_of(model, optimizer), f"{folder}/{name}").state
        optimizer.load_state_dict(loaded["optimizer"])
        if again:
            save(state_of(model, optimizer), f"{again}/{name}")
        found[name] = train(model, optimizer, range(BEFORE, AFTER))
    return found


class Evaluated(NamedTuple):
    """Weights of a rank before, during and after an evaluation, and of a run that resumes from it, as trainers do."""

    trained: dict[str, Tensor]
    shown: dict[str, Tensor]
    after: dict[str, Tensor]
    resumed: dict[str, Tensor]


def evaluate(cases: dict[str, Case], *, sharded: bool = True) -> dict[str, Evaluated]:
    found = {}
    for name, case in cases.items():
        model, optimizer = begin(case, sharded=sharded)
        trained = train(model, optimizer, range(BEFORE))
        optimizer.eval()
        shown = train(model, optimizer, range(0))
        with pytest.raises(RuntimeError):
            optimizer.step()
        other, resumed = begin(case, sharded=sharded)
        other.load_state_dict(shown)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, of_it in ((optimizer, model), (resumed, other)):
            assert all(torch.equal(param, shown[key]) for key, param in of_it.named_parameters())
            one.train()
            assert all(torch.equal(param, trained[key]) for key, param in of_it.named_parameters())
        after, of_resumed = (train(*of, range(BEFORE, AFTER)) for of in ((model, optimizer), (other, resumed)))
        found[name] = Evaluated(trained, shown, after, of_resumed)
    return found


# --- tests ---

PAGE = Path(__file__).parents[2] / "docs" / "own_rules.md"
(SOURCE,) = re.findall(r"```python\n(\"\"\"SoftStep.*?)```", PAGE.read_text(), flags=re.DOTALL)
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
    evaluated: list[dict[str, Evaluated]]


def cases(file: str) -> dict[str, Case]:
    rules = {name: (OPTIONS.get(name, {}), "") for name in FORMULAS}
    rules |= {"soft_step": (THEIRS, file), "slow_tiger": ({"nesterov": False, "period": 2}, str(SLOW_TIGER))}
    return {
        f"{name}-{'narrow' if narrow else 'wide'}": Case(name, narrow, options, path)
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
    saved, again = str(folder / "of two"), str(folder / "of one")
    averaged = {name: case for name, case in every.items() if case.formula().evaluation is not None}
    jobs = {
        "save": Job(run_and_save, (every, saved)),
        "evaluate": Job(evaluate, (averaged,)),
    }
    on_one = {}  # first: ranks that start together would all compile the same sweeps
    for name, case in every.items():
        model, optimizer = begin(case, sharded=False)
        on_one[name] = train(model, optimizer, range(AFTER))
    two = run_jobs(2, jobs)
    back_on_one = resume(every, saved, again, sharded=False)
    three = run_jobs(3, {"resume": Job(resume, (every, again, ""))})
    return Runs(
        on_one,
        two["save"],
        back_on_one,
        three["resume"],
        [*two["evaluate"], evaluate(averaged, sharded=False)],
    )


def assert_same(found: Weights, expected: Weights) -> None:
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("name", NAMES)
def test_shards_move_as_the_whole_and_a_checkpoint_of_two_ranks_goes_on_with_one_and_then_with_three(
    name: str, runs: Runs
) -> None:
    for found in (*runs.on_two, runs.back_on_one, *runs.on_three):
        assert_same(found[name], runs.on_one[name])


@pytest.mark.parametrize("name", ["schedule_free-wide", "schedule_free-narrow"])
def test_all_ranks_evaluate_the_average_and_go_on_from_the_trained_weights(name: str, runs: Runs) -> None:
    *of_ranks, alone = (found[name] for found in runs.evaluated)
    for evaluated in (*of_ranks, alone):
        assert_same(evaluated.shown, alone.shown)
        assert not any(torch.equal(evaluated.shown[key], weight) for key, weight in evaluated.trained.items())
        assert_same(evaluated.after, runs.on_one[name])
        assert_same(evaluated.resumed, evaluated.after)
