"""Gradients of plain models that are clipped before the step, which reduces them over ranks: warned of, or right."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stack_models import assert_equal, over
from torch import Tensor, nn
from wrapped_net import LR, Net, inputs, loss_of, sgd

from opt_config import DistributedDataParallelConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

Iteration = Callable[[nn.Module, Optimizer, Tensor], object]
WRITTEN = "was written between backward and step"


def backward(model: nn.Module, x: Tensor) -> None:
    loss_of(model, x).backward()  # type: ignore[no-untyped-call]


def grads(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def warnings_of(iteration: Iteration, *, ranks: int = 2, steps: int = 4, wrapped: bool = False) -> list[str]:
    """The warnings of all ranks."""

    def rank_main(comm: Comm) -> None:
        net: nn.Module = Net()
        if wrapped:
            config = DistributedDataParallelConfig(use_distributed_optimizer=True)
            net = DistributedDataParallel(config, net, groups=over(comm))
        optimizer = get_optimizer(sgd(), [net], pg_collection=over(comm))
        for step in range(steps):
            optimizer.zero_grad()
            iteration(net, optimizer, inputs(step).chunk(ranks)[comm.rank])
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(ranks, rank_main)
    return [str(warning.message) for warning in caught if warning.filename == __file__]


def after_backward(write: Callable[[nn.Module], object]) -> Iteration:
    return lambda model, optimizer, x: (backward(model, x), write(model))


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "by a norm above theirs": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "one layer": lambda model: nn.utils.clip_grad_norm_(model.last.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "by hand": lambda model: [grad.mul_(0.5) for grad in grads(model)],
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_gradient_written_before_its_reduction_warns_once(write: Callable[[nn.Module], object]) -> None:
    """Each rank clipped by its own norm, without a word."""
    found = [message for message in warnings_of(after_backward(write)) if WRITTEN in message]
    assert len(found) == 2
    assert "optimizer.clip_grad_norm_(max_norm)" in found[0]


def accumulate(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    for part in x:
        backward(model, part)


def keep_grads(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """The second iteration does not use a layer, whose gradient is zeroed in place."""
    backward(model, x)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    net: Any = model
    net.first(x).square().mean().backward()


def drop(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    backward(model, x)
    optimizer.zero_grad(set_to_none=False)


def write_in_hooks(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """That were registered after the optimizer was built."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    hooks = [param.register_post_accumulate_grad_hook(halve) for param in model.parameters()]  # type: ignore[no-untyped-call]
    backward(model, x)
    for hook in hooks:
        hook.remove()


def fail_half_way(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """A backward pass that raised is repeated: it adds to the gradients that are there."""

    def fail(grad: Tensor) -> None:
        raise KeyError

    backward(model, x)
    net: Any = model
    hook = net.first.weight.register_hook(fail)
    with pytest.raises(KeyError):
        backward(model, x)
    hook.remove()
    backward(model, x)


def unscale(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """As ShardedGradScaler, which writes each gradient once."""
    backward(model, x)
    torch._foreach_mul_(grads(model), 0.5)
    assert not optimizer._step_supports_amp_scaling


def assign(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, x), params), strict=True):
        param.grad = grad
        param.grad.mul_(0.5)


RIGHT: dict[str, Iteration] = {
    function.__name__: function
    for function in (accumulate, keep_grads, drop, write_in_hooks, fail_half_way, unscale, assign)
}


@pytest.mark.parametrize("iteration", RIGHT.values(), ids=RIGHT)
def test_writes_that_are_right_do_not_warn(iteration: Iteration) -> None:
    assert [message for message in warnings_of(iteration) if WRITTEN in message] == []


@pytest.mark.parametrize(("ranks", "wrapped"), [(1, False), (2, True)], ids=["one rank", "wrapped"])
def test_gradients_that_no_step_reduces_may_be_written(ranks: int, wrapped: bool) -> None:
    clip = after_backward(WRITES["clip_grad_norm_"])
    assert [text for text in warnings_of(clip, ranks=ranks, wrapped=wrapped) if WRITTEN in text] == []


def test_unscaled_gradients_that_are_clipped_warn_too() -> None:
    def clip(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
        unscale(model, optimizer, x)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert len([message for message in warnings_of(clip) if WRITTEN in message]) == 2


# --- the optimizer's own call -----------------------------------------------------------------------------------------


def clipped_by_torch(steps: int) -> tuple[list[float], list[Tensor]]:
    """Norms and weights of torch's loop on the joined batch."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(net, inputs(step))
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.2)))
        optimizer.step()
    return norms, list(net.parameters())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("in_closure", [False, True])
def test_the_optimizer_clips_by_the_norm_of_all_ranks(wrapped: bool, sharded: bool, in_closure: bool) -> None:
    def rank_main(comm: Comm) -> tuple[list[float], list[Tensor]]:
        net: nn.Module = Net()
        if wrapped:
            config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
            net = DistributedDataParallel(config, net, groups=over(comm))
        optimizer = get_optimizer(sgd(use_distributed_optimizer=sharded), [net], pg_collection=over(comm))
        norms: list[float] = []

        def iteration() -> float:
            optimizer.zero_grad()
            backward(net, inputs(len(norms)).chunk(2)[comm.rank])
            norms.append(optimizer.clip_grad_norm_(0.2))
            return 0.0

        for _ in range(3):
            if in_closure:
                result = optimizer.step(iteration)
            else:
                iteration()
                result = optimizer.step()
            assert (result.success, result.grad_norm) == (True, norms[-1])
        return norms, [param.detach() for param in net.parameters()]

    wanted_norms, wanted = clipped_by_torch(3)
    assert min(wanted_norms) > 0.2
    for norms, found in run_threads(2, rank_main):
        assert norms == pytest.approx(wanted_norms, rel=1e-5)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_gradients_that_were_dropped_after_clipping_are_not_used() -> None:
    found = []
    for is_dropped in (False, True):
        net = Net()
        optimizer = get_optimizer(sgd(), [net])
        if is_dropped:
            backward(net, inputs(1))
            optimizer.clip_grad_norm_(0.1)
            optimizer.zero_grad()
        backward(net, inputs(0))
        optimizer.step()
        found.append([param.detach() for param in net.parameters()])
    assert_equal(*found)


def test_clipping_before_a_closure_or_by_a_bad_norm_is_refused() -> None:
    net = Net()
    optimizer = get_optimizer(sgd(), [net])
    backward(net, inputs(0))
    with pytest.raises(ValueError, match="pass a norm above 0"):
        optimizer.clip_grad_norm_(-1.0)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="call it in the closure"):
        optimizer.step(lambda: 0.0)


def test_an_overflow_is_skipped_after_clipping() -> None:
    net = Net()
    optimizer = get_optimizer(sgd(), [net])
    backward(net, inputs(0) * torch.inf)
    assert not optimizer.clip_grad_norm_(1.0) < torch.inf
    assert not optimizer.step().success
    optimizer.zero_grad()
    backward(net, inputs(0))
    assert optimizer.step().success
