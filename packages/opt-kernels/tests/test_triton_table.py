"""Tables of Triton's launches: what is kept on the device, numbers, devices. Sweeps of all backends test chunks."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix_works import tensor, work_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from opt_kernels.backends import tables as backend_tables
from opt_kernels.backends.tables import DeviceTables, launching_on
from opt_kernels.backends.triton import INTERPRETED, scalars
from opt_kernels.backends.triton import grad_stats as stats
from opt_kernels.matrices.syrk import triton as syrk
from opt_kernels.rules import SGD, Adam, MuonRule, Rule
from opt_kernels.works import Batch, Hyper

pytestmark = pytest.mark.needs_extra
Patch = pytest.MonkeyPatch
Capture = Callable[[bool], None]

CPU = torch.device("cpu")


class Table:
    """A table that can be seen to be deleted."""


@pytest.fixture
def tables() -> DeviceTables[Any]:
    return DeviceTables(CPU, capacity=2, room=100, bytes_of=lambda table: getattr(table, "nbytes", 0))


@pytest.fixture
def capture(monkeypatch: Patch) -> Capture:
    """Says whether a graph is being captured."""
    return lambda capturing: monkeypatch.setattr(backend_tables, "is_capturing", lambda device: capturing)


def test_the_table_that_was_unused_longest_makes_room(tables: DeviceTables[Any]) -> None:
    a = tables.get("a", lambda: torch.zeros(1))
    for key in "bac":
        tables.get(key, lambda: torch.zeros(1))
    assert tables.get("a", lambda: torch.ones(1)) is a
    assert tables.get("b", lambda: torch.ones(1)).item() == 1
    assert len(tables._entries) == 2
    for key in range(6):  # large ones make room before the count is reached
        tables.get(key, lambda: torch.zeros(20))
    assert len(tables._entries) == 1


def test_a_thread_gets_no_table_of_another(tables: DeviceTables[Any]) -> None:
    """Symptom: where keys were compared by Python, another thread's table was taken for the last one."""

    class Key:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            while waiting:
                thread = waiting.pop()
                thread.start()
                thread.join()
            return isinstance(other, Key)

    waiting: list[threading.Thread] = []
    assert tables.get(Key(), lambda: "ours") == "ours"
    waiting.append(threading.Thread(target=tables.get, args=("theirs", lambda: "theirs")))
    assert tables.get(Key(), lambda: "built") == "ours"


def test_what_a_graph_has_captured_is_kept_for_replays(tables: DeviceTables[Any], capture: Capture) -> None:
    captured = []
    others = []
    for _ in range(2):
        tables.get("a", Table)
        capture(True)
        captured.append(weakref.ref(tables.get("a", Table)))
        capture(False)
        for key in "bc":  # there is room for two
            others.append(weakref.ref(tables.get(key, Table)))
    gc.collect()
    first, second = (table() for table in captured)
    assert None not in (first, second)
    assert first is not second
    assert others[0]() is None, "what no graph has captured is kept"


def test_a_stream_uses_no_tables_of_another_but_a_capture_does(
    tables: DeviceTables[Any], capture: Capture, monkeypatch: Patch
) -> None:
    first = tables.get("a", Table)
    monkeypatch.setattr(backend_tables, "current_stream", lambda device: 7)
    capture(True)
    assert tables.get("a", Table) is first
    capture(False)
    second = tables.get("a", Table)
    assert second is not first
    assert tables.get("a", Table) is second
    monkeypatch.setattr(backend_tables, "current_stream", lambda device: 0)
    assert tables.get("a", Table) is first


def block_of(*hypers: Hyper, scale: Any = 1.0, skip: Any = None, device: torch.device = CPU) -> Tensor:
    return scalars.scalar_block(hypers, grad_scale=scale, skip=skip, device=device)


def test_numbers_of_any_kind_are_used_as_in_float64_on_the_host(kernel_device: torch.device) -> None:
    def on_device(value: Any) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=kernel_device)

    expected = torch.tensor([1.0, 0.25, 3e-4, 0.1, 3e-4 * 0.1, 0.8], dtype=torch.float64).float()
    for kind in (float, on_device, lambda value: torch.tensor(value, dtype=torch.float64)):
        hyper = Hyper(lr=kind(3e-4), weight_decay=kind(0.1), step=kind(3), momentum=0.8)
        block = block_of(hyper, scale=kind(0.25), device=kernel_device)
        assert block[0, :6].tolist() == expected.tolist(), kind
    hypers = [Hyper(lr=0.5, step=3), Hyper(lr=torch.tensor(0.25, device=kernel_device), step=4)]
    for flag, proceed in ((None, 1.0), (0.0, 1.0), (1.0, 0.0), (True, 0.0), (3, 0.0)):
        skip = None if flag is None else torch.tensor(flag, device=kernel_device)
        block = block_of(*hypers, skip=skip, device=kernel_device)
        assert block[:, scalars.LR.value].tolist() == [0.5, 0.25]
        assert block[:, scalars.PROCEED.value].tolist() == [proceed] * 2


class NoReads(TorchDispatchMode):
    """Forbids to read the value of a tensor on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        return func(*args, **(kwargs or {}))


def test_device_numbers_are_not_read_nor_host_numbers_captured(capture: Capture) -> None:
    lr, step, scale, eps = torch.tensor([0.5, 3.0, 0.25, 0.125], dtype=torch.float64).unbind()
    with NoReads():
        numbers = scalars.numbers_on(lr.device, [(lr, 0.0, step, scale, eps)])
    assert numbers.tolist() == [0.5, 0.0, 3.0, 0.25, 0.125]
    capture(True)
    with pytest.raises(scalars.FrozenHyperError, match="lr, weight_decay, step of a step that is being captured"):
        block_of(Hyper(lr=1e-2, step=3))


def stepped(rule: Rule) -> None:
    rule.update_([Batch(Hyper(lr=1e-2, step=3), [work_of(rule, tensor(8, 6))])])


LAUNCHES: dict[str, Callable[[], object]] = {
    "adam": lambda: stepped(Adam(backend="triton")),
    "sgd": lambda: stepped(SGD(backend="triton")),
    "muon": lambda: stepped(MuonRule(backend="triton")),
    "grad_stats": lambda: stats.grad_stats([torch.ones(9)]),
    "syrk": lambda: syrk.halved_product(torch.ones(1, 8, 8), torch.ones(1, 8, 8)),
}


@pytest.mark.skipif(not INTERPRETED.value, reason="watches launches of Triton's interpreter")
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_every_launch_is_on_the_device_of_its_tensors(launch: Callable[[], object], monkeypatch: Patch) -> None:
    # Triton launches on the current device, and tables hold addresses: nothing else would notice another device.
    entered: list[torch.device] = []

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    def getitem(kernel: Any, grid: Any) -> Any:
        assert entered[-1:] == [CPU], kernel.__name__
        return found(kernel, grid)

    found = InterpretedFunction.__getitem__
    for at in ("backends.triton.update", "backends.triton.grad_stats", "matrices.muon.triton", "matrices.syrk.triton"):
        monkeypatch.setattr(f"opt_kernels.{at}.launching_on", watched)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", getitem)
    launch()
    guard = launching_on(torch.device("cuda", 1))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1


UNSPECIALIZED = ("do_not_specialize", "do_not_specialize_on_alignment")


def specialization(kernel: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for, besides its constants: dtypes, addresses that are multiples of 16, and numbers
    that are 1 or multiples of 16."""
    any_number, any_address = (kernel.rewriter.kwargs.get(option) or () for option in UNSPECIALIZED)
    found: list[Any] = []
    for name, value in zip(kernel.arg_names, args):
        if isinstance(value, Tensor):
            found.append((value.dtype, name in any_address or value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            found.append(name in any_number or (value == 1, value % 16 == 0))
    return tuple(found)


def statistics_of(grads: list[Tensor]) -> None:
    stats.grad_stats(grads)


def muon_of(grads: list[Tensor]) -> None:
    rule = MuonRule(backend="triton", use_syrk=False)
    works = [replace(work_of(rule, tensor(*grad.shape)), grad=grad) for grad in grads]
    rule.update_([Batch(Hyper(lr=1e-2, step=3), works)])


def adam_of(grads: list[Tensor]) -> None:
    rule = Adam(backend="triton")
    works = [replace(work_of(rule, tensor(*grad.shape)), grad=grad) for grad in grads]
    rule.update_([Batch(Hyper(lr=1e-2, step=3), works)])


@pytest.mark.skipif(not INTERPRETED.value, reason="watches launches of Triton's interpreter")
@pytest.mark.parametrize("launch", [statistics_of, adam_of, muon_of])
def test_one_compiled_kernel_serves_any_number_of_tensors(
    launch: Callable[[list[Tensor]], None], monkeypatch: Patch
) -> None:
    """Each further one takes seconds to compile, at an unpredictable step. Contraction is chosen explicitly, because
    the default contracts, which changes the bits of scalars too."""
    seen: dict[str, set[tuple[Any, ...]]] = {}

    def getitem(kernel: Any, grid: Any) -> Any:
        def run(*args: Any, **constants: Any) -> None:
            assert "enable_fp_fusion" in constants, kernel.__name__
            seen.setdefault(f"{kernel.__name__} {constants}", set()).add(specialization(kernel, args))
            found(kernel, grid)(*args, **constants)

        return run

    found = InterpretedFunction.__getitem__
    monkeypatch.setattr(InterpretedFunction, "__getitem__", getitem)
    for num_fp32, num_bf16 in ((1, 0), (2, 14), (3, 2)):
        launch([tensor(8, 6)] * num_fp32 + [tensor(8, 6, dtype=torch.bfloat16)] * num_bf16)
    assert len(seen) > 2
    assert {kernel: found for kernel, found in seen.items() if len(found) > 1} == {}


def test_muon_uploads_its_numbers_once_for_all_rounds(monkeypatch: Patch) -> None:
    blocks: list[Tensor] = []

    def scalar_block(hypers: Sequence[Hyper], **given: Any) -> Tensor:
        blocks.append(made(hypers, **given))
        return blocks[-1]

    made = scalars.scalar_block
    monkeypatch.setattr(scalars, "scalar_block", scalar_block)
    monkeypatch.setattr("opt_kernels.matrices.muon.rounds.ROUND_NUMEL", 1)
    muon_of([tensor(8, 6), tensor(6, 6)])
    assert len(blocks) == 1
