"""Work that is captured once nothing about it changes: when it runs, when it is captured, when it is replayed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from opt_distributed.comm.device import Device
from opt_distributed.step.capture import MANY_MISSES, CapturedWork


class FakeDevice(Device):
    """A CPU with graphs, which notes what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []

    def graph(self) -> Any:
        return self

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.did.append("capture")
        yield

    def replay(self) -> None:
        self.did.append("replay")


def run(keys: str) -> list[str]:
    """What is done in calls with these keys, a character each; results name the call that made them."""
    device, found = FakeDevice(), []
    captured: CapturedWork[int] = CapturedWork(device)
    for number, key in enumerate(keys):
        device.did = []
        made = captured(lambda number=number: device.did.append("work") or number, key)  # type: ignore[misc]
        found.append(" ".join([*device.did, str(made)]))
    return found


def test_the_second_call_with_a_key_is_captured_and_later_ones_are_replays_of_it() -> None:
    """A change runs as it is. What was captured before it is not replayed after it."""
    again = ["work 4", "capture work replay 5", "replay 5"]
    assert run("aaaabbb") == ["work 0", "capture work replay 1", "replay 1", "replay 1", *again]
    assert run("aaba")[2:] == ["work 2", "work 3"]


def test_work_that_changes_at_every_call_is_never_captured_and_said_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not any("capture" in did for did in run("ab" * MANY_MISSES))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"the last {MANY_MISSES} steps ran without their graph" in caplog.text
