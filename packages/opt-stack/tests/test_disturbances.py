"""Everything that can happen between two steps: the next one reads and writes all tensors where they are then.

Each case runs twice: as usual, and with a twin that forgets all runs and tables of addresses before every step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from disturbances import (
    BF16,
    DISTURBED,
    FORMS,
    SHAPES,
    Disturb,
    Net,
    grad_elsewhere,
    grad_transposed,
    loaded,
    mains_elsewhere,
    memory_of_states_replaced,
    new_grads,
    nothing,
    offloaded_and_restored,
    state_elsewhere,
    weight_elsewhere,
    weight_transposed,
)
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm import device as devices
from opt_distributed.comm.device import Host
from opt_distributed.step import stats
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.rules.adam import Adam
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton import grad_stats as triton_stats
from opt_kernels.backends.triton import sweep
from opt_kernels.matrices.muon import round_tables

pytestmark = pytest.mark.needs_extra


class Asynchronous(Host):
    """A CPU that is taken for an accelerator, so that the device decides and offloading moves state."""

    is_asynchronous = True


@pytest.fixture(params=["decided on the host", "decided on the device"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "decided on the host":
        queues = Asynchronous()
        monkeypatch.setattr(devices, "device_of", lambda device: queues)
        monkeypatch.setattr(stats, "grad_stats", triton_stats.grad_stats)


def build(form: str, backend: str = "triton") -> tuple[Net, Optimizer]:
    fields = FORMS[form]
    model = Net(fields.get("params_dtype", torch.float32))
    config = OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.1, "clip_grad": 1.0, **fields})
    return model, on_backend(get_optimizer(config, [model]), backend)


def on_backend(optimizer: Optimizer, backend: str = "triton") -> Optimizer:
    for unit in optimizer.stepper.units:
        rule: Any = unit.rule
        if unit.host is None:
            unit.rule = replace(rule, backend=backend)
    return optimizer


def forget(optimizer: Optimizer) -> None:
    for unit in optimizer.stepper.units:
        unit._runs = []
    for tables in (sweep.known_calls, triton_stats.known_tables, round_tables.known_tables):
        tables.cache_clear()


def outcome(optimizer: Optimizer, params: list[nn.Parameter]) -> list[Any]:
    """Weights, mains, states and counts."""
    states = [tensor for param in params for tensor in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*params, *optimizer.get_parameters(), *states)]


def run(form: str, disturb: Disturb, *, usual: bool, in_the_middle: bool = False, backend: str = "triton") -> list[Any]:
    """Weights, states and errors over steps, with `disturb` before one of them, or between its halves."""
    model, optimizer = build(form, backend)
    params = list(model.parameters())
    found: list[Any] = []
    for step in range(5):
        new_grads([param for param in params if param.requires_grad], step)
        try:
            if step == 3 and not in_the_middle:
                disturb(optimizer, params)
            if not usual:
                forget(optimizer)
            if step == 3 and in_the_middle:
                assert not optimizer.prepare_grads()
                disturb(optimizer, params)
                if not usual:
                    forget(optimizer)
                optimizer.step_with_ready_grads()
            else:
                found.append(tuple(optimizer.step()))
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found + outcome(optimizer, params)


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("disturb", DISTURBED)
def test_a_step_reads_tensors_where_they_are(disturb: Disturb, device: None) -> None:
    form = "bfloat16 with mains"
    assert same(run(form, disturb, usual=True), run(form, disturb, usual=False))


IN_EVERY_FORM = [
    grad_elsewhere, grad_transposed, weight_elsewhere, weight_transposed, state_elsewhere, memory_of_states_replaced,
    mains_elsewhere, loaded,
]  # fmt: skip


@pytest.mark.parametrize("disturb", IN_EVERY_FORM)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "bfloat16 with mains"])
def test_the_same_in_every_form(form: str, disturb: Disturb) -> None:
    assert same(run(form, disturb, usual=True), run(form, disturb, usual=False))


@pytest.mark.skipif(not usable(), reason="no C++ compiler is installed")
@pytest.mark.parametrize("disturb", DISTURBED)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "muon"])
def test_the_same_for_compiled_sweeps(form: str, disturb: Disturb) -> None:
    found, expected = (run(form, disturb, usual=kept, backend="cpp") for kept in (True, False))
    assert same(found, expected)


IN_THE_MIDDLE = [nothing, weight_elsewhere, state_elsewhere, mains_elsewhere, loaded, offloaded_and_restored]


@pytest.mark.parametrize("disturb", IN_THE_MIDDLE)
def test_the_same_between_the_halves_of_a_step(disturb: Disturb, device: None) -> None:
    form = "bfloat16 with mains"
    assert same(run(form, disturb, usual=True, in_the_middle=True), run(form, disturb, usual=False, in_the_middle=True))


@pytest.mark.parametrize("late", range(len(SHAPES)))
@pytest.mark.parametrize("form", ["bfloat16 with mains", "muon"])
def test_a_gradient_that_comes_late_is_used(form: str, late: int, device: None) -> None:
    """One parameter has gradients only in the fourth and fifth of six steps."""

    def train(*, usual: bool) -> tuple[list[Any], list[float]]:
        model, optimizer = build(form)
        params = list(model.parameters())
        for step in range(6):
            params[late].grad = None
            new_grads([param for place, param in enumerate(params) if place != late or 3 <= step < 5], step)
            if not usual:
                forget(optimizer)
            optimizer.step()
        return outcome(optimizer, params), [float(optimizer.state[param]["step"]) for param in params]

    found, counts = train(usual=True)
    assert counts == [2.0 if place == late else 6.0 for place in range(len(SHAPES))]
    assert same(found, train(usual=False)[0])


WRAPPED = [nothing, weight_elsewhere, state_elsewhere, mains_elsewhere, loaded, offloaded_and_restored]


@pytest.mark.parametrize("disturb", WRAPPED)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "bfloat16"])
def test_the_same_where_gradients_live_in_buffers(wide: bool, disturb: Disturb, device: None) -> None:
    """ZeRO-1 with overlapping collectives, whose gradient buffers are freed and allocated again."""

    def train(*, usual: bool) -> list[Any]:
        fields = {**(BF16 if wide else {}), "use_distributed_optimizer": True}
        net = Net(fields.get("params_dtype", torch.float32))  # type: ignore[arg-type]
        wrapped = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), net)
        config = OptimizerConfig(lr=0.1, weight_decay=0.1, clip_grad=1.0, **fields)  # type: ignore[arg-type]
        optimizer = on_backend(get_optimizer(config, [wrapped]))
        params = list(net.parameters())
        found: list[Any] = []
        for step in range(5):
            if step == 3:
                for memory in [buffer.memory for buffer in buffers_of(optimizer)]:
                    memory.release_grads_()
            wrapped.zero_grad_buffer()
            wrapped(step).backward()
            try:
                if step == 2:
                    disturb(optimizer, params)
                if not usual:
                    forget(optimizer)
                found.append(tuple(optimizer.step()))
            except ValueError as error:
                found.append(str(error))
        return found + outcome(optimizer, params)

    assert same(train(usual=True), train(usual=False))


def buffers_of(optimizer: Optimizer) -> list[Any]:
    return [source for family in optimizer.stepper.families for source in family.sources]


def test_a_step_reads_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves; a step overflows, and rates change, as numbers and in place. Two groups share a launch."""
    monkeypatch.setattr(devices, "device_of", lambda device: Asynchronous())
    monkeypatch.setattr(stats, "grad_stats", triton_stats.grad_stats)

    def train(*, usual: bool) -> list[Any]:
        model, optimizer = build("bfloat16 with mains")
        params, (decayed, group) = list(model.parameters()), optimizer.param_groups
        results = []
        for step in range(10):
            new_grads(params, step)
            if not usual:
                forget(optimizer)
            if step == 4:
                params[0].grad[0, 0] = torch.inf  # type: ignore[index]
            if step == 6:
                group["lr"] = 0.05
            if step == 7:
                decayed["lr"] = torch.tensor(0.02)
            if step > 7:
                decayed["lr"].mul_(1.5)
            results.append(tuple(optimizer.step()))
        return results + outcome(optimizer, params)

    assert same(train(usual=True), train(usual=False))


def another_norm(optimizer: Optimizer) -> None:
    optimizer.stepper.limits = replace(optimizer.stepper.limits, max_norm=0.3)


def a_largest_norm(optimizer: Optimizer) -> None:
    optimizer.stepper.limits = replace(optimizer.stepper.limits, skip_above=0.1)


def another_rule(optimizer: Optimizer) -> None:
    for unit in optimizer.stepper.units:
        rule: Any = unit.rule
        unit.rule = replace(rule, formula=Adam(decoupled=False).formula)


def another_rate(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = 0.02


def a_wrong_rate(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = None


def other_counts(optimizer: Optimizer) -> None:
    for unit in optimizer.stepper.units:
        for piece in unit.pieces:
            piece.step = 7


@pytest.mark.parametrize(
    "change", [another_norm, a_largest_norm, another_rule, another_rate, a_wrong_rate, other_counts]
)
def test_a_step_follows_what_its_launches_depend_on(
    change: Callable[[Optimizer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing moves; before the fifth of eight steps, something changes that launches depend on."""
    monkeypatch.setattr(devices, "device_of", lambda device: Asynchronous())
    monkeypatch.setattr(stats, "grad_stats", triton_stats.grad_stats)

    def train(*, usual: bool, changes: bool = True) -> list[Any]:
        model, optimizer = build("bfloat16 with mains")
        params = list(model.parameters())
        results: list[Any] = []
        for step in range(8):
            new_grads(params, step)
            if step == 4 and changes:
                change(optimizer)
            if not usual:
                forget(optimizer)
            try:
                results.append(tuple(optimizer.step()))
            except ValueError as error:
                results.append(str(error))
        return results + outcome(optimizer, params)

    found = train(usual=True)
    assert same(found, train(usual=False))
    assert not same(found, train(usual=True, changes=False))


@pytest.mark.parametrize("form", FORMS)
def test_a_step_keeps_no_gradient_alive(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `zero_grad`, their memory is needed for activations."""
    monkeypatch.setattr(devices, "device_of", lambda device: Asynchronous())
    monkeypatch.setattr(stats, "grad_stats", triton_stats.grad_stats)
    model, optimizer = build(form)
    params = list(model.parameters())
    for step in range(5):
        new_grads(params, step)
        optimizer.step()
    grads = [ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None] * len(params)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_state_that_was_taken_once_may_be_moved_at_any_time(name: str) -> None:
    model, optimizer = build("bfloat16 with mains")
    params = list(model.parameters())
    taken = optimizer.state_dict()["state"][0][name]
    for step in range(4):
        if step == 3:
            taken.data = torch.zeros_like(taken)
            before = taken.data_ptr()
        new_grads(params, step)
        optimizer.step()
    assert taken.data_ptr() == before
    assert taken.any()  # the update has written the new memory
