"""Series of steps for tests: saved, damaged, and in two tiers."""

import os
import warnings
from pathlib import Path
from typing import Any

from failing_calls import flip_bit
from states import state_at

from opt_checkpoint import CheckpointManager, TieredCheckpointManager

SUPERSEDED = "superseded.json"  # the record of abandoned steps


def step_name(step: int) -> str:
    return f"step-{step:09d}"


def empty() -> Any:
    return state_at(0, 0, 1, filled=False)


def saved(place: Any, *steps: int, **options: Any) -> Any:
    with CheckpointManager(place, keep=9, **options) as manager:
        for step in steps:
            manager.save(step, state_at(step, 0, 1))
    return place


def damage(path: Path, how: str = "flipped bit") -> None:
    """Damage a checkpoint: its data file, or its manifest."""
    file = path / ("manifest.bin" if "manifest" in how else "__0_0.distcp")
    flip_bit(file)
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 8)
    if how == "missing":
        file.unlink()


def two_tiers(folder: Path) -> TieredCheckpointManager:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return TieredCheckpointManager(folder / "local", folder / "durable", durable_every=20, keep=9)


def names_in(place: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in place.iterdir() if path.name.startswith("step-"))
