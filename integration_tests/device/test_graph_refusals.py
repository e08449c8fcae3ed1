"""Steps as graphs that cannot be captured, and faults in a capture or replay."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredRank, HostReadError, ReleasedError, run_deferred
from graph_training import ALONE, FLAT, built_with_graphs, schedule, train, train_with_graphs
from on_device import SHAPES, SIZE, equal, launched
from parity import Numbers, grads_of, roles_over
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import UnusableGradientError
from opt_distributed.comm import GraphError
from opt_distributed.comm.device import HostCopy
from opt_distributed.pieces.piece import StepCount
from opt_distributed.step import capture
from opt_distributed.step.scaler import DynamicScaler
from opt_kernels.backends import HyperTable
from opt_kernels.hooks import RelativeUpdate
from opt_stack import Optimizer, get_optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)


def numbers_are_frozen(patch: pytest.MonkeyPatch) -> None:
    refresh = HyperTable.refresh_
    patch.setattr(HyperTable, "refresh_", lambda table, groups: None if table.groups else refresh(table, groups))


def counts_are_new_tensors(patch: pytest.MonkeyPatch) -> None:
    def advance(count: StepCount, skip: Tensor) -> None:
        count._next, count.known = count.next() + ~skip, None

    patch.setattr(StepCount, "advance", advance)


def a_loss_scale_is_a_new_tensor(patch: pytest.MonkeyPatch) -> None:
    update = DynamicScaler.update

    def updated(scaler: DynamicScaler, found_inf: Any, *, unless: Any = None) -> None:
        update(scaler, found_inf, unless=unless)
        assert scaler._on_device is not None
        scaler._on_device = scaler._on_device.clone()

    patch.setattr(DynamicScaler, "update", updated)


def gradients_stay_where_autograd_puts_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture._StableGrads, "kept", lambda grads, ready: ready)


def addresses_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    gradients_stay_where_autograd_puts_them(patch)
    patch.setattr(capture, "addresses", lambda tensors: ())


def results_are_read_from_the_graph(patch: pytest.MonkeyPatch) -> None:
    def init(copy: HostCopy, tensor: Tensor, device: Any) -> None:
        copy._copy, copy._event = tensor, None

    patch.setattr(HostCopy, "__init__", init)


def a_count_is_read_in_the_capture(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepCount, "next", lambda count: int(count) + 1)


FAULTS = (
    numbers_are_frozen,
    counts_are_new_tensors,
    a_loss_scale_is_a_new_tensor,
    gradients_stay_where_autograd_puts_them,
    addresses_are_not_looked_at,
    results_are_read_from_the_graph,
    a_count_is_read_in_the_capture,
)


@pytest.mark.parametrize("plant", FAULTS)
def test_a_fault_in_a_replay_is_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = run_threads(1, lambda comm: train(ALONE, comm, schedule))
    plant(monkeypatch)
    try:
        ((found, did),) = run_deferred(1, partial(train_with_graphs, ALONE), seed=0)
    except (GraphError, HostReadError, ReleasedError):
        return
    assert not equal(found, expected) or did[-1] != "replay"


def objecting(one: DeferredRank, *, object_: Any) -> list[tuple[str, str, bool]]:
    """Of a replay to which rank 1 objects, and of the step after it: the error of the step, that of its result, and
    whether any weight moved."""
    model, optimizer = built_with_graphs(replace(FLAT, numbers=Numbers.FP32), one)
    found = []
    for step in (0, 2, 3, 5, 6):
        before = [param.detach().clone() for param in model.parameters()]
        grads = grads_of(step, one.rank, SIZE, SHAPES)
        optimizer.scale_loss(model(grads)).backward()
        undo = object_(model, optimizer) if step == 5 and one.rank == 1 else None
        of_step = of_result = ""
        try:
            result = optimizer.step()
        except (ValueError, UnusableGradientError) as error:
            of_step = type(error).__name__
        else:
            try:
                result.success  # noqa: B018  # read, which raises
            except (ValueError, UnusableGradientError) as error:
                of_result = type(error).__name__
        if undo is not None:
            undo()
        optimizer.zero_grad()
        found.append((of_step, of_result, not all(map(torch.equal, before, model.parameters()))))
    return found[-2:]


def other_lr(model: nn.Module, optimizer: Optimizer) -> Any:
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], 1.0

    def undo() -> None:
        group["lr"] = lr

    return undo


def moved(model: nn.Module, optimizer: Optimizer) -> Any:
    data = model.first.weight.data
    model.first.weight.data = data.clone()

    def undo() -> None:
        model.first.weight.data = data

    return undo


def no_gradient(model: nn.Module, optimizer: Optimizer) -> Any:
    model.router.weight.grad = None


@pytest.mark.parametrize(
    ("object_", "error"), [(other_lr, "HyperError"), (moved, "StorageError"), (no_gradient, "UnusableGradientError")]
)
def test_an_objection_to_a_replay_stops_it_on_every_rank(object_: Any, error: str) -> None:
    """The next step continues, as a replay if nothing that the capture froze has changed."""
    for seed in range(3):
        first, second = run_deferred(SIZE, partial(objecting, object_=object_), seed=seed)
        assert first == [("", error, False), ("", "", True)]
        assert second == first


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rule that reads": (
        {"optimizer": "soap"},
        "optimizer_cuda_graph=True with optimizer='soap': its update reads values on the host, or the rule does "
        "not declare capturable=True; use another rule, or set it to False",
    ),
    "hooks with memory of their own": (
        {"hooks": (RelativeUpdate(),)},
        "optimizer_cuda_graph=True with hooks (RelativeUpdate(),) of 'adam', which allocate memory in every "
        "step; use hooks that are part of a formula (CautiousDecay, CoupledDecay or LrDecoupledDecay of an "
        "elementwise rule), or set it to False",
    ),
    "fp16 main values": (
        {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
        "optimizer_cuda_graph=True with main_params_dtype=torch.float16, whose values are decoded to new memory at "
        "every step; use remainders or fp32 main values, or set it to False",
    ),
    "parameters in fp8": (
        {"bf16": True, "fp8_recipe": "delayed"},
        "OptimizerConfig: fp8_recipe='delayed': excludes optimizer_cuda_graph: scales are exchanged between update "
        "and gather; set only one of them",
    ),
    "gathers within the step": (
        {
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "overlap_param_gather_with_optimizer_step": True,
        },
        "OptimizerConfig: overlap_param_gather_with_optimizer_step=True: excludes optimizer_cuda_graph: a captured "
        "step is a single call; set only one of them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    fields, message = REFUSED[name]

    def build(one: DeferredRank) -> None:
        options = {name: value for name, value in fields.items() if name != "hooks"}
        config = OptimizerConfig(lr=0.1, optimizer_cuda_graph=True, **options)
        model = nn.Linear(4, 4, bias=False).to(torch.bfloat16 if config.bf16 else torch.float32)
        hooks = fields.get("hooks", ())
        get_optimizer(config, [model], {}, pg_collection=roles_over(one.comm), hooks=hooks)

    def rank_main(one: DeferredRank) -> str:
        with pytest.raises(ConfigError) as caught:
            build(one)
        return str(caught.value)

    assert run_deferred(1, rank_main, seed=0) == [message]


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ConfigError) as caught:
        get_optimizer(OptimizerConfig(lr=0.1, optimizer_cuda_graph=True), [nn.Linear(2, 2)])
    message = "optimizer_cuda_graph=True: graphs on device 'cpu': only cuda devices have them; run without"
    assert str(caught.value) == message
