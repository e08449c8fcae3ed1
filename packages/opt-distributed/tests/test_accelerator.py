"""`Accelerator` and `Graph` without an accelerator: which calls they make of torch, in which order."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from opt_distributed.comm import GraphError
from opt_distributed.comm.device import Accelerator, Device, Graph, HostCopy, device_of

CUDA = torch.device("cuda", 3)


class FakeStream:
    def __init__(self, device: torch.device):
        self.device = device


class Calls:
    """What was asked of torch."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.made: list[Any] = []
        self.current: Any = "main"
        self.is_capturing = False
        patch.setattr(torch.accelerator, "current_stream", self.note("current", lambda device: self.current))
        patch.setattr(torch.accelerator, "set_stream", self.note("set", lambda to: setattr(self, "current", to)))
        patch.setattr(torch, "Stream", FakeStream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def note(self, name: str, run: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, *args, *kwargs.items()))
            return run(*args, **kwargs)

        return called


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_work_leaves_the_side_stream_also_after_an_error(calls: Calls) -> None:
    device = Accelerator(CUDA)
    side: Any = device.side_stream()
    assert (side, side.device) == (device.side_stream(), CUDA)

    def fail() -> None:
        with device.on(side):
            assert calls.current is side
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert device.current_stream() == "main"
    assert calls.made == [("current", CUDA), ("set", side), ("set", "main"), ("current", CUDA)]


def test_uploads_are_pinned_and_asynchronous_except_in_a_capture(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", calls.note("pin", lambda tensor: tensor))
    monkeypatch.setattr(Tensor, "to", calls.note("to", lambda tensor, *args, **kwargs: tensor))
    Accelerator(CUDA).upload(torch.zeros(3))
    assert [call[0] for call in calls.made] == ["pin", "to"]
    assert calls.made[1][2:] == (CUDA, ("non_blocking", True))
    calls.is_capturing = True
    with pytest.raises(GraphError, match=r"upload of a host tensor of shape \(3,\) while a graph is captured"):
        Accelerator(CUDA).upload(torch.zeros(3))


def test_a_copy_to_the_host_is_pinned_and_waits_once(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_ = Tensor.copy_
    event = SimpleNamespace(synchronize=calls.note("synchronize", lambda: None))
    calls.current = SimpleNamespace(record_event=calls.note("record", lambda: event))
    monkeypatch.setattr(torch, "empty_like", calls.note("empty", lambda tensor, **how: torch.zeros(tensor.shape)))
    monkeypatch.setattr(Tensor, "copy_", calls.note("copy", lambda to, of, **how: copy_(to, of)))
    copy = HostCopy(torch.ones(2), Accelerator(CUDA))
    for _ in range(2):
        assert torch.equal(copy.wait(), torch.ones(2))
    assert [call[0] for call in calls.made] == ["empty", "copy", "current", "record", "synchronize"]
    assert calls.made[0][2:] == (("device", "cpu"), ("pin_memory", True))
    assert calls.made[1][3:] == (("non_blocking", True),)


def test_memory_is_given_back_and_taken_again_by_its_size() -> None:
    whole = torch.arange(6.0)
    Accelerator(CUDA).release_(whole[2:4])
    assert whole.untyped_storage().nbytes() == 0
    Accelerator(CUDA).reclaim_(whole)
    assert whole.untyped_storage().nbytes() == 24


@pytest.fixture
def graph_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class FakeGraph:
        def replay(self) -> None:
            made.append(("replay", self))

    @contextmanager
    def capturing(graph: FakeGraph, **options: Any) -> Iterator[None]:
        made.append(("begin", graph, options))
        yield
        made.append(("end", graph))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: (made.append(("device", device)), nullcontext())[1])
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    return made


def test_a_graph_is_captured_by_its_thread_only(graph_calls: list[Any]) -> None:
    graph = Accelerator(CUDA).graph()
    with graph.capture():
        graph_calls.append("work")
    graph.replay()
    captured = graph_calls[1][1]
    begin = ("begin", captured, {"capture_error_mode": "thread_local"})
    on_device = ("device", CUDA)
    assert graph_calls == [on_device, begin, "work", ("end", captured), on_device, ("replay", captured)]


def test_a_second_capture_is_a_new_graph_unless_it_failed(graph_calls: list[Any]) -> None:
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


def test_cuda_devices_have_an_accelerator_and_others_no_graphs() -> None:
    assert not isinstance(device_of(torch.device("meta")), Accelerator)
    assert device_of(CUDA) is device_of(torch.device("cuda:3"))
    assert isinstance(device_of(CUDA), Accelerator)
    for device in (Device(), Accelerator(torch.device("xpu", 0))):
        with pytest.raises(GraphError, match="only cuda devices have them; run without"):
            device.graph()


def test_a_bounded_wait_ends_in_time_and_queries_no_capture(calls: Calls) -> None:
    device = Accelerator(CUDA)
    query = Mock(side_effect=[False, False, True])
    event = SimpleNamespace(query=query)
    assert not device.reaches(event, within=0.0)
    assert device.reaches(event, within=60.0)
    assert query.call_count == 3
    query.side_effect = RuntimeError("device-side assert")
    assert not device.reaches(event, within=60.0)
    calls.is_capturing = True
    assert not device.reaches(event, within=60.0)
    assert query.call_count == 4
