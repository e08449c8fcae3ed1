"""Run every GPU test, then every GPU benchmark, in less than ten minutes.

    python kernels/gpu_all.py                tests, then benchmarks, to kernels/results/gpu-<device>.json
    python kernels/gpu_all.py --step graphs  only this benchmark; writes nothing
    python kernels/gpu_all.py --rehearsal    the benchmarks at tiny sizes on a CPU, to check them; writes nothing

Without a GPU it prints a message and measures nothing. The tests and each step of the benchmarks run in a process of
their own, within their share of the time. A step that raises, crashes or hangs keeps the figures that it has measured,
and the next one begins with a new CUDA context. Results are written after every step. A figure that misses its goal is
marked, never left out.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

WORKBENCH = Path(__file__).parent
TESTS = WORKBENCH.parent / "packages" / "opt-kernels" / "tests"
BUDGET_SECONDS = 570.0
TESTS_SECONDS = 240.0
FIRST_TESTS = "test_codecs_in_sweeps.py"
MOST_WORKERS = 8  # each has a CUDA context, half a gigabyte


def exit_status(command: Sequence[str], *, within: float, **options: Any) -> int | None:
    """Run a command in a session of its own; return its exit status, or None if it takes longer than `within` seconds.

    Processes that it has started end with it: workers that compile or use the GPU would spoil the figures of the next.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(within)
    except subprocess.TimeoutExpired:
        return None
    finally:  # after an interrupt too
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tests_on_a_device() -> list[Path]:
    """Files of the tests that use a GPU if there is one, by the fixtures `device` and `kernel_device`.

    First those of codecs, which begin with subnormal numbers: whether they survive depends on the compiler's flags.
    """
    found = [path for path in TESTS.glob("test_*.py") if "device: torch.device" in path.read_text()]
    return sorted(found, key=lambda path: (path.name != FIRST_TESTS, path.name))


def run_tests() -> str:
    """Run these tests and return pytest's last line. Most of the time is compilation, on all processors."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "triton", *map(str, tests_on_a_device())]
    if find_spec("xdist") is not None:
        command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
    with TemporaryFile("w+") as output:
        status = exit_status(command, within=TESTS_SECONDS, stdout=output, env=environment)
        output.seek(0)
        text = output.read()
    print(text[-3000:], flush=True)
    last = (text.strip().splitlines() or ["no output"])[-1]
    return last if status is not None else f"not finished after {TESTS_SECONDS:.0f} s: {last}"


def played(names: Sequence[str], deadline: float) -> Iterator[dict[str, Any]]:
    """Run each step in a process of its own and yield its record.

    The time until `deadline`, by the monotonic clock, is shared equally between a step and those after it, so that a
    slow one leaves enough for the last.
    """
    for number, name in enumerate(names):
        begin = time.monotonic()
        share = max(deadline - begin, 0.0) / (len(names) - number)
        record = in_process(name, within=share)
        if "error" in record:
            print(f"{name}: {record['error']}", flush=True)
        yield {"step": name} | record | {"seconds": time.monotonic() - begin}


def in_process(name: str, *, within: float) -> dict[str, Any]:
    """Run a step in another process. Returns its record; of a process that did not end by itself, the last one."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "record.json")
        status = exit_status([sys.executable, __file__, "--step", name, "--record", str(path)], within=within)
        record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"measures": []}
    if status is None:
        record["error"] = f"not finished after {within:.0f} s"
    elif status != 0:
        record.setdefault("error", f"the process ended with status {status}")
    return record


def measured(name: str, on: Any, path: Path | None) -> dict[str, Any]:
    """Run a step in this process and return its record, which is also in the file `path` after every figure."""
    from gpu_steps import STEPS

    record: dict[str, Any] = {"measures": []}
    try:
        for measure in STEPS[name](on):
            print(line(asdict(measure)), flush=True)
            record["measures"].append(asdict(measure))
            if path is not None:
                write(path, record)
    except Exception as error:  # of any kind: Triton's are no RuntimeErrors
        traceback.print_exc()
        record["error"] = f"{type(error).__name__}: {error}"
        if path is not None:
            write(path, record)
    return record


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a JSON file; a process that is killed meanwhile leaves the former file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n")
    part.replace(path)


def line(measure: dict[str, Any]) -> str:
    """Format one figure as a line of output."""
    goal = measure["goal"]
    value = measure["value"]
    if goal is None:
        return f"{value:12.3f} {measure['unit']:5} {measure['name']}"
    met = value <= goal if measure["at_most"] else value >= goal
    return f"{value:12.3f} {measure['unit']:5} {measure['name']}  (goal {goal}: {'met' if met else 'MISSED'})"


def benchmarked(names: Sequence[str], device: str, folder: Path) -> list[dict[str, Any]]:
    """Run the tests, then the steps, and write a file after each. Returns the records of the steps."""
    deadline = time.monotonic() + BUDGET_SECONDS
    versions = {"device": device, "torch": version("torch"), "python": platform.python_version()}
    records: list[dict[str, Any]] = []
    result = versions | {"tests": run_tests(), "steps": records}
    path = folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    for record in played(names, deadline):
        records.append(record)
        write(path, result)
    print(f"written to {path}")
    return records


def main() -> int:
    """Parse the command line, run all steps and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearsal", action="store_true", help="run the steps at tiny sizes on a CPU; write nothing")
    parser.add_argument("--step", help="run only this step")
    parser.add_argument("--record", type=Path, help="file for the figures of --step, as JSON")
    parser.add_argument("--results", type=Path, default=WORKBENCH / "results", help="folder for the JSON results")
    arguments = parser.parse_args()
    if arguments.rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
    # Imported here because TRITON_INTERPRET must be set before the first import of Triton.
    from gpu_steps import STEPS, gpu_name, stage_on

    device = gpu_name()
    if arguments.rehearsal:
        stage = stage_on("cpu")
        records = [measured(name, stage, None) for name in STEPS]
    elif device is None:
        print("no GPU that this torch can use: nothing was measured (try --rehearsal)")
        return 0
    elif arguments.step is not None:
        records = [measured(arguments.step, stage_on("cuda"), arguments.record)]
    else:
        records = benchmarked(list(STEPS), device, arguments.results)
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
