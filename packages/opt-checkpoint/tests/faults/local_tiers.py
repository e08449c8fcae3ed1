"""Runs of several ranks with a local and a durable tier: saved, damaged and resumed."""

from pathlib import Path
from typing import Any

from checkpoint_ranks import run_ranks
from states import assert_is_step, state_at

from opt_checkpoint import Resume, TieredCheckpointManager
from opt_checkpoint.run.series import step_name


def tiers(folder: str, rank: int, *, per_node: int = 1, **options: Any) -> TieredCheckpointManager:
    """A manager on a simulated node with a directory of its own."""
    node = f"node-{rank // per_node}"
    options = {"durable_every": 100, **options}
    return TieredCheckpointManager(f"{folder}/{node}", f"{folder}/durable", node=node, **options)


def save_steps(rank: int, size: int, folder: str, steps: list[int], options: dict[str, Any]) -> list[bool]:
    """Save steps in one go."""
    with tiers(folder, rank, **options) as manager:
        saved = [manager.save(step, state_at(step, rank, size)) for step in steps]
    return saved


def resume_and_save(rank: int, size: int, folder: str, steps: list[int], options: dict[str, Any]) -> None:
    with tiers(folder, rank, **options) as manager:
        manager.load(state_at(0, rank, size, filled=False))
        for step in steps:
            manager.save(step, state_at(step, rank, size))


def resume(rank: int, size: int, folder: str, options: dict[str, Any]) -> Resume | None:
    """Resume, and check that what is loaded is the step that was found."""
    with tiers(folder, rank, **options) as manager:
        found = manager.find()
        if found is not None:
            report = manager.load(state_at(0, rank, size, filled=False))
            assert_is_step(report.state, found.step, rank, size)
            assert report.missing == report.unexpected == ()
        return found


def resumed(size: int, folder: Path, **options: Any) -> Any:
    """What all ranks of a new world resume from, which is the same on each: a `Resume` or None."""
    found = run_ranks(size, resume, str(folder), options)
    assert found.count(found[0]) == size
    return found[0]


def parts_of(folder: Path, node: int, step: int) -> list[Path]:
    """The parts of a step on a node, by rank."""
    return sorted((folder / f"node-{node}").glob(f"*/{step_name(step)}/rank-*"))
