"""A pytest plugin that records which functions of the packages each test file calls, in threads and ranks too.

    RECORD_CALLS=FOLDER python -m pytest -p called_functions PATHS

Every process writes lines `test file, kind, value`, separated by tabs, to a file in the folder; kinds are `calls` (a
source file and the first line of a function), `took` (seconds) and `passed` (a test). `plant_faults.py` reads them.
"""

import os
import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

FOLDER = Path(os.environ["RECORD_CALLS"])
SOURCE = re.compile(r".*/(packages/[\w-]+/src/.*\.py)$")
_seen: dict[int, CodeType] = {}  # keeps code alive, so that no other code gets its identity
_output = _label = ""


def begin() -> None:
    """Write to a file of this process from now on, for the test file that the pytest process above it runs."""
    global _output, _label
    label = Path(os.environ.get("RECORD_CALLS_LABEL", os.devnull))
    _output = str(FOLDER / f"{os.getpid()}.calls")
    _label = label.read_text()
    _seen.clear()
    threading.settrace(trace)
    sys.settrace(trace)


def write(kind: str, value: object) -> None:
    with open(_output, "a") as file:
        file.write(f"{_label}\t{kind}\t{value}\n")


def trace(frame: FrameType, event: str, argument: Any) -> None:
    """Is called at each call of a Python function; returns None: not at its lines."""
    code = frame.f_code
    if id(code) not in _seen:
        _seen[id(code)] = code
        if _label and (match := SOURCE.match(code.co_filename)):
            write("calls", f"{match[1]}::{code.co_firstlineno}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """At the first test of each file: other processes that this one starts find the file's name."""
    file = item.nodeid.split("::")[0]
    if file == _label:
        return
    if processes := sys.modules.get("processes"):
        processes.close_workers()  # they work for the file before
        processes.PRELOADED[:] = dict.fromkeys([*processes.PRELOADED, __name__])
    label = FOLDER / f"{os.getpid()}.label"
    label.write_text(file)
    os.environ["RECORD_CALLS_LABEL"] = str(label)
    begin()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _label and report.nodeid.startswith(_label):
        write("took", report.duration)
        if report.when == "call" and report.passed:
            write("passed", report.nodeid)


os.register_at_fork(after_in_child=begin)
begin()
