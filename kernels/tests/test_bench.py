"""The bench command, run on a benchmark with known figures."""

import json
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "bench.py")]
BENCHMARK = """
import json, sys
figures = [{"name": "fast", "ratio": 0.5, "goal": 0.8}, {"name": "slow", "ratio": 0.9, "goal": 0.8}]
only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
kept = [figure for figure in figures if only in figure["name"]]
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({"figures": kept}))
"""


def benched(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "bench_known.py").write_text(BENCHMARK)
    command = [*COMMAND, "--benchmarks", str(folder), "--results", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_figures_are_written_whole_and_a_shortfall_is_named(tmp_path: Path) -> None:
    assert benched(tmp_path, "--only", "fast").returncode == 0
    assert not list(tmp_path.glob("*.json"))  # a part does not replace the whole
    assert "in no figure's name" in benched(tmp_path, "--only", "unheard").stderr
    finished = benched(tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "short of its goal: slow: 0.900" in finished.stdout
    assert "short of its goal: fast" not in finished.stdout
    [path] = tmp_path.glob("cpu-*.json")
    figures = json.loads(path.read_text())["benchmarks"]["bench_known"]["figures"]
    assert [figure["name"] for figure in figures] == ["fast", "slow"]
