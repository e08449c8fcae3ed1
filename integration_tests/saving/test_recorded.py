"""Runs that earlier versions saved go on, whatever names they gave to the tensors of wrapped and compiled models."""

import sys
from pathlib import Path

import pytest
from processes import Job, run_jobs

from opt_checkpoint import read_index, verify_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/opt-checkpoint/tests/golden"))

from make_recorded import HERE, RUNS, STEPS

RECORDED = {str(path): path.name for path in sorted(HERE.glob("recorded-*/*"))}


def resume(kind: str, path: str) -> list[float]:
    run = RUNS[kind][1]()
    run.resume(Path(path))
    return run.train(STEPS)


def test_recorded_runs_go_on() -> None:
    assert set(RECORDED.values()) == RUNS.keys()
    losses = run_jobs(2, {path: Job(resume, (kind, path)) for path, kind in RECORDED.items()})
    for path, by_rank in losses.items():
        assert verify_checkpoint(path) == []
        want = read_index(path).details["losses"]
        assert by_rank == [pytest.approx(want, rel=1e-5)] * 2, path
