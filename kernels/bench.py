"""Run the CPU benchmarks of opt-kernels and write their ratios as JSON under kernels/results.

    python kernels/bench.py                    all figures, as `nox -s bench` does
    python kernels/bench.py --only Lion        only figures whose name contains this; writes nothing

Every figure is a ratio to another library, measured alternately in the same process. Load on the machine then adds
noise to the ratio but no bias. The file is named after the processor and the number of threads.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKBENCH = Path(__file__).parent
BENCHMARKS = WORKBENCH.parent / "packages" / "opt-kernels" / "benchmarks"


def processor_name() -> str:
    """Return the processor's model if the system reports it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return models[0] if models else platform.machine()


def slug(name: str) -> str:
    """A file name of `name`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run(script: Path, options: list[str]) -> dict[str, Any]:
    """Run one benchmark, print its lines as they arrive, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        subprocess.run([sys.executable, str(script), "--json", str(path), *options], check=True)
        record: dict[str, Any] = json.loads(path.read_text())
        return record


def main() -> int:
    """Parse the command line, run the benchmarks and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only the figures whose name contains this; nothing is written")
    parser.add_argument("--pairs", type=int, help="pairs per figure (default: each benchmark's own)")
    parser.add_argument("--results", type=Path, default=WORKBENCH / "results", help="file for the JSON results")
    parser.add_argument("--benchmarks", type=Path, default=BENCHMARKS, help="folder of the bench_*.py scripts")
    arguments = parser.parse_args()
    options = ["--only", arguments.only] if arguments.only else []
    options += [] if arguments.pairs is None else ["--pairs", str(arguments.pairs)]
    records = {script.stem: run(script, options) for script in sorted(arguments.benchmarks.glob("bench_*.py"))}
    figures = [figure for record in records.values() for figure in record["figures"]]
    if not figures:
        parser.error(f"--only {arguments.only!r} is in no figure's name; names are as the benchmarks print them")
    missed = [figure for figure in figures if figure["ratio"] > figure["goal"]]
    for figure in missed:
        print(f"short of its goal: {figure['name']}: {figure['ratio']:.3f}, asked for {figure['goal']:.2f} at most")
    if not arguments.only:
        name = processor_name()
        path = arguments.results / f"cpu-{slug(name)}-{os.cpu_count()}-threads.json"
        path.write_text(json.dumps({"processor": name, "benchmarks": records}, indent=2) + "\n")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
