"""Gradients of wrapped chunks: when they are zeroed, and which ones no step may use."""

from typing import Any

import pytest
import torch
from stack_models import assert_equal, over, weights
from torch import Tensor
from wrapped_net import LR, WIDTH, Net, backward, groups_of, inputs, loss_of, sgd, trained_alone, wrap

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone
from opt_distributed.comm.threads import ThreadComm
from opt_stack import DistributedDataParallel, get_optimizer, get_optimizer_based_on_param_groups

ZEROS = ("the optimizer", "the wrapper", "both", "the buffers")
NAMES = tuple(dict(Net().named_parameters()))


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
@pytest.mark.parametrize("zeroed_by", ZEROS)
@pytest.mark.parametrize("at_the_start", [True, False], ids=["before backward", "after the step"])
def test_zero_grad_begins_an_iteration_of_a_wrapped_model(zeroed_by: str, overlap: bool, at_the_start: bool) -> None:
    """A trainer's `optimizer.zero_grad()` left the gradients of the last iteration: the second backward was refused."""

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        ddp = wrap(comm, overlap_grad_reduce=overlap, overlap_param_gather=overlap, bucket_size=1)
        optimizer = get_optimizer(sgd(overlap_param_gather=overlap), [ddp], {}, pg_collection=over(comm))

        def zero() -> None:
            if zeroed_by in ("the optimizer", "both"):
                optimizer.zero_grad()
            if zeroed_by in ("the wrapper", "both"):
                ddp.zero_grad(set_to_none=False)
            if zeroed_by in ("the buffers", "both"):
                ddp.zero_grad_buffer()

        for step in range(3):
            if at_the_start:
                zero()
            backward(loss_of(ddp, inputs(step).chunk(2)[comm.rank]))
            assert optimizer.step().success
            if not at_the_start:
                zero()
                assert all(not bool(param.main_grad.any()) for param in ddp.module.parameters())
        return weights(ddp.module)

    for found in run_threads(2, rank_main):
        torch.testing.assert_close(found, trained_alone(NAMES, 3), rtol=0, atol=1e-7)


@pytest.mark.parametrize("replaced", [False, True], ids=["two of one chunk", "in place of another"])
def test_one_optimizers_zero_grad_leaves_the_others_gradients(replaced: bool) -> None:
    """Unless it takes the place of the other, as when more of a model is frozen from some step on."""
    ddp = wrap(Alone(), use_distributed_optimizer=False)
    net: Any = ddp.module
    of_first = [net.first.weight, net.norm.weight]
    of_second = [net.last.weight, net.norm.bias]
    first, second = (
        get_optimizer_based_on_param_groups(
            sgd(use_distributed_optimizer=False), [ddp], groups_of(params), pg_collection=over(Alone())
        )
        for params in ((net.parameters(), of_first) if replaced else (of_first, of_second))
    )
    for step in range(2):
        backward(loss_of(ddp, inputs(step)))
        for optimizer in (second,) if replaced else (first, second):
            optimizer.step()
            optimizer.zero_grad()
    names = ("first.weight", "norm.weight") if replaced else NAMES
    torch.testing.assert_close(weights(net), trained_alone(names, 2), rtol=0, atol=1e-7)


# --- gradients that must not be used -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", ["instead of backward", "after backward", "after finish_grad_sync"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_a_gradient_assigned_to_a_wrapped_param_stops_all_ranks(overlap: bool, when: str, is_sparse: bool) -> None:
    """Gradients of `torch.autograd.grad`, assigned to `param.grad`, were lost; the step reported a norm of 0. After a
    complete backward they were ignored. Sparse ones, which have no address, left the other ranks waiting."""
    of_wrapper = DistributedDataParallelConfig(overlap_grad_reduce=overlap)

    def rank_main(comm: ThreadComm) -> None:
        net = DistributedDataParallel(of_wrapper, Net(), groups=over(comm))
        optimizer = get_optimizer(OptimizerConfig(lr=LR), [net], {})
        for step in range(2):
            optimizer.zero_grad()
            backward(loss_of(net, inputs(step)))
            optimizer.step()
        before = [param.detach().clone() for param in net.parameters()]
        optimizer.zero_grad()
        if comm.rank == 1 or when != "instead of backward":
            backward(loss_of(net, inputs(2)))
        if when == "after finish_grad_sync":
            net.finish_grad_sync()
        if comm.rank == 0:
            params = list(net.parameters())
            for param, grad in zip(params, torch.autograd.grad(loss_of(net, inputs(2)), params), strict=True):
                param.grad = grad.to_sparse() if is_sparse else grad
        message = r"grad of \w+.\w+ was assigned" if comm.rank == 0 else "1 other rank"
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert all(map(torch.equal, before, net.parameters()))
        optimizer.zero_grad()
        backward(loss_of(net, inputs(2)))
        assert optimizer.step().success

    run_threads(2, rank_main)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_plain_gradient_in_main_grad_stops_all_ranks(size: int, sharded: bool) -> None:
    """Fused kernels of plain modules write there, and leave `param.grad` None: nothing was trained, without a word."""

    def rank_main(comm: ThreadComm) -> None:
        net = Net()
        config = OptimizerConfig(lr=LR, use_distributed_optimizer=sharded)
        optimizer = get_optimizer(config, [net], {}, pg_collection=over(comm))
        before = weights(net)
        backward(loss_of(net, inputs(0)))
        fused = net.first.weight
        if comm.rank == size - 1:
            fused.main_grad = torch.ones_like(fused)
            fused.grad = None
        message = "gradient of 'first.weight' is in main_grad" if comm.rank == size - 1 else "1 other rank"
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert_equal(weights(net), before)
        fused.grad = getattr(fused, "main_grad", fused.grad)
        assert optimizer.step().success

    run_threads(size, rank_main)


def test_a_gradient_may_be_shown_as_grad_before_the_reduction() -> None:
    net = DistributedDataParallel(DistributedDataParallelConfig(), Net(), groups=over(Alone()))
    optimizer = get_optimizer(OptimizerConfig(lr=LR), [net], {})
    backward(net.module.first.weight.sum())
    for param in net.parameters():
        param.grad = param.main_grad
    assert optimizer.step().grad_norm == WIDTH


def test_a_wrapped_parameter_that_is_frozen_later_is_refused() -> None:
    """Its gradient was zero, so momentum and weight decay still changed it."""
    net = DistributedDataParallel(DistributedDataParallelConfig(), Net(), groups=over(Alone()))
    optimizer = get_optimizer(OptimizerConfig(lr=LR), [net], {})
    backward(loss_of(net, inputs(0)))
    optimizer.step()
    optimizer.zero_grad()
    before = net.module.first.weight.requires_grad_(False).clone()
    backward(loss_of(net, inputs(1)))
    with pytest.raises(RuntimeError, match=r"'first.weight' \(and 0 more\) was frozen after the model was wrapped"):
        optimizer.step()
    assert torch.equal(before, net.module.first.weight)
    net.module.first.weight.requires_grad_(True)
    assert optimizer.step().success
