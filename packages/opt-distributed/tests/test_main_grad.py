"""Gradients that reach `main_grad` in unusual ways: rebinding, fused kernels, graphs of gradients, recomputation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from data_parallel_net import SHARDED, Config, Unfinished, backward, check_owned, over
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.comm import Alone
from opt_distributed.comm.threads import ThreadComm

OVERLAP = replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=20)
CONFIGS = {"replicated": Config(), "sharded": SHARDED, "overlap": OVERLAP}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


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


def expected_grads(x: Tensor, make: Callable[[], nn.Module] = make_model) -> dict[str, Tensor]:
    model = make()
    backward(loss_of(model, x.requires_grad_()))
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def rebind(ddp: DistributedDataParallel) -> None:
    for param in ddp.parameters():
        param.main_grad = param.main_grad * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", [Config(), SHARDED], ids=["replicated", "sharded"])
@pytest.mark.parametrize("moment", ["before the reduction", "between microbatches", "after the reduction"])
def test_a_rebound_main_grad_is_the_gradient_that_is_reduced(config: Config, moment: str) -> None:
    """The step went on to read the buffer, so the parameter was never updated again."""

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(config, make_model(), groups=over(comm))
        for iteration in range(2):
            part = inputs(iteration).chunk(2)[comm.rank]
            if moment == "between microbatches":
                with ddp.no_sync():
                    backward(loss_of(ddp, part))
                rebind(ddp)
            backward(loss_of(ddp, part))
            if moment == "before the reduction":
                rebind(ddp)
            ddp.finish_grad_sync()
            if moment == "after the reduction":
                rebind(ddp)
                ddp.finish_grad_sync()  # as the step does
            factor = 3.0 if moment == "between microbatches" else 2.0  # twice the first microbatch, and the second
            check_owned(ddp, {name: factor * grad for name, grad in expected_grads(inputs(iteration)).items()})
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


def test_gradients_on_the_wire_can_neither_be_scaled_nor_rebound() -> None:
    config = replace(SHARDED, reduce_scatter_with_fp32_accumulation=True)
    ddp = DistributedDataParallel(config, make_model(), groups=over(Unfinished()))
    backward(loss_of(ddp, inputs(0)))
    ddp.start_grad_sync()
    with pytest.raises(GradientError, match=r"cannot be scaled while they are being reduced; call finish_grad_sync"):
        ddp.scale_gradients(0.5)
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
    # In a reduction it is an objection, which the peers of this rank hear of.
    kind = GradientError if in_backward else UnusableGradientError
    with pytest.raises(kind, match=r"main_grad of 0.weight .*a tensor of shape \(6, 4\)"):
        backward(loss_of(ddp, inputs(0))) if in_backward else ddp.finish_grad_sync()


@pytest.mark.parametrize(
    ("added", "zero_out", "expected"),
    [(False, False, 0.5), (True, False, 0.0), (True, True, 0.5)],
    ids=["not fused", "fused, returns garbage", "fused, returns zeros to be added"],
)
def test_what_a_fused_kernel_has_added_is_not_added_twice(added: bool, zero_out: bool, expected: float) -> None:
    """In the dtype of `main_grad`. The next iteration has no fused kernel, and a `grad` that a failed backward left."""
    config = replace(SHARDED, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, nn.Linear(3, 1, bias=False, dtype=torch.bfloat16), groups=over(Alone()))
    weight: Any = ddp.module.weight
    weight.grad_added_to_main_grad = added
    weight.zero_out_wgrad = zero_out
    backward(ddp(torch.full((1, 3), 0.5, dtype=torch.bfloat16)).sum())
    assert (weight.main_grad.tolist(), weight.main_grad.dtype, weight.grad) == ([[expected] * 3], torch.float32, None)
    weight.grad = torch.ones_like(weight)
    ddp.zero_grad_buffer()
    weight.zero_out_wgrad = False
    backward(ddp(torch.ones(1, 3, dtype=torch.bfloat16)).sum())
    assert weight.main_grad.tolist() == [[1.0] * 3]


@configs
def test_backward_with_create_graph_accumulates_gradients(config: Config) -> None:
    ddp = DistributedDataParallel(config, make_model(), groups=over(Alone()))
    for iteration in range(3):
        backward(loss_of(ddp, inputs(iteration)), create_graph=True)
        ddp.finish_grad_sync()
        check_owned(ddp, expected_grads(inputs(iteration)))
        ddp.zero_grad_buffer()
        ddp.zero_grad_buffer()  # twice is once


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
@configs
def test_modules_reused_under_checkpointing_have_correct_grads(config: Config, use_reentrant: bool) -> None:
    def build() -> nn.Module:
        return filled(Recomputed(use_reentrant))

    wanted = [expected_grads(inputs(iteration), build) for iteration in range(3)]

    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(config, build(), groups=over(comm))
        for iteration, grads in enumerate(wanted):
            backward(loss_of(ddp, inputs(iteration).chunk(2)[comm.rank].requires_grad_()))
            ddp.finish_grad_sync()
            check_owned(ddp, grads)
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)
