"""Every Triton launch is made on the device of its tensors, and tables are built once, for many rounds too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from opt_kernels.backends import tables
from opt_kernels.backends.tables import launching_on
from opt_kernels.backends.triton import INTERPRETED, scalars
from opt_kernels.backends.triton import grad_stats as stats
from opt_kernels.matrices.muon import rounds
from opt_kernels.matrices.syrk import triton as syrk
from opt_kernels.rules import SGD, Adam, Lion, MuonRule, Rule
from opt_kernels.works import Batch, Hyper, Work

pytestmark = pytest.mark.needs_extra

interpreted = pytest.mark.skipif(not INTERPRETED.value, reason="watches launches of Triton's interpreter")
HYPER = Hyper(lr=1e-2, step=3)


def work_of(rule: Rule, *shape: int) -> Work:
    main = torch.randn(shape)
    return Work(grad=torch.randn(shape), main=main, state=rule.init_state(main))


def stepped(rule: Rule) -> None:
    rule.update_([Batch(HYPER, [work_of(rule, 8, 6)])])


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
    upload = tables.to_device

    def counted(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        built.append(1)
        return upload(host, device)

    # Not `backends.triton.scalars`: numbers that include the step are uploaded in every launch group.
    for module in ("backends.triton.launches", "matrices.muon.rounds"):
        monkeypatch.setattr(f"opt_kernels.{module}.to_device", counted)
    monkeypatch.setattr(rounds, "ROUND_NUMEL", 64)
    rule = MuonRule(backend="triton", num_ns_steps=1)
    # Works of one layout would share a stack, and so a round.
    batch = Batch(HYPER, [work_of(rule, 1, 60 + i) for i in range(70)])
    rule.update_([batch])
    assert len(built) > 140
    built.clear()
    rule.update_([batch])
    assert not built


def test_host_numbers_are_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    monkeypatch.setattr(tables, "is_capturing", lambda device: True)
    with pytest.raises(scalars.FrozenHyperError, match="lr, weight_decay, step of a step that is being captured"):
        scalars.scalar_block([HYPER], grad_scale=1.0, skip=None, device=kernel_device)
