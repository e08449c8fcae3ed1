"""Gradients that reach `main_grad` in unusual ways: rebinding, graphs of gradients, recomputation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from data_parallel_net import Unfinished, over
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opt_config import DistributedDataParallelConfig
from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, ParamAndGradBuffer
from opt_distributed.comm import Alone
from opt_distributed.comm.threads import ThreadComm

REPLICATED = DistributedDataParallelConfig()
SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True)
OVERLAP = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=20
)
CONFIGS = {"replicated": REPLICATED, "sharded": SHARDED, "overlap": OVERLAP}


def backward(loss: Tensor, **kwargs: bool) -> None:
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]


def filled(model: nn.Module) -> nn.Module:
    """Writes the parameters: the same numbers on every rank, although ranks are threads and share torch's generator."""
    numbers = torch.Generator().manual_seed(7)
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=numbers, dtype=torch.float64) / 2
    return model


def make_model() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def inputs(iteration: int) -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(iteration))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def expected_grads(x: Tensor) -> dict[str, Tensor]:
    model = make_model()
    names, params = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_of(model, x), params), strict=True))


def check_owned(ddp: DistributedDataParallel, expected: dict[str, Tensor], *, factor: float = 1.0) -> None:
    """Compares every element that this rank owns."""
    for buffer in ddp.synced_buffers:
        for piece in buffer.owned():
            want = factor * expected[piece.id.name].flatten()[piece.of_param]
            torch.testing.assert_close(buffer.grad(piece.id, piece.of_param).flatten(), want, rtol=1e-12, atol=1e-14)


# --- main_grad is bound to another tensor --------------------------------------------------------------------


@pytest.mark.parametrize("config", [REPLICATED, SHARDED], ids=["replicated", "sharded"])
@pytest.mark.parametrize("moment", ["before the reduction", "between microbatches", "after the reduction"])
def test_a_rebound_main_grad_is_the_gradient_that_is_reduced(
    config: DistributedDataParallelConfig, moment: str
) -> None:
    """The step went on to read the buffer, so the parameter was never updated again."""

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(config, make_model(), groups=over(comm))
        for iteration in range(2):
            x = inputs(iteration)
            parts = x.chunk(2)
            factor = 2.0
            if moment == "between microbatches":
                with ddp.no_sync():
                    backward(loss_of(ddp, parts[comm.rank]))
                rebind(ddp)
                factor = 3.0  # twice the first microbatch, and the second
            backward(loss_of(ddp, parts[comm.rank]))
            if moment == "before the reduction":
                rebind(ddp)
            ddp.finish_grad_sync()
            if moment == "after the reduction":
                rebind(ddp)
                ddp.finish_grad_sync()  # as the step does
            check_owned(ddp, expected_grads(x), factor=factor)
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


def rebind(ddp: DistributedDataParallel) -> None:
    for param in ddp.parameters():
        param.main_grad = param.main_grad * 2  # type: ignore[attr-defined]


def test_a_main_grad_that_is_rebound_on_the_wire_is_refused() -> None:
    config = replace(SHARDED, reduce_scatter_with_fp32_accumulation=True)
    ddp = DistributedDataParallel(config, make_model(), groups=over(Unfinished()))
    backward(loss_of(ddp, inputs(0)))
    ddp.start_grad_sync()
    rebind(ddp)
    with pytest.raises(GradientError, match=r"main_grad of 2.bias was replaced while .*finish_grad_sync\(\) before"):
        ddp.finish_grad_sync()


@pytest.mark.parametrize("value", [None, torch.zeros(2), "absent"], ids=["None", "another shape", "deleted"])
@pytest.mark.parametrize("in_backward", [True, False], ids=["next backward", "reduction"])
def test_a_main_grad_that_cannot_be_a_gradient_is_refused(value: object, in_backward: bool) -> None:
    ddp = DistributedDataParallel(SHARDED, make_model(), groups=over(Alone()))
    weight = ddp.module[0].weight  # type: ignore[index]
    if value == "absent":
        del weight.main_grad
    else:
        weight.main_grad = value
    with pytest.raises(GradientError, match=r"main_grad of 0.weight .*a tensor of shape \(6, 4\)"):
        backward(loss_of(ddp, inputs(0))) if in_backward else ddp.finish_grad_sync()


# --- graphs of gradients, recomputation -------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_backward_that_makes_a_graph_of_its_gradients_accumulates_them(
    config: DistributedDataParallelConfig,
) -> None:
    ddp = DistributedDataParallel(config, make_model(), groups=over(Alone()))
    for iteration in range(3):
        x = inputs(iteration)
        backward(loss_of(ddp, x), create_graph=True)
        ddp.finish_grad_sync()
        check_owned(ddp, expected_grads(x))
        ddp.zero_grad_buffer()


class Recomputed(nn.Module):
    """A layer used twice, each time recomputed in backward."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.inner = make_model()
        self.back = nn.Linear(3, 4, bias=False, dtype=torch.float64)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.back(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))
        return x


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_module_used_twice_under_activation_checkpointing_has_the_gradients_of_one_process(
    config: DistributedDataParallelConfig, use_reentrant: bool
) -> None:
    def build() -> nn.Module:
        return filled(Recomputed(use_reentrant))

    def expected(x: Tensor) -> dict[str, Tensor]:
        model = build()
        backward(loss_of(model, x.requires_grad_()))
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    wanted = [expected(inputs(iteration)) for iteration in range(3)]

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(config, build(), groups=over(comm))
        for iteration, grads in enumerate(wanted):
            backward(loss_of(ddp, inputs(iteration).chunk(2)[comm.rank].requires_grad_()))
            ddp.finish_grad_sync()
            check_owned(ddp, grads)
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


# --- calls that change nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [REPLICATED, replace(REPLICATED, overlap_grad_reduce=True)], ids=["plain", "overlap"]
)
def test_asking_for_gathers_of_what_is_not_sharded_changes_nothing(config: DistributedDataParallelConfig) -> None:
    """The second call, after a reduction, was an IndexError."""
    ddp = DistributedDataParallel(config, make_model(), groups=over(Alone()))
    for iteration in range(2):
        before = [param.detach().clone() for param in ddp.parameters()]
        ddp.start_param_sync(force_sync=iteration == 1)
        ddp.finish_param_sync()
        assert all(torch.equal(one, other) for one, other in zip(before, ddp.parameters(), strict=True))
        backward(loss_of(ddp, inputs(iteration)))
        ddp.finish_grad_sync()
        check_owned(ddp, expected_grads(inputs(iteration)))
        ddp.zero_grad_buffer()


def test_zeroing_twice_is_zeroing_once() -> None:
    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(OVERLAP, make_model(), groups=over(comm))
        for iteration in range(3):
            ddp.zero_grad_buffer()
            ddp.zero_grad_buffer()
            x = inputs(iteration)
            backward(loss_of(ddp, x.chunk(2)[comm.rank]))
            ddp.finish_grad_sync()
            check_owned(ddp, expected_grads(x))
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


BUILD_ERRORS: dict[str, Callable[[], Exception]] = {
    "out of memory": lambda: torch.OutOfMemoryError("no memory for the gradients"),
    "an error of the backend": lambda: RuntimeError("no device"),
}


@pytest.mark.parametrize("make_error", BUILD_ERRORS.values(), ids=BUILD_ERRORS.keys())
def test_any_error_of_one_rank_while_building_reaches_every_rank(
    make_error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks waited for it until the group's timeout."""
    failing = nn.Linear(4, 4)
    build = ParamAndGradBuffer.__init__

    def build_or_fail(self: ParamAndGradBuffer, layout: Any, params: Mapping[Any, nn.Parameter], **kwargs: Any) -> None:
        if any(param is failing.weight for param in params.values()):
            raise make_error()
        build(self, layout, params, **kwargs)

    monkeypatch.setattr(ParamAndGradBuffer, "__init__", build_or_fail)

    def rank_main(comm: ThreadComm) -> str:
        try:
            DistributedDataParallel(SHARDED, failing if comm.rank == 1 else nn.Linear(4, 4), groups=over(comm))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    error = make_error()
    other, failed = run_threads(2, rank_main)
    assert failed == f"{type(error).__name__}: {error}"
    assert other == f"LayoutError: rank 1 refused: {failed}"
