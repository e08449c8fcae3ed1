"""`Accelerator` and `Graph` without an accelerator: which calls they make of torch, in which order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_distributed.comm import GraphError
from opt_distributed.comm.device import Accelerator, Device, Graph, HostCopy, device_of

CUDA = torch.device("cuda", 3)


class FakeStream:
    """A stream of a device."""

    def __init__(self, device: torch.device):
        self.device = device


class Calls:
    """What was asked of torch."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.made: list[Any] = []
        self.current: Any = "main"
        self.is_capturing = False
        patch.setattr(torch.accelerator, "current_stream", self.note("current", lambda device: self.current))
        patch.setattr(torch.accelerator, "set_stream", self.note("set", self.set_stream))
        patch.setattr(torch, "Stream", FakeStream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def note(self, name: str, run: Any = None) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, *args, *kwargs.items()))
            return None if run is None else run(*args, **kwargs)

        return called

    def set_stream(self, stream: Any) -> None:
        self.current = stream


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_the_current_stream_is_that_of_the_device(calls: Calls) -> None:
    assert Accelerator(CUDA).current_stream() == "main"
    assert calls.made == [("current", CUDA)]


def test_there_is_one_side_stream_and_it_is_on_the_device(calls: Calls) -> None:
    device = Accelerator(CUDA)
    side: Any = device.side_stream()
    assert side is device.side_stream()
    assert side.device == CUDA


def fail_on(device: Accelerator, stream: Any, calls: Calls) -> None:
    with device.on(stream):
        assert calls.current is stream
        raise RuntimeError("within")


def test_work_goes_to_a_stream_and_back_also_after_an_error(calls: Calls) -> None:
    side = FakeStream(CUDA)
    with pytest.raises(RuntimeError, match="within"):
        fail_on(Accelerator(CUDA), side, calls)
    assert calls.made == [("current", CUDA), ("set", side), ("set", "main")]


def test_what_is_uploaded_is_pinned_and_copied_without_waiting(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", calls.note("pin", lambda tensor: tensor))
    monkeypatch.setattr(Tensor, "to", calls.note("to", lambda tensor, *args, **kwargs: tensor))
    host = torch.zeros(3)
    Accelerator(CUDA).upload(host)
    assert [call[0] for call in calls.made] == ["pin", "to"]
    assert calls.made[1][2:] == (CUDA, ("non_blocking", True))


def test_nothing_is_uploaded_while_a_graph_is_captured(calls: Calls) -> None:
    calls.is_capturing = True
    with pytest.raises(GraphError, match=r"upload of a host tensor of shape \(3,\) while a graph is captured"):
        Accelerator(CUDA).upload(torch.zeros(3))


def test_a_copy_to_the_host_is_pinned_and_waits_for_its_event_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Event:
        def synchronize(self) -> None:
            made.append("synchronize")

    class Stream:
        def record_event(self) -> Event:
            made.append("record")
            return Event()

    def empty_like(tensor: Tensor, **options: Any) -> Tensor:
        made.append(("empty", options))
        return torch.zeros(tensor.shape)

    copy_ = Tensor.copy_
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(Tensor, "copy_", lambda to, of, **how: (made.append(("copy", how)), copy_(to, of))[1])
    copy = HostCopy(torch.ones(2), Accelerator(CUDA))
    assert made == [("empty", {"device": "cpu", "pin_memory": True}), ("copy", {"non_blocking": True}), "record"]
    assert torch.equal(copy.wait(), torch.ones(2))
    copy.wait()
    assert made[3:] == ["synchronize"]


def test_memory_is_given_back_and_taken_again_by_its_size() -> None:
    whole = torch.arange(6.0)
    view, device = whole[2:4], Accelerator(CUDA)
    device.release_(view)
    assert whole.untyped_storage().nbytes() == 0
    device.take_back_(whole)
    assert whole.untyped_storage().nbytes() == 24


class FakeGraph:
    """Notes what is captured and replayed."""

    calls: list[Any]

    def replay(self) -> None:
        self.calls.append(("replay", self))


@pytest.fixture
def graph_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    FakeGraph.calls = made

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        made.append(("device", device))
        yield

    @contextmanager
    def capturing(graph: FakeGraph, **options: Any) -> Iterator[None]:
        made.append(("begin", graph, options))
        yield
        made.append(("end", graph))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    return made


def test_a_graph_is_captured_for_this_thread_only_and_replayed_on_its_device(graph_calls: list[Any]) -> None:
    graph = Accelerator(CUDA).graph()
    with graph.capture():
        graph_calls.append("work")
    graph.replay()
    captured = graph_calls[1][1]
    assert graph_calls == [
        ("device", CUDA),
        ("begin", captured, {"capture_error_mode": "thread_local"}),
        "work",
        ("end", captured),
        ("device", CUDA),
        ("replay", captured),
    ]


def test_a_second_capture_is_another_graph_and_a_failed_one_changes_nothing(graph_calls: list[Any]) -> None:
    graph = Graph(CUDA)
    with graph.capture():
        pass
    first = graph._graph
    with pytest.raises(RuntimeError, match="within"), graph.capture():
        raise RuntimeError("within")
    assert graph._graph is first
    with graph.capture():
        pass
    assert graph._graph is not first


@pytest.mark.parametrize("device", [Device(), Accelerator(torch.device("xpu", 0))], ids=["cpu", "xpu"])
def test_devices_without_graphs_say_so(device: Any) -> None:
    with pytest.raises(GraphError, match="only cuda devices have them; run without"):
        device.graph()


def test_every_device_has_one_door() -> None:
    assert not isinstance(device_of(torch.device("meta")), Accelerator)
    assert device_of(CUDA) is device_of(torch.device("cuda:3"))
    assert isinstance(device_of(CUDA), Accelerator)


class SlowEvent:
    """An event that is complete at the third query."""

    def __init__(self) -> None:
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.num_queries > 2


def test_a_bounded_wait_asks_until_the_event_is_there_or_time_is_over(calls: Calls) -> None:
    device, event = Accelerator(CUDA), SlowEvent()
    assert not device.reaches(event, within=0.0)
    assert device.reaches(event, within=60.0)
    assert event.num_queries == 3


class LostEvent:
    """An event of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("device-side assert")


def test_a_bounded_wait_for_a_device_that_has_failed_ends(calls: Calls) -> None:
    assert not Accelerator(CUDA).reaches(LostEvent(), within=60.0)


def test_a_bounded_wait_asks_nothing_while_a_graph_is_captured(calls: Calls) -> None:
    calls.is_capturing, event = True, SlowEvent()
    assert not Accelerator(CUDA).reaches(event, within=60.0)
    assert event.num_queries == 0
