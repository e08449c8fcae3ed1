"""Tests that run elsewhere: those marked `needs_extra` and `nightly`, and a check that every test runs somewhere.

A pytest plugin. `--outcomes FILE` records which tests a run of pytest ran and skipped;

    python integration_tests/support/outcomes.py FILE...   exit status 1 if a test ran in none of these runs

`nox -s tests` records each of its runs and ends with this check. `ELSEWHERE` lists the tests that cannot run in it, by
the reason that they give for skipping.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

import pytest

AT_NIGHT = "runs every night: nox -s nightly"
# Pattern of the reason for skipping -> where the test does run.
ELSEWHERE = {
    re.escape(AT_NIGHT): "nox -s nightly",
    r"could not import '(jax|optax|keras)'|the adapter needs keras": "nox -s jax",
    r"could not import '(lightning|accelerate|transformers|torchtitan)": "nox -s trainers",
    r"could not import 'megatron": "nox -s megatron",
    r"could not import 'emerging_optimizers": "nox -s megatron_newest",
    r"could not import 'ray'": "nox -s engines",
    r"drawn by another version of matplotlib": "the version of matplotlib that drew the committed picture",
    r"this processor does not run code for|multiply bfloat16 itself": "processors with AVX2, AVX-512 or bf16 products",
    r"this device has no TMA": "GPUs of Hopper and newer",
    r"this torch |torch \d\.\d+ brought|this Triton has": "nox -s matrix, on versions of torch that have it",
    r"no fork here|functions of Linux": "Linux",
}
if sys.platform != "linux":
    ELSEWHERE["triton"] = "Linux, for which there is Triton"
if not any(map(which, ("c++", "g++", "clang++"))):
    ELSEWHERE[r"C\+\+ compiler|torch's operations widen"] = "machines with a C++ compiler"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("opt-stack")
    group.addoption("--nightly", action="store_true", help="run all tests, and whole what is sampled by default")
    group.addoption("--outcomes", type=Path, help="record in this file which tests ran and were skipped")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--outcomes"):
        config.pluginmanager.register(Outcomes(path))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if any(isinstance(value, str) and value == "triton" for value in params.values()):
            item.add_marker("needs_extra")
        if item.get_closest_marker("nightly") and not config.getoption("--nightly"):
            item.add_marker(pytest.mark.skip(reason=AT_NIGHT))


class Outcomes:
    """The record of a run. Under xdist, reports of all workers reach the controller, which writes it."""

    def __init__(self, path: Path):
        self._path = path
        self._ran: set[str] = set()
        self._skipped: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped[report.nodeid] = reason(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[report.nodeid] = reason(report)
        elif report.when == "call":
            self._ran.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workeroutput"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"ran": sorted(self._ran), "skipped": self._skipped}))


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """What the test said when it was skipped."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple | list) else report.longrepr)


def never_ran(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Tests, and files skipped at import, of which no run ran any, with the reason of the skip."""
    ran = {name for record in records for name in record["ran"]}
    ran |= {name.split("::")[0] for name in ran}
    skipped = {name: why for record in records for name, why in record["skipped"].items() if name not in ran}
    return {name: why for name, why in skipped.items() if not any(re.search(known, why) for known in ELSEWHERE)}


if __name__ == "__main__":
    left = never_ran([json.loads(Path(path).read_text()) for path in sys.argv[1:]])
    for name, why in sorted(left.items()):
        print(f"{name}: {why}")
    if left:
        sys.exit(
            f"{len(left)} tests ran in no session: mark those that need an extra with needs_extra, or list the reason "
            "in integration_tests/support/outcomes.py with the session that runs them"
        )
