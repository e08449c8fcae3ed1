"""Run cases, and compare every rank's results with the oracle."""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuzz.cases import Case, Mistake, Setup, is_held, kept_as
from fuzz.drawing import draw
from fuzz.gradients import kept_part
from fuzz.oracle import ExpectedStep, Weights, expect, expected_loss, first_weights
from fuzz.rank import Run, SeenStep
from fuzz.ranks import Failed, process_groups, run_processes, run_ranks
from fuzz.saving import load_run, save_run
from opt_distributed.comm import Comm, ProcessGroups, Roles

Groups = Roles | ProcessGroups | None
Part = Callable[[Case, int, Groups, str], list[SeenStep]]


def failures(case: Case) -> list[str]:
    """A description of each failure of the case; empty if it passes."""
    expected = expect(case)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        first = run_part(case, case.setup, first_part, path)
        if case.mistake is not None:
            return _unless_refused(first, case.mistake)
        if case.setup.checks_nan and any(step.overflows for step in expected[: case.resume_at or case.steps]):
            return _unless_all_raise(first)
        if case.resume is None or _failed(first):
            return _failed(first) or list(_differences(case, expected, first, range(case.steps)))
        second = run_part(case, case.resume, second_part, path)
        if case.resume.checks_nan and any(step.overflows for step in expected[case.resume_at :]):
            return _unless_all_raise(second)
    found = list(_differences(case, expected, first, range(case.resume_at)))
    if _failed(second):
        return found + [f"resumed: {line}" for line in _failed(second)]
    return found + list(_differences(case, expected, second, range(case.resume_at, case.steps)))


def _unless_refused(by_rank: Sequence[Any], mistake: Mistake) -> list[str]:
    quiet = [rank for rank, seen in enumerate(by_rank) if not (isinstance(seen, Failed) and seen.is_refusal)]
    if not quiet and any(mistake.words in failed.text for failed in by_rank):
        return []
    return [f"should be refused on every rank, with {mistake.words!r}; not refused on {quiet}", *_failed(by_rank)]


def _unless_all_raise(by_rank: Sequence[Any]) -> list[str]:
    """Failures where every rank should find NaN; ranks that lost another rank may report that instead."""
    kinds = [seen.is_consequence or seen.kind if isinstance(seen, Failed) else "nothing" for seen in by_rank]
    is_right = {*kinds} <= {"UnusableGradientError", True} and "UnusableGradientError" in kinds
    return [] if is_right else [f"should raise on every rank: {_failed(by_rank) or 'none raised'}"]


def _failed(by_rank: Sequence[Any]) -> list[str]:
    """What ranks raised, without those that only lost another rank, where one is to blame."""
    broken = {rank: seen for rank, seen in enumerate(by_rank) if isinstance(seen, Failed)}
    causes = {rank: failed for rank, failed in broken.items() if not failed.is_consequence}
    return [f"rank {rank}: {failed}" for rank, failed in (causes or broken).items()]


def report(case: Case, found: Sequence[str]) -> str:
    """The report for a person: the case, its failures, and the command that runs it again."""
    lines = [str(case), *(f"  {line}" for line in found[:12]), *["  ..."][: len(found) > 12]]
    return "\n".join([*lines, f"again: pytest integration_tests/fuzz --fuzz-seed {case.seed}"])


def check_seed(seed: int) -> str | None:
    found = failures(case := draw(seed))
    return report(case, found) if found else None


def _differences(
    case: Case, expected: Sequence[ExpectedStep], by_rank: Sequence[Sequence[SeenStep]], steps: range
) -> Iterator[str]:
    for index, step in enumerate(steps):
        wanted = expected[step]
        before = expected[step - 1].weights if step else first_weights(case)
        of_step = [seen[index] for seen in by_rank]
        yield from (f"step {step}: {line}" for line in _of_results(wanted, of_step))
        for rank, seen in enumerate(of_step):
            wrong = _of_rank(case, wanted, before, seen, step, rank)
            yield from (f"step {step}, rank {rank}: {line}" for line in wrong)
        yield from (f"step {step}: {line}" for line in _of_copies(case, of_step, step))


def _of_results(wanted: ExpectedStep, seen: Sequence[SeenStep]) -> Iterator[str]:
    """Check a step's result: the same on every rank, and equal to the oracle's."""
    for name in ("success", "norm", "zeros", "scale"):
        values = [getattr(one, name) for one in seen]
        if any(repr(value) != repr(values[0]) for value in values):
            yield f"{name} differs between ranks: {values}"
    first = seen[0]
    if wanted.overflows:
        is_right = {"norm": not math.isfinite(first.norm), "zeros": True}
    else:
        is_close = math.isclose(first.norm, wanted.norm, rel_tol=1e-5, abs_tol=1e-9)
        is_right = {"norm": is_close, "zeros": first.zeros == wanted.zeros}
    is_right |= {name: getattr(first, name) == getattr(wanted, name) for name in ("success", "scale")}
    for name in (name for name, right in is_right.items() if not right):
        yield f"{name} is {getattr(first, name)!r}, should be {getattr(wanted, name)!r}"


def _of_rank(case: Case, wanted: ExpectedStep, before: Weights, seen: SeenStep, step: int, rank: int) -> Iterator[str]:
    setup = case.setup_at(step)
    place = setup.grid.place(rank)
    for name, count in seen.steps.items():
        if count != wanted.steps[name]:
            yield f"{name} has had {count} updates, should be {wanted.steps[name]}"
    if not any(bad.step == step for bad in case.bad):
        loss, tolerance = expected_loss(case, rank, before, step)
        if not abs(seen.loss - loss) <= tolerance:
            yield f"the loss is {seen.loss}, should be {loss}: the forward did not read the present weights"
    for name, value in (seen.weights or {}).items():
        param = case.param(name)
        main, slack = (kept_part(whole, param, place, setup) for whole in wanted.weights[name])
        worst = _worst(value, main, slack)
        if worst:
            yield f"{name} {tuple(value.shape)} {worst}"


def _worst(value: Tensor, main: Tensor, slack: Tensor) -> str:
    """The largest difference of a stored value from the rounded expected value, as text; empty if they are equal."""
    low, high = ((main + sign * slack).to(value.dtype).double() for sign in (-1, 1))
    found = value.double()
    excess = torch.maximum(low - found, found - high)
    wrong = ~(excess <= 0)
    if not wrong.any():
        return ""
    index = int(torch.where(excess.isnan(), torch.inf, excess).flatten().argmax())
    shown = f"[{index}] is {found.flatten()[index].item():.7g}, should be {main.flatten()[index].item():.7g}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements wrong; {shown}"


def _of_copies(case: Case, seen: Sequence[SeenStep], step: int) -> Iterator[str]:
    """Copies of one part of a parameter must have the same bits on all ranks."""
    setup, grid = case.setup_at(step), case.setup_at(step).grid
    for param in case.params:
        copies: dict[int, tuple[int, Tensor]] = {}
        for rank, place in enumerate(grid.places()):
            weights = seen[rank].weights
            if weights is None or not is_held(param, place, grid):
                continue
            first, value = copies.setdefault(kept_as(param, place, setup), (rank, weights[param.name]))
            if not torch.equal(value.nan_to_num(), weights[param.name].nan_to_num()):
                yield f"{param.name} differs between ranks {first} and {rank}, which hold copies"


# --- a case on one rank: before the save, and after the load on another grid ------------------------------------------


def first_part(case: Case, rank: int, groups: Groups, path: str) -> list[SeenStep]:
    """The steps until the save, and the save; all steps of a case without one."""
    run, seen = Run(case, case.setup, rank, groups), []
    until = case.steps if case.resume is None else case.resume_at
    for step in range(until):
        run = run.again() if step == case.reload_at else run
        seen.append(run.step(step, looks=case.looks_each_step or step == until - 1))
    if case.resume is not None:
        run.complete()
        save_run(run, path, _everyone(groups))
    return seen


def second_part(case: Case, rank: int, groups: Groups, path: str) -> list[SeenStep]:
    assert case.resume is not None
    run = Run(case, case.resume, rank, groups, moved=1.0)
    load_run(run, path, _everyone(groups))
    steps = range(case.resume_at, case.steps)
    return [run.step(step, looks=case.looks_each_step or step == steps[-1]) for step in steps]


def run_part(case: Case, setup: Setup, part: Part, path: str) -> list[Any]:
    """The results of every rank of the setup's grid for a part of the case, `Failed` where it raised."""
    if setup.processes:
        return run_processes(setup.grid.size, _on_process, case, setup, part, path)
    patient = case.mistake is not None
    return run_ranks(setup.grid, lambda rank, roles: part(case, rank, roles, path), late=setup.late, patient=patient)


def _on_process(case: Case, setup: Setup, part: Part, path: str) -> list[SeenStep]:
    rank = dist.get_rank()
    return part(case, rank, None if setup.groups_none else process_groups(setup.grid, rank), path)


def _everyone(groups: Groups) -> Comm | None:
    return groups.everyone if isinstance(groups, Roles) else None
