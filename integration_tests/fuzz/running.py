"""Run cases on ranks as threads or processes, and compare every rank's results with the oracle."""

import math
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import processes
import torch
import torch.distributed as dist
from grids import process_groups, thread_roles
from torch import Tensor

from fuzz.cases import Case, Mistake, Setup, cut, is_held, part_of
from fuzz.drawing import draw
from fuzz.oracle import ExpectedStep, Weights, expect, expected_loss, first_weights
from fuzz.training import Groups, Run, SeenStep, load_run, save_run
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_distributed.comm.threads import World

Part = Callable[[Case, int, Groups, str], list[SeenStep]]


def check_seed(seed: int) -> str | None:
    """The report for a person: the case, its failures, and the command that runs it again. None if it passes."""
    found = failures(case := draw(seed))
    if not found:
        return None
    lines = [str(case), *(f"  {line}" for line in found[:12]), *["  ..."][: len(found) > 12]]
    return "\n".join([*lines, f"again: pytest integration_tests/fuzz --fuzz-seed {case.seed}"])


def failures(case: Case) -> list[str]:
    """A description of each failure of the case; empty if it passes."""
    expected = expect(case)
    found = []
    parts = [(case.setup, first_part, range(case.resume_at if case.resume else case.steps))]
    parts += [(case.resume, second_part, range(case.resume_at, case.steps))] if case.resume else []
    with tempfile.TemporaryDirectory() as folder:
        for setup, part, steps in parts:
            by_rank = run_part(case, setup, part, f"{folder}/checkpoint")
            if case.mistake is not None:
                return _unless_refused(by_rank, case.mistake)
            if setup.ddp.get("check_for_nan_in_grad") and any(expected[step].overflows for step in steps):
                return found + _unless_all_raise(by_rank)
            if failed := _failed(by_rank):
                return found + [f"from step {steps[0]} on, {line}" for line in failed]
            found += _differences(case, expected, by_rank, steps)
    return found


# --- a case on one rank: before the save, and after the load on another grid ------------------------------------------


def first_part(case: Case, rank: int, groups: Groups, path: str) -> list[SeenStep]:
    """The steps until the save, and the save; all steps of a case without one."""
    run = Run(case, case.setup, rank, groups)
    seen = []
    until = case.steps if case.resume is None else case.resume_at
    for step in range(until):
        run = run.again() if step == case.reload_at else run
        seen.append(run.step(step, looks=case.looks_each_step or step == until - 1))
    if case.resume is not None:
        save_run(run, path)
    return seen


def second_part(case: Case, rank: int, groups: Groups, path: str) -> list[SeenStep]:
    assert case.resume is not None
    run = Run(case, case.resume, rank, groups, moved=1.0)
    load_run(run, path)
    steps = range(case.resume_at, case.steps)
    return [run.step(step, looks=case.looks_each_step or step == steps[-1]) for step in steps]


# --- ranks ------------------------------------------------------------------------------------------------------------


class Failed(NamedTuple):
    """The exception that a rank raised, as it can be sent between processes and printed."""

    kind: str
    text: str
    where: str = ""  # the last lines of the traceback
    is_consequence: bool = False  # of another rank's failure
    is_refusal: bool = False  # a ValueError

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        last = reversed(traceback.extract_tb(error.__traceback__)[-4:])
        where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in last)
        return cls(type(error).__name__, str(error), where, _is_consequence(error), isinstance(error, ValueError))

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} ({self.where})"


def _is_consequence(error: BaseException | None) -> bool:
    """Whether it only reports a barrier or a connection that another rank broke."""
    if error is None:
        return False
    is_lost = isinstance(error, BrokenBarrierError) or "onnection closed by peer" in str(error)
    return is_lost or _is_consequence(error.__cause__)


def run_part(case: Case, setup: Setup, part: Part, path: str) -> list[Any]:
    """The results of every rank of the setup's grid for a part of the case, `Failed` where it raised.

    A thread that fails stops the others; one that refuses a mistake does not, since every rank has to by itself.
    """
    size = setup.grid.size
    if setup.processes:
        try:
            results = processes.run_processes(size, _on_process, case, setup, part, path, reuse=True)
        except processes.RankError as error:
            return [Failed(kind="RankError", text=str(error))] * size
        if any(isinstance(result, Failed) for result in results):  # a collective may still be under way
            processes.close_workers()
        return results
    worlds: list[World] = []
    roles = thread_roles(setup.grid, worlds, late=setup.late)

    def run(comm: Comm) -> Any:
        try:
            return part(case, comm.rank, roles[comm.rank], path)
        except Exception as error:
            failed = Failed.of(error)
            for world in () if case.mistake is not None and failed.is_refusal else worlds:
                world.abort()
            return failed

    try:
        return run_threads(size, run)
    except TimeoutError as error:
        return [Failed(kind="TimeoutError", text=str(error))] * size
    finally:
        for world in worlds:
            world.abort()


def _on_process(case: Case, setup: Setup, part: Part, path: str) -> Any:
    rank = dist.get_rank()
    try:
        return part(case, rank, None if setup.groups_none else process_groups(setup.grid, rank), path)
    except Exception as error:
        return Failed.of(error)


# --- comparisons ------------------------------------------------------------------------------------------------------


def _failed(by_rank: Sequence[Any]) -> list[str]:
    """What ranks raised, without those that only lost another rank, where one is to blame."""
    broken = {rank: seen for rank, seen in enumerate(by_rank) if isinstance(seen, Failed)}
    causes = {rank: failed for rank, failed in broken.items() if not failed.is_consequence}
    return [f"rank {rank}: {failed}" for rank, failed in (causes or broken).items()]


def _unless_refused(by_rank: Sequence[Any], mistake: Mistake) -> list[str]:
    quiet = [rank for rank, seen in enumerate(by_rank) if not (isinstance(seen, Failed) and seen.is_refusal)]
    if not quiet and any(mistake.words in failed.text for failed in by_rank):
        return []
    return [f"should be refused on every rank, with {mistake.words!r}; not refused on {quiet}", *_failed(by_rank)]


def _unless_all_raise(by_rank: Sequence[Any]) -> list[str]:
    """Failures where every rank should find NaN; ranks that lost another rank may report that instead."""
    kinds = [seen.is_consequence or seen.kind if isinstance(seen, Failed) else "nothing" for seen in by_rank]
    is_right = {*kinds} <= {"RefusedGradientError", True} and "RefusedGradientError" in kinds
    return [] if is_right else [f"should raise on every rank: {_failed(by_rank) or 'none raised'}"]


def _differences(
    case: Case, expected: Sequence[ExpectedStep], by_rank: Sequence[Sequence[SeenStep]], steps: range
) -> Iterator[str]:
    for index, step in enumerate(steps):
        wanted = expected[step]
        of_step = [seen[index] for seen in by_rank]
        before = expected[step - 1].weights if step else first_weights(case)
        wrong = [*_of_results(wanted, of_step), *_of_copies(case, of_step, step)]
        for rank, seen in enumerate(of_step):
            wrong += (f"rank {rank}: {line}" for line in _of_rank(case, wanted, before, seen, step, rank))
        yield from (f"step {step}: {line}" for line in wrong)


def _of_results(wanted: ExpectedStep, seen: Sequence[SeenStep]) -> Iterator[str]:
    """Check a step's result: the same on every rank, and equal to the oracle's."""
    for name in ("success", "norm", "zeros", "scale"):
        values = [getattr(of_rank, name) for of_rank in seen]
        value = values[0]
        want = getattr(wanted, name)
        if any(repr(other) != repr(value) for other in values):
            yield f"{name} differs between ranks: {values}"
        if name == "norm":
            close = math.isclose(value, want, rel_tol=1e-5, abs_tol=1e-9)
            is_right = not math.isfinite(value) if wanted.overflows else close
        else:
            is_right = value == want or (name == "zeros" and wanted.overflows)
        if not is_right:
            yield f"{name} is {value!r}, should be {want!r}"


def _of_rank(case: Case, wanted: ExpectedStep, before: Weights, seen: SeenStep, step: int, rank: int) -> Iterator[str]:
    setup = case.setup_at(step)
    for name, count in seen.steps.items():
        if count != wanted.steps[name]:
            yield f"{name} has had {count} updates, should be {wanted.steps[name]}"
    if not any(bad.step == step for bad in case.bad):
        loss, tolerance = expected_loss(case, rank, before, step)
        if not abs(seen.loss - loss) <= tolerance:
            yield f"the loss is {seen.loss}, should be {loss}: the forward did not read the present weights"
    shown = [("", seen.weights, wanted.weights), (" in evaluation", seen.evaluated, wanted.evaluated)]
    for where, found, expected in shown:
        for name, value in (found or {}).items():
            main, slack = expected[name]
            if setup.layout == "plain":  # else they are gathered
                main, slack = (cut(of, case.param(name), setup.grid.place(rank), setup.grid) for of in (main, slack))
            if worst := _worst(value, main, slack):
                yield f"{name} {tuple(value.shape)}{where} {worst}"


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
    setup = case.setup_at(step)
    for param in case.params:
        copies: dict[int, tuple[int, Tensor]] = {}
        for rank, place in enumerate(setup.grid.places()):
            weights = seen[rank].weights
            if weights is None or not is_held(param, place, setup.grid):
                continue
            kept = part_of(param, place) if setup.layout == "plain" else 0
            first, value = copies.setdefault(kept, (rank, weights[param.name]))
            if not torch.equal(value.nan_to_num(), weights[param.name].nan_to_num()):
                yield f"{param.name} differs between ranks {first} and {rank}, which hold copies"
