"""The fuzz itself: the oracle is independent of the project, seeds give the same cases, planted faults are noticed."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fuzz import cases, drawing, gradients, mistakes, oracle
from fuzz.drawing import draw
from fuzz.running import check_seed
from opt_distributed.buffers import SyncedBuffer
from opt_distributed.buffers.param_sync import ParamSync
from opt_distributed.comm.threads import ThreadComm
from opt_distributed.pieces import Main
from opt_distributed.step import Stepper
from opt_distributed.step.scaler import DynamicScaler

SEEDS = range(40)


def imported(module: Any) -> set[str]:
    """Top-level names of the packages that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module if node.module.startswith("fuzz") else node.module.split(".")[0])
    return found


def test_the_oracle_imports_nothing_of_the_project() -> None:
    assert imported(oracle) <= {"dataclasses", "math", "torch", "typing", "fuzz.cases", "fuzz.gradients"}
    assert imported(gradients) <= {"torch", "zlib", "fuzz.cases"}
    assert imported(cases) <= {"collections", "dataclasses", "math", "torch", "types", "typing"}
    assert imported(mistakes) <= {"collections", "dataclasses", "random", "torch", "typing", "fuzz.cases"}
    assert imported(drawing) <= {
        "collections",
        "dataclasses",
        "math",
        "random",
        "typing",
        "fuzz.cases",
        "fuzz.mistakes",
    }


def test_a_seed_draws_the_same_case_again() -> None:
    assert [repr(draw(seed)) for seed in SEEDS] == [repr(draw(seed)) for seed in SEEDS]  # NaN is not equal to itself


def test_a_report_names_the_case_and_the_command_that_runs_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stepper, "step_with_ready_grads", lambda self, groups: True)
    found = next(filter(None, map(check_seed, SEEDS)))
    seed = found.split()[1].rstrip(":")
    assert found.endswith(f"again: pytest integration_tests/fuzz --fuzz-seed {seed}")
    assert check_seed(int(seed)) == found


# --- planted faults ---------------------------------------------------------------------------------------------------


def loses_a_rank(comm: ThreadComm, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Any:
    """A reduction that forgets the last rank."""
    if comm.rank == comm.size - 1:
        full = full * 0
    return REDUCE_SCATTER(comm, shard, full, async_op=async_op)


def counts_no_experts(plan: Any, *args: Any, **kwargs: Any) -> bool:
    """Norms and zeros without the experts."""
    return not plan.is_expert and COUNTED(plan, *args, **kwargs)


REDUCE_SCATTER = ThreadComm.reduce_scatter_
COUNTED: Callable[..., bool]


def planted(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Breaks the project."""
    global COUNTED
    match fault:
        case "a reduction that forgets a rank":
            monkeypatch.setattr(ThreadComm, "reduce_scatter_", loses_a_rank)
        case "norms and zeros without experts":
            from opt_stack.building import build

            COUNTED = build._counted
            monkeypatch.setattr(build, "_counted", counts_no_experts)
        case "parameters that nobody waits for":
            monkeypatch.setattr(ParamSync, "wait_for", lambda self, ids: None)
        case "a loss scale that never changes":
            monkeypatch.setattr(DynamicScaler, "update", lambda self, found_inf, *, unless=None: None)
        case "mains that are not restored":
            monkeypatch.setattr(Main, "set_", lambda self, value: None)
        case "parameters that are not gathered":
            monkeypatch.setattr(SyncedBuffer, "publish_", lambda self: None)


@pytest.mark.parametrize(
    "fault",
    [
        "a reduction that forgets a rank",
        "norms and zeros without experts",
        "parameters that nobody waits for",
        "a loss scale that never changes",
        "mains that are not restored",
        "parameters that are not gathered",
    ],
)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads = [seed for seed in range(120) if not draw(seed).setup.processes]
    planted(monkeypatch, fault)
    assert any(check_seed(seed) for seed in in_threads)
