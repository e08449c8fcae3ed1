"""Small models that train on the fake accelerator: the bits of a CPU, in any legal order of the work."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from fake_accelerator import DeferredComm, DeferredDevice, DeferredRank, run_deferred
from parity import Case, Net, Numbers, Spread, Wrapping, grads_of, roles_over
from tiers import NIGHT, sampled
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm
from opt_distributed.comm import device as devices
from opt_distributed.step import verdict
from opt_kernels import backends
from opt_kernels.backends import tables
from opt_kernels.backends.reference import GradStats
from opt_kernels.hooks import HookedUpdate
from opt_kernels.quantized import QuantizedTensor, quantized
from opt_kernels.works import Batch, Hyper
from opt_stack import Optimizer, StepResult, get_optimizer

NUM_ORDERS = 50 if NIGHT else 1
STEPS = 4
BAD_STEP = 1  # a gradient of one rank is infinite
SIZE = 2
SHAPES: Mapping[str, tuple[int, ...]] = {"embedding": (5, 16), "first": (32, 32), "qkv": (12, 4), "router": (3, 2)}
FLAT = Case(size=SIZE, spread=Spread.FLAT, numbers=Numbers.FP16, rule="adam", clips=True, wrapping=Wrapping.PLAIN)
# Of half, one rank's piece of a parameter may be on the device while another rank's is on the host.
HALF: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
ALL: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
STREAMED: dict[str, Any] = {**ALL, "optimizer_offload_compute": "device"}
OVERLAPS: dict[str, Any] = {"overlap_cpu_optimizer_d2h_h2d": True}

sweep_stats = verdict.grad_stats


def layouts() -> list[Case]:
    """Layouts, precisions and wrappings on `SIZE` ranks, with clipping: every pair of values; all at night."""
    chosen = sampled(list(itertools.product(Spread, Numbers, Wrapping)), lambda values: values)
    return [
        replace(FLAT, spread=spread, numbers=numbers, rule="muon" if spread is Spread.WHOLE else "adam", wrapping=wraps)
        for spread, numbers, wraps in chosen
    ]


# --- kernels as queued work -------------------------------------------------------------------------------------------


class LaunchedRule:
    """A rule whose update is one queued kernel, which takes its numbers from the device as Triton's does."""

    def __init__(self, rule: Any):
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        assert isinstance(grad_scale, Tensor) or grad_scale == 1.0  # hooks scale gradients themselves
        assert isinstance(skip, Tensor)

        def update() -> None:
            numbers = [Batch(on_host(hyper), works) for hyper, works in batches]
            given = [of_work for _, works in numbers for work in works for of_work in (work.main, work.out)]
            with ExitStack() as uncounted:  # torch does not count a kernel's writes
                for tensor in given:
                    if tensor is not None:
                        uncounted.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
                self._rule.update_(numbers, grad_scale=grad_scale, skip=skip)

        queued("update", update)


def queued(name: str, kernel: Callable[..., object], *given: Any) -> None:
    """Queue a kernel to the device of this rank, or run it on a CPU."""
    device = devices.device_of(torch.device("cpu"))
    if isinstance(device, DeferredDevice):
        device.mode.queue(name, kernel, given)
    else:
        kernel(*given)


def on_host(hyper: Hyper) -> Hyper:
    """The numbers of a row as a kernel reads them, when it runs."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        return value.item() if isinstance(value, Tensor) else value

    numbers = {field.name: plain(getattr(hyper, field.name)) for field in fields(hyper) if field.name != "own"}
    return Hyper(**numbers, own={name: plain(value) for name, value in hyper.own.items()})


def launched_stats(grads: Any, *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """The statistics as one queued kernel."""
    power = torch.empty((), dtype=torch.float64)
    counts = torch.empty(2, dtype=torch.int64)

    def kernel(power: Tensor, counts: Tensor) -> None:
        found = sweep_stats(grads, count_zeros=count_zeros, norm_type=norm_type)
        power.copy_(found.sum_of_squares)
        counts.copy_(torch.stack([found.nonfinite, found.zeros]))

    queued("grad_stats", kernel, power, counts)
    return GradStats(power, counts[0], counts[1])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "grad_stats", launched_stats)
    monkeypatch.setattr(backends, "grad_stats", launched_stats)


def launch_rules_(optimizer: Optimizer, kind: Callable[[Any], Any] = LaunchedRule) -> None:
    """Queue updates on the device as one kernel each."""
    for unit in optimizer.stepper.units:
        if unit.host is not None and unit.host.computes_on_host:
            continue
        if isinstance(unit.rule, HookedUpdate):
            unit.rule = replace(unit.rule, rule=kind(unit.rule.rule))
        else:
            unit.rule = kind(unit.rule)


def queue_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue the launches of Triton's kernels, which run under its interpreter, and report captures of graphs."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launch = interpreter.GridExecutor.__call__

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        queued("kernel", partial(launch, kernel, *args, **kwargs))

    def is_capturing(device: torch.device) -> bool:
        found = devices.device_of(device)
        return isinstance(found, DeferredDevice) and found.mode.recording is not None

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(tables, "is_capturing", is_capturing)


# --- training ---------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    weights: list[Tensor]
    results: list[tuple[Any, ...]]
    loss_scale: float
    steps: list[float]


Program = Callable[[nn.Module, Optimizer, Comm], Trained]


def built(case: Case, comm: Comm, *, hooks: Sequence[Any] = (), **changes: Any) -> tuple[nn.Module, Optimizer]:
    """The model and the optimizer of a case; `changes` are of the configuration."""
    net = Net(case.numbers.dtype, SHAPES)
    roles = roles_over(comm)
    config = replace(case.config, log_num_zeros_in_grad=True, **changes)
    ddp = case.ddp_config
    model: nn.Module = net
    if config.fp8_recipe is not None:
        net.first.weight = nn.Parameter(QuantizedTensor.of(net.first.weight.detach(), config.fp8_recipe))
        ddp = replace(ddp, fp8_param_gather=ddp.use_distributed_optimizer)
    if case.wrapping is not Wrapping.PLAIN:
        model = DistributedDataParallel(ddp, net, groups=roles, optimizer_config=config)
    if case.numbers is Numbers.FP16:
        config = replace(config, loss_scale_window=2, hysteresis=1)
    return model, get_optimizer(config, [model], {}, pg_collection=roles, hooks=hooks)


def backward(model: nn.Module, optimizer: Optimizer, step: int, comm: Comm, *, bad: bool = False) -> None:
    """If it is bad, the last rank has an infinite gradient."""
    grads = grads_of(step, comm.rank, comm.size, SHAPES)
    if bad and comm.rank == comm.size - 1:
        grads["first"][2, 3] = torch.inf
    optimizer.scale_loss(model(grads)).backward()


def zero(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(model, DistributedDataParallel):
        model.zero_grad_buffer()
    optimizer.zero_grad()


def iterate(
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    comm: Comm,
    *,
    bad_steps: Collection[int] = (BAD_STEP,),
    may_read: bool = False,
) -> StepResult:
    """One iteration. The host reads nothing from the device, unless it may, or has states."""
    may_read = may_read or optimizer.config.optimizer_cpu_offload or not isinstance(comm, DeferredComm)
    with nullcontext() if may_read else comm.device.host_reads_forbidden():
        backward(model, optimizer, step, comm, bad=step in bad_steps)
        result = optimizer.step()
        zero(model, optimizer)
    return result


def schedule(step: int, optimizer: Any) -> None:
    """All numbers of all groups change at every step."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 / (1 + step + number)
        group["weight_decay"] = 0.01 * step
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, *(0.99 - 0.01 * step for _ in group["betas"][1:]))
        if group.get("momentum"):
            group["momentum"] = 0.9 - 0.05 * step
        if "alpha" in group:
            group["alpha"] = 5.0 + step


def stored(param: Tensor) -> list[Tensor]:
    """The parameter, or its codes, scales and history."""
    fp8 = quantized(param)
    return [param] if fp8 is None else [fp8.codes, fp8.scales, *param.extra().values()]


def with_copies(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: with_copies(value) for name, value in tree.items()}
    return [with_copies(one) for one in tree] if isinstance(tree, list) else tree


def outcome(model: nn.Module, optimizer: Optimizer, results: list[StepResult]) -> Trained:
    steps = [float(state["step"]) for state in optimizer.state_dict()["state"].values()]
    if isinstance(model, DistributedDataParallel):
        model.finish_param_sync()
    weights = [tensor.detach().clone() for param in model.parameters() for tensor in stored(param)]
    return Trained(weights, [tuple(result) for result in results], float(optimizer.get_loss_scale()), steps)


def equal(found: Trained, expected: Trained) -> bool:
    same_weights = all(torch.equal(one, other) for one, other in zip(found.weights, expected.weights, strict=True))
    return same_weights and repr(found[1:]) == repr(expected[1:])


def steps(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """One of the steps overflows. No result is read before the last step is queued."""
    results = [iterate(model, optimizer, step, comm) for step in range(STEPS)]
    found = outcome(model, optimizer, results)
    assert [result[0] for result in found.results] == [step != BAD_STEP for step in range(STEPS)]
    return found


def assert_bits_of_a_cpu(
    case: Case,
    program: Program = steps,
    *,
    on_device: Sequence[Mapping[str, Any]] = ({},),
    num_orders: int = NUM_ORDERS,
    prepare: Callable[[Optimizer], None] = launch_rules_,
    eagerness: float | None = None,
    **changes: Any,
) -> None:
    """`program` gives the same on devices in some orders, each with one of the changes `on_device`, as on a CPU."""

    def rank_main(one: DeferredRank, more: Mapping[str, Any]) -> Trained:
        model, optimizer = built(case, one.comm, **more, **changes)
        prepare(optimizer)
        return program(model, optimizer, one.comm)

    expected = run_threads(case.size, lambda comm: program(*built(case, comm, **changes), comm))
    for seed in range(max(num_orders, len(on_device))):
        more = on_device[seed % len(on_device)]
        found = run_deferred(case.size, partial(rank_main, more=more), seed=seed, eagerness=eagerness)
        assert all(map(equal, found, expected)), f"seed {seed}, {more}"
