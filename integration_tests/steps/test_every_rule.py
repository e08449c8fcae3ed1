"""Every elementwise rule, the one of the page on own rules, and `slow_tiger`, under the factory: sharded over ranks
as on one, and resumed on others. Real processes over gloo."""

import copy
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from parity import roles_over, sharded_state
from processes import run_processes
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_kernels.formulas import FORMULAS, Formula
from opt_stack import Optimizer, Registry, get_optimizer

BEFORE, AFTER = 3, 5  # steps until the save, and in all
SHAPES = {"weight": (64, 40), "bias": (40,), "odd": (301,)}


Weights = dict[str, Tensor]
PAGE = Path(__file__).parents[2] / "docs" / "own_rules.md"
SLOW_TIGER = Path(__file__).parents[1] / "support" / "slow_tiger.py"  # three states and a branch on the step
OPTIONS = {
    "ademamix": {"alpha": 8.0, "beta3_steps": 4},
    "schedule_free": {"warmup_steps": 2},
    "soft_step": {"softness": 0.25},
    "slow_tiger": {"nesterov": False, "period": 2},
}


class Case(NamedTuple):
    """A rule in numbers."""

    rule: str
    narrow: bool  # bfloat16 parameters with remainders, and 8-bit states
    file: str = ""  # that defines the formula `RULE`; empty: one of ours

    def formula(self) -> Formula:
        if not self.file:
            return FORMULAS[self.rule]
        names: dict[str, Any] = {"__name__": "their_rule"}
        exec(compile(Path(self.file).read_text(), self.file, "exec"), names)
        found: Formula = names["RULE"]
        return found


def cases(soft_step: str = "") -> dict[str, Case]:
    rules = {**dict.fromkeys(FORMULAS, ""), "soft_step": soft_step, "slow_tiger": str(SLOW_TIGER)}
    every = [Case(rule, narrow, file) for rule, file in rules.items() for narrow in (False, True)]
    return {f"{case.rule}-{'narrow' if case.narrow else 'wide'}": case for case in every}


def begin(case: Case, *, sharded: bool, comm: Comm | None = None) -> tuple[nn.Module, Optimizer]:
    model, formula = nn.Module(), case.formula()
    for seed, (name, shape) in enumerate(SHAPES.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        model.register_parameter(name, nn.Parameter(values.to(torch.bfloat16 if case.narrow else torch.float32)))
    options = dict(OPTIONS.get(case.rule, {}))
    if case.narrow:
        options |= {f"{state.name}_dtype": "int8" if state.signed else "uint8" for state in formula.states}
    base = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "use_distributed_optimizer": sharded}
    narrow = {"bf16": True, "use_precision_aware_optimizer": True} if case.narrow else {}
    config = OptimizerConfig(optimizer=case.rule, optimizer_options=options, **base, **narrow)
    rules, roles = Registry().with_formula(formula) if case.file else None, comm and roles_over(comm)
    return model, get_optimizer(config, [model], rules=rules, pg_collection=roles)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> Weights:
    """The parameters after these steps. Sums and means of these gradients over three ranks are exact."""
    for step in steps:
        for seed, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + seed))
            param.grad = grad.to(torch.bfloat16).to(param.dtype)
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def run(cases: dict[str, Case], saved: str, load_from: str = "", *, sharded: bool = True) -> dict[str, Weights]:
    """Begin, or resume; save into `saved`, if it is given; and return the final weights."""
    found = {}
    for name, case in cases.items():
        model, optimizer = begin(case, sharded=sharded)
        if load_from:
            state = load(sharded_state(model, optimizer), f"{load_from}/{name}").state
            optimizer.load_state_dict(state["optimizer"])
        else:
            train(model, optimizer, range(BEFORE))
        if saved:
            save(sharded_state(model, optimizer), f"{saved}/{name}")
        found[name] = train(model, optimizer, range(BEFORE, AFTER))
    return found


def assert_same(found: Weights, expected: Weights) -> None:
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Weights]]:
    """The weights of one process, and then of two ranks, back on one, and on three."""
    folder = tmp_path_factory.mktemp("rules")
    file = folder / "soft_step.py"
    file.write_text(re.findall(r"```python\n(\"\"\"SoftStep.*?)```", PAGE.read_text(), flags=re.DOTALL)[0])
    every, first, second = cases(str(file)), str(folder / "of two"), str(folder / "of one")
    on_one = run(every, "", sharded=False)  # first: ranks that start together would all compile the same sweeps
    two = run_processes(2, run, every, first)
    back_on_one = run(every, second, first, sharded=False)
    return [on_one, *two, back_on_one, *run_processes(3, run, every, "", second)]


@pytest.mark.parametrize("name", cases())
def test_shards_move_as_the_whole_and_a_checkpoint_of_two_ranks_goes_on_with_one_and_then_with_three(
    name: str, runs: list[dict[str, Weights]]
) -> None:
    for found in runs[1:]:
        assert_same(found[name], runs[0][name])


@pytest.mark.parametrize("narrow", [False, True])
def test_all_ranks_evaluate_the_average_and_go_on_from_the_trained_weights(narrow: bool) -> None:
    """Also a run that resumes from an evaluation, as trainers do."""

    def rank_main(comm: Comm) -> tuple[Weights, Weights]:
        begun = [begin(Case("schedule_free", narrow), sharded=comm.size > 1, comm=comm) for _ in range(2)]
        (model, optimizer), (other, resumed) = begun
        trained = train(model, optimizer, range(BEFORE))
        optimizer.eval()
        shown = train(model, optimizer, range(0))
        assert not any(torch.equal(shown[key], weight) for key, weight in trained.items())
        with pytest.raises(RuntimeError, match="a step in evaluation mode"):
            optimizer.step()
        other.load_state_dict(shown)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        after = []
        for of, one in begun:
            assert_same(dict(of.named_parameters()), shown)
            one.train()
            assert_same(dict(of.named_parameters()), trained)
            after.append(train(of, one, range(BEFORE, AFTER)))
        assert_same(*after)
        return shown, after[0]

    (alone,) = run_threads(1, rank_main)
    for found in run_threads(2, rank_main):
        for weights, want in zip(found, alone, strict=True):
            assert_same(weights, want)
