"""Tables of Triton's launches: chunks against a brute-force table, what is kept on the device, numbers, devices."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_works import tensor, work_of
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from opt_kernels.backends import tables as backend_tables
from opt_kernels.backends.tables import DeviceTables, launching_on
from opt_kernels.backends.triton import INTERPRETED, launches, scalars
from opt_kernels.backends.triton import grad_stats as stats
from opt_kernels.backends.triton.launches import (
    MAX_CHUNK,
    MIN_CHUNK,
    Column,
    Extents,
    chunk_elements,
    chunk_records,
    record_width,
)
from opt_kernels.matrices.muon import rounds
from opt_kernels.matrices.syrk import triton as syrk
from opt_kernels.rules import SGD, Adam, Lion, MuonRule, Rule
from opt_kernels.works import Batch, Hyper, Works

pytestmark = pytest.mark.needs_extra

COLUMNS = (Column(item_bytes=4), Column(item_bytes=2), Column(item_bytes=4, elements=128))


def brute_force(addresses: Sequence[Sequence[int]], extents: Extents, chunk: int) -> list[list[int]]:
    """Every record by a loop over elements' runs."""
    records = []
    for run, numel in enumerate(extents.numels):
        for start in range(0, numel, chunk):
            moved = [
                of_runs[run] + start // column.elements * column.item_bytes
                for column, of_runs in zip(COLUMNS, addresses)
            ]
            padding = [0] * (record_width(len(COLUMNS)) - len(COLUMNS) - 3)
            tail = [min(chunk, numel - start), extents.rows[run], extents.firsts[run] + start]
            records.append([*moved, *padding, *tail])
    return records


@given(
    runs=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 7), st.integers(0, 2**40)), max_size=12),
    chunk=st.sampled_from([128, 1024, 2048]),
)
@settings(max_examples=60, deadline=None)
def test_the_table_is_the_one_that_a_loop_over_chunks_gives(runs: list[tuple[int, int, int]], chunk: int) -> None:
    extents = Extents(*(tuple(run[i] for run in runs) for i in range(3)))
    addresses = [tuple(10**12 * (lane + 1) + 4096 * i for i in range(len(runs))) for lane in range(len(COLUMNS))]
    table = chunk_records(addresses, COLUMNS, extents, chunk=chunk)
    assert table.tolist() == brute_force(addresses, extents, chunk)


@pytest.mark.parametrize(
    ("total", "processors", "expected"),
    [
        pytest.param(0, 132, MIN_CHUNK, id="nothing"),
        pytest.param(10_000_000, 132, 4096, id="small-shard-on-an-h200"),
        pytest.param(10**9, 132, MAX_CHUNK, id="billion-on-an-h200"),
        pytest.param(10**9, 1, MAX_CHUNK, id="one-processor"),
    ],
)
def test_chunks_grow_with_the_work_and_shrink_with_the_processors(total: int, processors: int, expected: int) -> None:
    assert chunk_elements(total, processors=processors) == expected


# --- tables on the device --------------------------------------------------------------------------------------------


class Table:
    """A cached object whose deletion can be observed."""


@pytest.fixture
def tables() -> DeviceTables[Any]:
    return DeviceTables(torch.device("cpu"), capacity=2, room=100, bytes_of=lambda table: getattr(table, "nbytes", 0))


def test_the_table_that_was_unused_longest_makes_room(tables: DeviceTables[Any]) -> None:
    a = tables.get("a", lambda: torch.zeros(1))
    for key in "bac":
        tables.get(key, lambda: torch.zeros(1))
    assert len(tables) == 2
    assert tables.get("a", lambda: torch.ones(1)) is a
    assert tables.get("b", lambda: torch.ones(1)).item() == 1
    tables.get("b", lambda: torch.zeros(10), of=[torch.ones(1)])  # built anew in the place of the other
    assert len(tables) == 2
    assert tables.get("b", Table, of=[torch.zeros(1)]).numel() == 10
    assert isinstance(tables.get("b", Table, of=[torch.zeros(2, 3)]), Table)
    for key in range(6):  # large ones make room before the count is reached
        tables.get(key, lambda: torch.zeros(20))
    assert len(tables) == 1
    tables.get("larger than the room", lambda: torch.zeros(40))
    assert len(tables) == 1


def test_what_a_graph_has_captured_is_kept_for_as_long_as_it_may_be_replayed(
    tables: DeviceTables[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A table that was built again under its old key once replaced the one that an earlier capture had used.
    captured = []
    for _ in range(2):
        tables.get("a", Table)
        monkeypatch.setattr(backend_tables, "is_capturing", lambda device: True)
        captured.append(weakref.ref(tables.get("a", Table)))
        monkeypatch.setattr(backend_tables, "is_capturing", lambda device: False)
        for key in "bc":  # there is room for two
            tables.get(key, Table)
    gc.collect()
    first, second = (table() for table in captured)
    assert first is not None
    assert second is not None
    assert first is not second


def test_a_stream_does_not_use_the_tables_of_another_but_a_capture_those_of_the_step_before(
    tables: DeviceTables[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A table that one stream was still copying was once read by a step on another stream; torch.cuda.graph captures on
    # a stream of its own, where nothing could be built.
    first = tables.get("a", Table)
    monkeypatch.setattr(backend_tables, "current_stream", lambda device: 7)
    monkeypatch.setattr(backend_tables, "is_capturing", lambda device: True)
    assert tables.get("a", Table) is first
    monkeypatch.setattr(backend_tables, "is_capturing", lambda device: False)
    second = tables.get("a", Table)
    assert second is not first
    assert tables.get("a", Table) is second
    monkeypatch.setattr(backend_tables, "current_stream", lambda device: 0)
    assert tables.get("a", Table) is first


# --- numbers ---------------------------------------------------------------------------------------------------------


def single(value: float) -> float:
    """`value` rounded to float32."""
    return torch.tensor(value, dtype=torch.float64).float().item()


@pytest.mark.parametrize("kind", ["host", "device"])
def test_the_scalar_block_holds_what_a_host_would_compute_in_float64(kind: str, kernel_device: torch.device) -> None:
    def given_as(value: float) -> float | torch.Tensor:
        return value if kind == "host" else torch.tensor(value, dtype=torch.float64, device=kernel_device)

    lr, decay = 3e-4, 0.1
    hyper = Hyper(lr=given_as(lr), weight_decay=given_as(decay), step=given_as(3), momentum=0.8)
    block = scalars.scalar_block([hyper], grad_scale=given_as(0.25), skip=None, device=kernel_device)
    expected = [1.0, 0.25, lr, decay, lr * decay, 0.8]
    assert block[0, :6].tolist() == list(map(single, expected))


def test_rows_mix_host_numbers_and_device_tensors_and_any_skip_flag_but_zero_stops_all(
    kernel_device: torch.device,
) -> None:
    hypers = [Hyper(lr=0.5, step=3), Hyper(lr=torch.tensor(0.25, device=kernel_device), step=4)]
    for flag, proceed in ((None, 1.0), (0.0, 1.0), (1.0, 0.0), (True, 0.0), (3, 0.0)):
        skip = None if flag is None else torch.tensor(flag, device=kernel_device)
        block = scalars.scalar_block(hypers, grad_scale=1.0, skip=skip, device=kernel_device)
        assert block[:, scalars.LR.value].tolist() == [0.5, 0.25]
        assert block[:, scalars.PROCEED.value].tolist() == [proceed] * 2


def test_numbers_of_any_kind_on_the_host_are_uploaded_alike(kernel_device: torch.device) -> None:
    def block(number: type, lr: object) -> torch.Tensor:
        hyper = Hyper(lr=lr, weight_decay=number(0), step=3, momentum=number(1))  # type: ignore[arg-type]
        return scalars.scalar_block([hyper], grad_scale=0.5, skip=None, device=kernel_device)[:, :6]

    expected = block(float, 0.25)
    for number, lr in ((int, Fraction(1, 4)), (bool, torch.tensor(0.25, dtype=torch.float64)), (Decimal, 0.25)):
        assert torch.equal(block(number, lr), expected), number


def test_host_numbers_are_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    monkeypatch.setattr(backend_tables, "is_capturing", lambda device: True)
    with pytest.raises(scalars.FrozenHyperError, match="lr, weight_decay, step of a step that is being captured"):
        scalars.scalar_block([Hyper(lr=1e-2, step=3)], grad_scale=1.0, skip=None, device=kernel_device)


class NoReads(TorchDispatchMode):
    """Forbids to read the value of a tensor on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        return func(*args, **(kwargs or {}))


def test_numbers_on_the_device_are_not_read() -> None:
    lr, step, scale, eps = torch.tensor([0.5, 3.0, 0.25, 0.125], dtype=torch.float64).unbind()
    with NoReads():
        numbers = scalars.numbers_on(lr.device, [(lr, 0.0, step, scale, eps)])
    assert numbers.tolist() == [0.5, 0.0, 3.0, 0.25, 0.125]


def test_a_captured_sweep_keeps_its_tables_when_its_works_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    main, grad = torch.zeros(8), torch.ones(8)
    pieces = [(0, Works([grad], mains=[main], states=[{}]))]
    launches.cut_sweeps(pieces, {})
    monkeypatch.setattr(backend_tables, "is_capturing", lambda device: True)
    [launch] = launches.cut_sweeps(pieces, {}) or []
    table = weakref.ref(launch.table.grads)
    monkeypatch.setattr(backend_tables, "is_capturing", lambda device: False)
    launches.known_calls(main.device)._entries.clear()  # as if other works had used all room
    launches.known_calls(main.device)._last = (None, None)
    del launch
    pieces.clear()
    gc.collect()
    assert table() is not None


# --- launches --------------------------------------------------------------------------------------------------------

interpreted = pytest.mark.skipif(not INTERPRETED.value, reason="watches launches of Triton's interpreter")
HYPER = Hyper(lr=1e-2, step=3)


def batch_of(rule: Rule, shapes: Sequence[tuple[int, int]]) -> Batch:
    return Batch(HYPER, [replace(work_of(rule, tensor(*shape)), grad=tensor(*shape, seed=1)) for shape in shapes])


def stepped(rule: Rule) -> None:
    rule.update_([batch_of(rule, [(8, 6)])])


LAUNCHES: dict[str, Callable[[], object]] = {
    "adam": lambda: stepped(Adam(backend="triton")),
    "lion": lambda: stepped(Lion(backend="triton")),
    "sgd": lambda: stepped(SGD(backend="triton")),
    "muon": lambda: stepped(MuonRule(backend="triton")),
    "grad_stats": lambda: stats.grad_stats([torch.ones(9)]),
    "syrk": lambda: syrk.halved_product(torch.ones(1, 8, 8), torch.ones(1, 8, 8)),
}


@interpreted
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_every_launch_is_made_on_the_device_of_the_tensors(
    launch: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Triton launches on the current device, and tables hold addresses: nothing else would notice another device.
    entered: list[torch.device] = []
    outside: list[str] = []

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    def getitem(kernel: Any, grid: Any) -> Any:
        if entered[-1:] != [torch.device("cpu")]:
            outside.append(kernel.__name__)
        return found(kernel, grid)

    found = InterpretedFunction.__getitem__
    for module in (
        "backends.triton.update",
        "backends.triton.grad_stats",
        "matrices.muon.triton",
        "matrices.syrk.triton",
    ):
        monkeypatch.setattr(f"opt_kernels.{module}.launching_on", watched)
    monkeypatch.setattr(InterpretedFunction, "__getitem__", getitem)
    launch()
    assert not outside


def test_a_gpu_is_made_the_current_one() -> None:
    guard = launching_on(torch.device("cuda", 1))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1


@interpreted
def test_more_rounds_than_a_cache_of_64_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    upload = backend_tables.to_device

    def counted(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        built.append(1)
        return upload(host, device)

    # Not `backends.triton.scalars`: numbers that include the step are uploaded in every launch group.
    for module in ("backends.triton.launches", "matrices.muon.rounds"):
        monkeypatch.setattr(f"opt_kernels.{module}.to_device", counted)
    monkeypatch.setattr(rounds, "ROUND_NUMEL", 64)
    rule = MuonRule(backend="triton", num_ns_steps=1)
    # Works of one layout would share a stack, and so a round.
    batch = batch_of(rule, [(1, 60 + i) for i in range(70)])
    rule.update_([batch])
    assert len(built) > 140
    built.clear()
    rule.update_([batch])
    assert not built
