"""State on the host of a device that runs its work later, which is written, saved, evaluated and clipped there; and
`offload_to_cpu` and `restore_from_cpu`: where the state is, that it is complete afterwards, and what must wait.

The bits are those of a CPU. Ordinary steps: `device/test_step_on_device.py`. More orders at night.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import cut_ranks
import pytest
import torch
from cut_ranks import EVEN, mark_parts
from fake_accelerator import DeferredComm, DeferredRank, run_deferred
from on_device import (
    ALL,
    FLAT,
    HALF,
    NUM_ORDERS,
    OVERLAPS,
    SHAPES,
    SIZE,
    STEPS,
    STREAMED,
    LaunchedRule,
    Trained,
    assert_bits_of_a_cpu,
    built,
    iterate,
    launch_rules_,
    launched,
    layouts,
    outcome,
    queued,
    with_copies,
)
from parity import Case, Net, Numbers, Spread, Wrapping, grads_of, roles_over
from tiers import NIGHT
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_distributed.comm import device as devices
from opt_distributed.pieces import Ready, streamed
from opt_distributed.step import Unit
from opt_kernels.hooks import ClipUpdateRms
from opt_kernels.works import Batch, Works
from opt_stack import Optimizer, QKClip, get_optimizer
from opt_stack.building import units
from opt_stack.qk_clip import fused_qkv

pytestmark = pytest.mark.usefixtures(launched.__name__)

OFFLOADS = (ALL | OVERLAPS, HALF | OVERLAPS, STREAMED | OVERLAPS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy each piece separately, so that copies and updates interleave."""
    monkeypatch.setattr(units, "PART_NUMEL", 1)
    monkeypatch.setattr(streamed, "RUN_NUMEL", 1)


PRECISIONS = [Numbers.FP32, Numbers.BF16, Numbers.REMAINDER]
every_precision = pytest.mark.parametrize("numbers", PRECISIONS, ids=lambda numbers: numbers.value)


@every_precision
def test_users_writes_count_and_local_state_is_saved_and_loaded(numbers: Numbers) -> None:
    """Through `.data`, which no version counter sees; where mains are a copy, `reload_model_params` announces it."""

    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = []
        for step in (0, 2):
            results.append(iterate(model, optimizer, step, comm))
            for param in model.parameters():
                param.data.mul_(0.5)
            if numbers is Numbers.BF16:
                optimizer.reload_model_params()
        saved = with_copies(optimizer.state_dict())
        weights = [param.detach().clone() for param in model.parameters()]
        iterate(model, optimizer, 3, comm)
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                if param.dtype is torch.float32:  # others are written with their main values
                    param.copy_(value)
        optimizer.load_state_dict(saved)
        results.append(iterate(model, optimizer, 4, comm))
        for param in optimizer.state:
            optimizer.state[param] = {}
        results.append(iterate(model, optimizer, 5, comm))
        return outcome(model, optimizer, results)

    assert_bits_of_a_cpu(replace(FLAT, numbers=numbers), program, on_device=OFFLOADS)


def evaluated(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    results = [iterate(model, optimizer, step, comm) for step in (0, 2)]
    optimizer.eval()
    shown = [param.detach().clone() for param in model.parameters()]
    optimizer.train()
    found = outcome(model, optimizer, results)
    assert not all(map(torch.equal, shown, found.weights))
    return found._replace(weights=[*shown, *found.weights])


@every_precision
def test_weights_to_evaluate_with_come_from_the_host(numbers: Numbers) -> None:
    assert_bits_of_a_cpu(replace(FLAT, rule="schedule_free", numbers=numbers), evaluated, on_device=OFFLOADS)


def clipped(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """A head of one rank is clipped after each step, also after the one that overflowed."""
    qkv = next(param for name, param in model.named_parameters() if "qkv" in name)
    clip = QKClip(optimizer, [fused_qkv(qkv, num_heads=2, head_dim=2)], threshold=100.0)
    results = []
    for step in range(STEPS):
        results.append(iterate(model, optimizer, step, comm))
        assert clip([torch.tensor([3.0, 250.0 if comm.rank else 2.0])]) == 250.0
    return outcome(model, optimizer, results)


CLIPPED = [
    replace(FLAT, numbers=Numbers.BF16, wrapping=Wrapping.OVERLAP),
    replace(FLAT, numbers=Numbers.FP32),
    replace(FLAT, numbers=Numbers.REMAINDER, spread=Spread.REPLICATED),
    replace(FLAT, rule="muon", spread=Spread.WHOLE, wrapping=Wrapping.WRAPPED),
]


@pytest.mark.parametrize("case", CLIPPED, ids=str)
def test_qk_clip_has_the_bits_of_a_cpu_wherever_state_is(case: Case) -> None:
    assert_bits_of_a_cpu(replace(case, clips=False), clipped, on_device=({}, HALF, ALL | OVERLAPS, STREAMED | OVERLAPS))


MATRICES = [{"optimizer": "muon", "muon_tp_mode": mode} for mode in ("distributed", "duplicated")]


SOAP = {"optimizer": "soap"}


def train_parts(fields: dict[str, Any], tp: Comm) -> list[Tensor]:
    config = OptimizerConfig(lr=0.02, clip_grad=0.0, muon_fp32_matmul_prec="highest", **fields)
    net = mark_parts(cut_ranks.Net(EVEN, 0), tp)
    optimizer = get_optimizer(config, [net], {}, pg_collection=roles_over(tp=tp))
    for step in range(STEPS):
        grads = mark_parts(cut_ranks.Net(EVEN, 1 + step), tp).parameters()
        for param, grad in zip(net.parameters(), grads, strict=True):
            param.grad = grad.detach()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("fields", [*MATRICES, SOAP], ids=["distributed", "duplicated", "soap"])
def test_matrices_in_parts_are_gathered_through_the_device(fields: dict[str, Any]) -> None:
    expected = run_threads(2, partial(train_parts, fields))
    streams = [] if fields is SOAP else [STREAMED | OVERLAPS, STREAMED]  # this device cannot decompose later
    for seed, offload in enumerate([OFFLOADS[0], *streams] * NUM_ORDERS):
        run = partial(train_parts, {**fields, **offload})
        assert_equal(run_deferred(2, lambda one, run=run: run(one.comm), seed=seed), expected)


class AtOnce(devices.Device):
    """An accelerator whose operations are complete when they return."""

    is_asynchronous = True


def test_factors_of_soap_are_streamed_where_they_are_owned(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**SOAP, "soap_split_qkv": True}
    expected = run_threads(2, partial(train_parts, fields))
    monkeypatch.setattr(devices, "device_of", lambda device: AtOnce(device))
    streamed_ = Mock(wraps=streamed.runs_of_ready)
    monkeypatch.setattr("opt_distributed.step.unit.runs_of_ready", streamed_)
    assert_equal(run_threads(2, partial(train_parts, {**fields, **STREAMED})), expected)
    assert streamed_.call_count >= 2 * STEPS


STREAMS = (STREAMED | OVERLAPS, STREAMED, STREAMED | OVERLAPS | {"optimizer_offload_fraction": 0.5})


@pytest.mark.parametrize("case", layouts(), ids=str)
def test_state_that_the_device_updates_has_bits_of_no_offload(case: Case) -> None:
    assert_bits_of_a_cpu(case, on_device=STREAMS, num_orders=200 if NIGHT else 3)


@pytest.mark.parametrize("number", ["main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"])
def test_narrow_mains_and_moments_are_streamed_as_codes(number: str) -> None:
    """The last is rounded by the noise of its elements: a shard that begins in a parameter took others'."""
    narrow = {"use_precision_aware_optimizer": True, number: torch.float16}
    assert_bits_of_a_cpu(replace(FLAT, numbers=Numbers.BF16), on_device=STREAMS, num_orders=3, **narrow)


def test_at_most_two_runs_are_on_the_device() -> None:
    """In two blocks of the largest run, beside which the device holds nothing but parameters and gradients."""

    def rank_main(one: DeferredRank) -> None:
        model, optimizer = built(replace(FLAT, numbers=Numbers.BF16, size=1), one.comm, **STREAMED, **OVERLAPS)
        launch_rules_(optimizer)
        blocks: dict[int, int] = {}
        lengths = []
        with pytest.MonkeyPatch.context() as patch:
            fetched = streamed.Streamed._fetched

            def noted(host: Any, ready: Ready, memory: Tensor, stream: Any) -> Any:
                blocks[memory.data_ptr()] = memory.nbytes
                lengths.append(sum(map(streamed._num_bytes, streamed.kept_tensors(ready.pieces))))
                return fetched(host, ready, memory, stream)

            patch.setattr(streamed.Streamed, "_fetched", noted)
            iterate(model, optimizer, 0, one.comm)
        assert len(lengths) == len(list(model.parameters()))
        assert list(blocks.values()) == [max(lengths)] * 2
        assert all(map(one.device.memory.is_on_host, state_of(optimizer)))

    run_deferred(1, rank_main, seed=0)


def test_runs_before_an_error_have_returned_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host read main values while they were on their way back."""
    update_ = Unit._update_fetched_

    def first_main(one: DeferredRank, *, fails: bool) -> Tensor:
        model, optimizer = built(replace(FLAT, numbers=Numbers.BF16, size=1), one.comm, **STREAMED, **OVERLAPS)
        launch_rules_(optimizer)
        runs: list[Ready] = []

        def updated(unit: Unit, ready: Ready, *given: Any) -> None:
            runs.append(ready)
            if fails and len(runs) == 2:
                raise RuntimeError("the second run")
            update_(unit, ready, *given)

        monkeypatch.setattr(Unit, "_update_fetched_", updated)
        with pytest.raises(RuntimeError, match="the second run") if fails else nullcontext():
            iterate(model, optimizer, 0, one.comm)
        pieces = (piece for unit in optimizer.stepper.units for piece in unit.pieces)
        return next(piece for piece in pieces if piece.id == runs[0].pieces[0].id).main.value().clone()

    [expected] = run_deferred(1, partial(first_main, fails=False), seed=0, eagerness=0.0)
    [found] = run_deferred(1, partial(first_main, fails=True), seed=0, eagerness=0.0)
    assert torch.equal(found, expected)


def test_memory_that_an_error_frees_waits_for_the_side_stream() -> None:
    """Exchanges that were under way sent what the next owner of their memory had written."""

    def copied(one: DeferredRank) -> Tensor:
        arrived = torch.zeros(4)

        def failing() -> None:
            sent = torch.ones(4)
            side = one.device.side_stream()
            side.wait_event(one.device.current_stream().record_event())
            with one.device.on(side):
                arrived.copy_(sent)
            raise ValueError("a later run")

        with pytest.raises(ValueError, match="a later run"), one.device.joining_side_stream():
            failing()
        torch.ones(4)  # in the memory of `sent`
        one.device.synchronize()
        return arrived

    for seed in range(8):
        [found] = run_deferred(1, copied, seed=seed, eagerness=0.0)
        assert found.eq(1).all(), seed


def test_hooks_are_refused_where_the_device_streams_the_state() -> None:
    with pytest.raises(ConfigError, match="optimizer_offload_compute='device': hooks of 'adam' read norms"):
        built(replace(FLAT, size=1), Alone(), hooks=(ClipUpdateRms(1.0),), **STREAMED)


BF16 = replace(FLAT, numbers=Numbers.BF16)


class LaunchedOnMemory(LaunchedRule):
    """A kernel is launched on memory; moving its tensors later does not affect it."""

    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        columns = [
            {name: getattr(works, name) for name in ("grads", "mains", "states", "outs", "remainders")}
            for _, works in batches
        ]

        def kernel(*held: Any) -> None:
            launched = [Batch(hyper, Works(matrices=None, **of)) for (hyper, _), of in zip(batches, held, strict=True)]
            self._rule.update_(launched, grad_scale=grad_scale, skip=skip)

        queued("update", kernel, *columns)


launch_on_memory = partial(launch_rules_, kind=LaunchedOnMemory)


def state_of(optimizer: Optimizer) -> list[Tensor]:
    pieces = [piece for unit in optimizer.stepper.units for piece in unit.pieces]
    return [tensor for piece in pieces for tensor in (*piece.state.values(), *piece.main.kept.values())]


def moving(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """The state goes to the host and comes back between every two steps, and nothing waits for that."""
    results = []
    for step in range(STEPS):
        results.append(iterate(model, optimizer, step, comm))
        if not isinstance(comm, DeferredComm):
            continue
        is_on_host = comm.device.memory.is_on_host
        with comm.device.host_reads_forbidden():
            optimizer.offload_to_cpu()
            assert all(map(is_on_host, state_of(optimizer)))
            torch.zeros(64).add_(1.0)  # others use the memory meanwhile
            optimizer.restore_from_cpu()
        assert not any(map(is_on_host, state_of(optimizer)))
    return outcome(model, optimizer, results)


@pytest.mark.parametrize(
    ("numbers", "recipe"), [*((numbers, None) for numbers in Numbers), (Numbers.BF16, "blockwise")]
)
def test_training_goes_on_with_the_same_bits(numbers: Numbers, recipe: str | None) -> None:
    case = replace(FLAT, numbers=numbers)
    assert_bits_of_a_cpu(case, moving, num_orders=4, prepare=launch_on_memory, fp8_recipe=recipe)


def after_a_step(run: Callable[[DeferredRank, nn.Module, Optimizer], Any], size: int = 1, **fields: Any) -> Any:
    """What `run` returns, on rank 0, of a model that has made one step on a device."""

    def rank_main(one: DeferredRank) -> Any:
        model, optimizer = built(replace(BF16, size=size), one.comm, **fields)
        launch_on_memory(optimizer)
        iterate(model, optimizer, 0, one.comm)
        return run(one, model, optimizer)

    return run_deferred(size, rank_main, seed=0)[0]


def test_state_is_where_the_last_call_put_it_and_params_stay() -> None:
    """Calls may come twice. One for which memory runs out leaves the state where it is, and may be made again."""

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise MemoryError

    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        before = [tensor.clone() for tensor in state_of(optimizer)]
        params = [*map(Tensor.data_ptr, model.parameters())]
        was_on_host = False
        moves = {True: optimizer.offload_to_cpu, False: optimizer.restore_from_cpu}
        for goes in (False, True, True, False, False, True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*((one.device, "host_empty") if goes else (torch, "empty")), full)
                with pytest.raises(MemoryError) if goes != was_on_host else nullcontext():
                    moves[goes]()
            assert {one.device.memory.is_on_host(tensor) for tensor in state_of(optimizer)} == {was_on_host}
            storages = [tensor.untyped_storage() for tensor in state_of(optimizer)]
            moves[goes]()
            assert {one.device.memory.is_on_host(tensor) for tensor in state_of(optimizer)} == {goes}
            one.device.synchronize()
            if goes > was_on_host:  # device memory is given back: only `storages` holds it
                assert {torch._C._storage_Use_Count(storage._cdata) for storage in storages} == {1}
            was_on_host = goes
        assert all(map(torch.equal, state_of(optimizer), before))
        assert [*map(Tensor.data_ptr, model.parameters())] == params

    after_a_step(run)


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    """Of two dtypes, at odd places and up to an odd end, and transposed."""

    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        piece = next(p for unit in optimizer.stepper.units for p in unit.pieces if p.id.name.startswith("qkv"))
        tensors = [piece.state["exp_avg"], piece.state["exp_avg_sq"], piece.main.kept.get("main")]
        memory = torch.arange(257).to(torch.uint8)
        flat = memory[:256].view(torch.float32)
        flat.copy_(torch.arange(64.0))
        views = [flat[3:51].view(4, 12).T, flat[1:49].view(12, 4), memory[209:].view(12, 4)]
        for tensor, view in zip(tensors, views, strict=True):
            tensor.data = view
        del memory, flat, views, view
        before = [tensor.clone() for tensor in tensors]
        for move in (optimizer.offload_to_cpu, optimizer.restore_from_cpu):
            move()
            one.device.synchronize()
            assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
            assert [tensor.stride() for tensor in tensors] == [(1, 12), (4, 1), (4, 1)]
        assert all(map(torch.equal, tensors, before))

    after_a_step(run)


def test_what_is_on_the_host_already_stays_as_it_is() -> None:
    """Half of the state belongs to units of the host."""

    def run(one: DeferredRank, model: nn.Module, optimizer: Optimizer) -> None:
        is_on_host = one.device.memory.is_on_host
        hosts = [tensor for tensor in state_of(optimizer) if is_on_host(tensor)]
        addresses = [tensor.data_ptr() for tensor in hosts]
        optimizer.offload_to_cpu()
        assert all(map(is_on_host, state_of(optimizer)))
        optimizer.restore_from_cpu()
        one.device.synchronize()
        assert [tensor.data_ptr() for tensor in hosts] == addresses
        assert 0 < len(hosts) == sum(map(is_on_host, state_of(optimizer)))

    after_a_step(run, SIZE, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)


REFUSED: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "prepare_grads": lambda model, optimizer: optimizer.prepare_grads(),
    "step_with_ready_grads": lambda model, optimizer: optimizer.step_with_ready_grads(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict({}),
    "sharded_state_dict": lambda model, optimizer: optimizer.sharded_state_dict({}),
    "reload_model_params": lambda model, optimizer: optimizer.reload_model_params(),
    "get_parameters": lambda model, optimizer: optimizer.get_parameters(),
    "eval": lambda model, optimizer: optimizer.eval(),
    "reading state": lambda model, optimizer: optimizer.state[next(model.parameters())],
    "writing state": lambda model, optimizer: optimizer.state.update({next(model.parameters()): {}}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_state_is_refused_until_it_is_back(name: str) -> None:
    """Also on a CPU, where offloading copies nothing."""
    net = Net(torch.bfloat16, SHAPES)
    optimizer = get_optimizer(BF16.config, [net], {}, pg_collection=roles_over(Alone()))
    net(grads_of(0, 0, 1, SHAPES)).backward()
    before = [param.detach().clone() for param in net.parameters()]
    optimizer.offload_to_cpu()
    with pytest.raises(RuntimeError, match=r"call optimizer.restore_from_cpu\(\) first"):
        REFUSED[name](net, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    optimizer.restore_from_cpu()
    assert optimizer.step().success


def test_a_captured_steps_state_stays_where_it_is() -> None:
    optimizer = get_optimizer(BF16.config, [Net(torch.bfloat16, SHAPES)], {}, pg_collection=roles_over(Alone()))
    optimizer.config.optimizer_cuda_graph = True
    with pytest.raises(ConfigError, match="optimizer_cuda_graph=True: a captured step holds the addresses"):
        optimizer.offload_to_cpu()
