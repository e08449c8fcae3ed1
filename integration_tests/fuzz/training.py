"""A case from its first step to its last, on one rank: before the save, and after the load on another grid."""

from collections.abc import Callable

import torch.distributed as dist

from fuzz.cases import Case, Setup
from fuzz.processes import process_groups, run_processes
from fuzz.rank import Run, SeenStep
from fuzz.saving import load_run, save_run
from fuzz.threads import run_ranks
from opt_distributed.comm import Alone, Comm, ProcessGroups, Roles

Groups = Roles | ProcessGroups | None
Part = Callable[[Case, int, Groups, Comm, str], list[SeenStep]]


def first_part(case: Case, rank: int, groups: Groups, embedding: Comm, path: str) -> list[SeenStep]:
    """The steps until the save, and the save; all steps of a case without one."""
    run = Run(case, case.setup, rank, groups)
    run.embedding = embedding
    until = case.steps if case.resume is None else case.resume_at
    seen = []
    for step in range(until):
        run = run.again() if step == case.reload_at else run
        seen.append(run.step(step, looks=_looks(case, step, until)))
    if case.resume is not None:
        run.complete()
        save_run(run, path, _everyone(groups))
    return seen


def second_part(case: Case, rank: int, groups: Groups, embedding: Comm, path: str) -> list[SeenStep]:
    """The load, and the steps after it."""
    assert case.resume is not None
    run = Run(case, case.resume, rank, groups, moved=1.0)
    run.embedding = embedding
    load_run(run, path, _everyone(groups))
    return [run.step(step, looks=_looks(case, step, case.steps)) for step in range(case.resume_at, case.steps)]


def run_part(case: Case, setup: Setup, part: Part, path: str) -> list[object]:
    """The results of every rank of the setup's grid for a part of the case, `Failed` where it raised."""
    if setup.processes:
        return run_processes(setup.grid.size, _on_process, case, setup, part, path)
    return run_ranks(
        setup.grid,
        lambda rank, roles, embedding: part(case, rank, roles, embedding, path),
        late=setup.late,
        patient=case.mistake is not None,
    )


def _on_process(case: Case, setup: Setup, part: Part, path: str) -> list[SeenStep]:
    rank = dist.get_rank()
    return part(case, rank, None if setup.groups_none else process_groups(setup.grid, rank), Alone(), path)


def _looks(case: Case, step: int, until: int) -> bool:
    return case.looks_each_step or step == until - 1


def _everyone(groups: Groups) -> Comm | None:
    return groups.everyone if isinstance(groups, Roles) else None
