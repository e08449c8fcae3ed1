"""Every benchmark runs, at a size that takes seconds, which measures nothing; host time of a step has a threshold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {  # options of those that else take more than seconds
    "opt-checkpoint/benchmarks/bench_io.py": ["--chunk-mb=1", "--chunks=2", "--rounds=1"],
    "opt-checkpoint/benchmarks/bench_planning.py": ["--params=40", "--ranks", "8", "16"],
    "opt-checkpoint/benchmarks/bench_tiers.py": ["--mb=1", "--rounds=1"],
    "opt-distributed/benchmarks/bench_host_step.py": ["--params=10", "--steps=20"],
    "opt-distributed/benchmarks/bench_step.py": ["--params=20", "--rounds=2"],
    "opt-kernels/benchmarks/bench_elementwise.py": ["--pairs=1", "--only=Lion"],
    "opt-kernels/benchmarks/bench_host.py": ["--pairs=3"],
    "opt-kernels/benchmarks/bench_muon.py": ["--pairs=1"],
    "opt-kernels/benchmarks/bit_table.py": ["bits.md"],
    "opt-stack/benchmarks/bench_stats.py": ["--layers=2", "--width=16", "--pairs=3"],
}
SHARED = {"opt-checkpoint/benchmarks/measure.py"}
SCRIPTS = {str(path.relative_to(ROOT / "packages")) for path in ROOT.glob("packages/*/benchmarks/*.py")} - SHARED


@pytest.mark.nightly
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_benchmark_runs(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "packages" / script), *SMALL.get(script, [])]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert "Traceback" not in ran.stderr, ran.stderr[-3000:]
    assert ran.stdout or list(tmp_path.iterdir())


@pytest.mark.nightly
def test_host_time_is_at_most_three_times_its_goal(tmp_path: Path) -> None:
    """Goals are ratios to torch's step in the same process; the least of many steps hardly depends on other load."""
    pytest.importorskip("triton")
    script = ROOT / "packages/opt-kernels/benchmarks/bench_host.py"
    out = tmp_path / "host.json"
    subprocess.run([sys.executable, str(script), "--pairs=100", "--json", str(out)], check=True, timeout=1200)
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) == 9
    assert not [figure for figure in figures if figure["ratio"] > 3 * figure["goal"]]
