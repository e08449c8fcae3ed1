"""Every elementwise rule, the one of the page on own rules, and `slow_tiger`, under the factory: sharded over ranks
as on one, and resumed on others (real processes over gloo). The matrix rules that the pages on rules declare."""

import copy
import importlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from parity import roles_over, sharded_state
from processes import run_processes
from tiers import NIGHT
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.hooks import CentralizeGradient, CoupledDecay
from opt_stack import Optimizer, Registry, get_optimizer

BEFORE = 3  # steps until the save
AFTER = 5  # steps in all
SHAPES = {"weight": (64, 40), "bias": (40,), "odd": (301,)}


Weights = dict[str, Tensor]
DOCS = Path(__file__).parents[2] / "docs"
OWN_RULES = (DOCS / "own_rules.md").read_text()
RULES = (DOCS / "rules.md").read_text()
SLOW_TIGER = Path(__file__).parents[1] / "testing" / "slow_tiger.py"  # three states and a branch on the step
OPTIONS = {
    "ademamix": {"alpha": 8.0, "beta3_steps": 4},
    "schedule_free": {"warmup_steps": 2},
    "soft_step": {"softness": 0.25},
    "slow_tiger": {"ahead": False, "period": 2},
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
    both = [(Case(rule, False, file), Case(rule, True, file)) for rule, file in rules.items()]
    every = [case for number, cases in enumerate(both) for case in (cases if NIGHT else cases[number % 2 :][:1])]
    return {f"{case.rule}-{'narrow' if case.narrow else 'wide'}": case for case in every}


def begin(case: Case, *, sharded: bool, comm: Comm | None = None, hooks: Any = ()) -> tuple[nn.Module, Optimizer]:
    model = nn.Module()
    formula = case.formula()
    for seed, (name, shape) in enumerate(SHAPES.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        model.register_parameter(name, nn.Parameter(values.to(torch.bfloat16 if case.narrow else torch.float32)))
    options = dict(OPTIONS.get(case.rule, {}))
    if case.narrow:
        options |= {f"{state.name}_dtype": "int8" if state.signed else "uint8" for state in formula.states}
    base = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "use_distributed_optimizer": sharded}
    narrow = {"bf16": True, "use_precision_aware_optimizer": True} if case.narrow else {}
    config = OptimizerConfig(optimizer=case.rule, optimizer_options=options, **base, **narrow)
    rules = Registry().with_formula(formula) if case.file else None
    roles = comm and roles_over(comm)
    return model, get_optimizer(config, [model], rules=rules, pg_collection=roles, hooks=hooks)


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
    file.write_text(re.findall(r"```python\n(\"\"\"SoftStep.*?)```", OWN_RULES, flags=re.DOTALL)[0])
    every = cases(str(file))
    first = str(folder / "of two")
    second = str(folder / "of one")
    on_one = run(every, "", sharded=False)  # first: ranks that start together would all compile the same sweeps
    two = run_processes(2, run, every, first)
    back_on_one = run(every, second, first, sharded=False)
    return [on_one, *two, back_on_one, *run_processes(3, run, every, "", second)]


@pytest.mark.parametrize("name", cases())
def test_shards_train_as_the_whole_and_resume_on_other_ranks(name: str, runs: list[dict[str, Weights]]) -> None:
    for found in runs[1:]:
        assert_same(found[name], runs[0][name])


EVALUATED = [(False, ()), (True, ()), (False, (CoupledDecay(),)), (False, (CentralizeGradient(),))]


@pytest.mark.parametrize(("narrow", "hooks"), EVALUATED, ids=str)
def test_ranks_evaluate_the_average_and_then_train_on(narrow: bool, hooks: Any) -> None:
    """Also a run that resumes from an evaluation, as trainers do. With a hook that is not part of the formula, `eval()`
    did nothing."""

    def rank_main(comm: Comm) -> tuple[Weights, Weights]:
        case = Case("schedule_free", narrow)
        is_sharded = comm.size > 1
        begun = [begin(case, sharded=is_sharded, comm=comm, hooks=hooks) for _ in range(2)]
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
    for found in run_threads(2, rank_main) if not hooks else ():
        for weights, want in zip(found, alone, strict=True):
            assert_same(weights, want)


# --- matrix rules -----------------------------------------------------------------------------------------------------

(ROW_MUON,) = re.findall(r"```python\n(\"\"\"RowMuon.*?)```", OWN_RULES, flags=re.DOTALL)
(FORMULA,) = re.findall(r"```python\n(from dataclasses import dataclass.*?)```", RULES, flags=re.DOTALL)
(ENTRY,) = re.findall(r"```python\n(from opt_stack import RuleEntry.*?\n\)\n)", RULES, flags=re.DOTALL)
LOW_RANK = f"import torch\nfrom opt_kernels import Number\n{FORMULA}\n{ENTRY}"
LR = 0.02
MOMENTUM = 0.9


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The rules of the pages, imported before ranks start: they share the files."""
    monkeypatch.syspath_prepend(tmp_path)
    found = Registry()
    for name, source in (("row_muon", ROW_MUON), ("low_rank", LOW_RANK)):
        (tmp_path / f"{name}_of_the_page.py").write_text(source)
        module = importlib.import_module(f"{name}_of_the_page")
        monkeypatch.delitem(sys.modules, module.__name__)
        found = found.with_rule(getattr(module, name.upper()))
    return found


def made(rules: Registry, model: nn.Module, rule: str, comm: Comm | None = None) -> Optimizer:
    fields = {"lr": LR, "weight_decay": 0.0, "muon_momentum": MOMENTUM, "clip_grad": 0.0}
    fields |= {"use_layer_wise_distributed_optimizer": comm is not None, "muon_fp32_matmul_prec": "highest"}
    roles = roles_over(comm or Alone())
    return get_optimizer(OptimizerConfig(optimizer=rule, **fields), [model], rules=rules, pg_collection=roles)


def models(count: int) -> list[nn.Module]:
    """Equal models, made before ranks start: threads share torch's generator."""
    found = []
    for _ in range(count):
        torch.manual_seed(0)
        found.append(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8), nn.Linear(8, 8)))
    return found


def step(model: nn.Module, optimizer: Optimizer, number: int) -> list[Tensor]:
    """Return the gradients of the matrices."""
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    return [param.grad for param in model.parameters() if param.dim() == 2]


def matrices(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters() if param.dim() == 2]


def test_a_rule_of_sixty_lines_takes_the_steps_of_its_equation(registry: Registry) -> None:
    assert len(ROW_MUON.splitlines()) <= 60
    (model,) = models(1)
    optimizer = made(registry, model, "row_muon")
    wanted = matrices(model)
    momenta = [torch.zeros_like(matrix) for matrix in matrices(model)]
    norms = [matrix.norm() for matrix in wanted]
    for number in range(3):
        for i, grad in enumerate(step(model, optimizer, number)):
            momenta[i] = MOMENTUM * momenta[i] + (1 - MOMENTUM) * grad
            rows = momenta[i] / momenta[i].norm(dim=1, keepdim=True)
            left, _, right = torch.linalg.svd(rows, full_matrices=False)
            moved = wanted[i] - LR * norms[i] * (left @ right) / (left @ right).norm()
            wanted[i] = norms[i] * moved / moved.norm()
    for found, want, norm in zip(matrices(model), wanted, norms, strict=True):
        torch.testing.assert_close(found.norm(), norm)
        # Newton-Schulz moves singular values to between 0.7 and 1.2 of those of the polar factor.
        assert (found - want).norm() < 0.4 * 3 * LR * norm


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("rule", "state"), [("row_muon", "momentum_buffer"), ("low_rank", "right")])
def test_ranks_with_whole_matrices_resume_from_one_process(
    rule: str, state: str, ranks: int, registry: Registry, tmp_path: Path
) -> None:
    alone, *several = models(1 + ranks)
    optimizer = made(registry, alone, rule)
    for number in range(4):
        if number == 2:
            save(sharded_state(alone, optimizer), tmp_path / "saved")
        step(alone, optimizer, number)

    def rank_main(comm: Comm) -> tuple[list[Tensor], int]:
        model = several[comm.rank]
        own = made(registry, model, rule, comm)
        own.load_state_dict(load(sharded_state(model, own), tmp_path / "saved").state["optimizer"])
        for number in range(2, 4):
            step(model, own, number)
        return matrices(model), sum(state in of for of in own.state_dict()["state"].values())

    found = run_threads(ranks, rank_main)
    assert sum(held for _, held in found) == len(matrices(alone))  # each matrix on one rank
    for weights, _ in found:
        torch.testing.assert_close(weights, matrices(alone), rtol=1e-6, atol=1e-7)  # norms are summed in another order


def test_state_of_a_chosen_shape_resumes_and_other_shapes_fail(registry: Registry) -> None:
    first, second = models(2)
    optimizer, other = (made(registry, model, "low_rank") for model in (first, second))
    step(first, optimizer, 0)
    saved = optimizer.state_dict()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(saved)
    step(first, optimizer, 1)
    step(second, other, 1)
    assert all(map(torch.equal, matrices(first), matrices(second)))
    state = next(state for state in saved["state"].values() if "right" in state)
    state["right"] = state["right"].mT.contiguous()
    with pytest.raises(ValueError, match=r"right of '0.weight' has shape \(2, 12\), this rank's piece has \(12, 2\)"):
        other.load_state_dict(saved)
