"""Run every GPU test, then every GPU benchmark, in less than ten minutes.

    python kernels/gpu_all.py              tests, then benchmarks, to kernels/results/gpu-<device>.json
    python kernels/gpu_all.py --rehearsal  the same steps at tiny sizes on a CPU, to check that they run; writes nothing

Without a GPU it prints a message and measures nothing. Results are written after every step, so an interrupted run
keeps the results of its finished steps. A figure that misses its goal is marked, never left out.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

WORKBENCH = Path(__file__).parent
TESTS = WORKBENCH.parent / "packages" / "opt-kernels" / "tests"
BUDGET_SECONDS = 570.0
TESTS_SECONDS = 240.0
MOST_WORKERS = 8  # each has a CUDA context, half a gigabyte
BYTES_PER_ELEMENT = 48  # for the largest flat sweep and its comparison


def tests_on_a_device() -> list[Path]:
    """Names of the tests that use a GPU if there is one: those with the `kernel_device` fixture."""
    return [path for path in sorted(TESTS.glob("test_*.py")) if "kernel_device" in path.read_text()]


def run_tests() -> str:
    """Run these tests and return pytest's last line. Most of the time is compilation, on all processors."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", *map(str, tests_on_a_device())]
    if find_spec("xdist") is not None:
        command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
    try:
        finished = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=TESTS_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {TESTS_SECONDS:.0f} s"
    print(finished.stdout[-3000:])
    return (finished.stdout.strip().splitlines() or ["no output"])[-1]


def stage(device: torch.device) -> Any:
    """Sizes for this device; those of the rehearsal on a CPU."""
    # Imported here because TRITON_INTERPRET must be set before the first import of Triton.
    from gpu_steps import Stage

    if device.type != "cuda":
        return Stage(device=device, numel=4000, layers=1, sides=(64,), warmups=0, repeats=1)
    free, _ = torch.cuda.mem_get_info(device)
    numel = min(10**9, free // BYTES_PER_ELEMENT // 1024 * 1024)
    return Stage(device=device, numel=numel, layers=32, sides=(512, 1024, 2048, 4096, 8192))


def played(on: Any, deadline: float) -> Iterator[dict[str, Any]]:
    """Run the steps in order and yield a record of each. A failed step is recorded with its error."""
    from gpu_steps import STEPS

    for name, step in STEPS.items():
        begin = time.monotonic()
        if begin > deadline:
            yield {"step": name, "skipped": "no time left"}
            continue
        record: dict[str, Any] = {"step": name, "measures": []}
        try:
            for measure in step(on):
                print(line(asdict(measure)), flush=True)
                record["measures"].append(asdict(measure))
        except (RuntimeError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
            print(f"{name}: {record['error']}")
        yield record | {"seconds": time.monotonic() - begin}


def line(measure: dict[str, Any]) -> str:
    """Format one figure as a line of output."""
    goal, value = measure["goal"], measure["value"]
    if goal is None:
        return f"{value:12.3f} {measure['unit']:5} {measure['name']}"
    met = value <= goal if measure["at_most"] else value >= goal
    return f"{value:12.3f} {measure['unit']:5} {measure['name']}  (goal {goal}: {'met' if met else 'MISSED'})"


def main() -> int:
    """Parse the command line, run all steps and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearsal", action="store_true", help="run the steps at tiny sizes on a CPU; write nothing")
    parser.add_argument("--results", type=Path, default=WORKBENCH / "results", help="file for the JSON results")
    arguments = parser.parse_args()
    deadline = time.monotonic() + BUDGET_SECONDS
    if arguments.rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
        failed = [record for record in played(stage(torch.device("cpu")), deadline) if "error" in record]
        return 1 if failed else 0
    if not torch.cuda.is_available():
        print("no GPU that this torch can use: nothing was measured (try --rehearsal)")
        return 0
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    versions = {"device": name, "torch": torch.__version__, "python": platform.python_version()}
    result: dict[str, Any] = versions | {"tests": run_tests(), "steps": []}
    path = arguments.results / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    for record in played(stage(device), deadline):
        result["steps"].append(record)
        path.write_text(json.dumps(result, indent=2) + "\n")
        torch.cuda.empty_cache()
    print(f"written to {path}")
    return 1 if any("error" in record for record in result["steps"]) else 0


if __name__ == "__main__":
    sys.exit(main())
