"""Drop-in optimizers with `capturable=True` on the fake accelerator: no host reads, and replays of one captured step.

Triton's kernels run under its interpreter, as queued work that runs at once: the host computes their tables in torch,
with tensors that the fake accelerator takes for its own. Tables hold real addresses.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import slow_tiger
import torch
from fake_accelerator import DeferredRank, run_deferred
from on_device import queue_triton_kernels, schedule
from torch import Tensor, nn

from opt_distributed.comm.device import Graph
from opt_kernels import optim
from opt_kernels.backends import grad_stats
from opt_kernels.formulas import NumberError
from opt_kernels.optim import on_device, param_rows
from opt_kernels.optim.on_device import CaptureError

STEPS = 6
BAD_STEP = 3  # a gradient is infinite
SHAPES = ((8, 6), (6, 8), (9,))


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake accelerator that allows capture, with kernels as queued work."""
    queue_triton_kernels(monkeypatch)
    monkeypatch.setattr(on_device, "DEVICES", ("cpu",))
    monkeypatch.setattr(param_rows, "grad_stats", partial(grad_stats, backend="triton"))


Build = Callable[..., torch.optim.Optimizer]

CASES: dict[str, tuple[Build, dict[str, Any], torch.dtype]] = {
    "adamw": (optim.AdamW, {}, torch.float32),
    "adamw, clipped": (optim.AdamW, {"max_norm": 0.5}, torch.float32),
    "adamw, remainders": (optim.AdamW, {"mains": "remainder"}, torch.bfloat16),
    "adamw, stochastic rounding": (optim.AdamW, {"stochastic_rounding": True}, torch.bfloat16),
    "sgd": (optim.SGD, {"momentum": 0.9, "lr": 0.1}, torch.float32),
    "lion": (optim.Lion, {}, torch.float32),
    "numbers of its own": (optim.AdEMAMix, {}, torch.float32),
    "a rule from outside, with a branch on the step": (optim.drop_in(slow_tiger.RULE), {}, torch.float32),
    "muon": (optim.Muon, {"scalar_optimizer": "adam", "fp32_matmul_prec": "highest"}, torch.float32),
}


def made(case: str, **more: Any) -> tuple[list[nn.Parameter], Any]:
    build, options, dtype = CASES[case]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.rand(shape, generator=generator).to(dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.zeros_like(param)
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.02}]
    return params, build(groups, **options, backend="triton", **more)


def fill_(params: list[nn.Parameter], step: int, *, overflows: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        assert param.grad is not None
        param.grad.copy_(torch.rand(param.shape, generator=generator) - 0.5)
    if overflows and step == BAD_STEP:
        params[0].grad.view(-1)[2:3].fill_(torch.inf)


def train(case: str, one: DeferredRank | None = None) -> dict[str, Tensor]:
    """States and parameters after steps on the host, or after replays on a device, which the host does not read."""
    params, optimizer = made(case, capturable=one is not None)
    graph = one.device.graph() if one is not None else None
    for step in range(STEPS):
        # The first step makes the states, and finds that the learning rate is not zero.
        with nullcontext() if one is None or step == 0 else one.device.host_reads_forbidden():
            schedule(step, optimizer)
            fill_(params, step, overflows="clipped" in case)
            if graph is None or step < 2:
                optimizer.step()
            if graph is not None and step == 1:
                with graph.capture():
                    optimizer.step()
            elif graph is not None and step > 1:
                optimizer.upload_groups()
                graph.replay()
    states = {
        f"{index}.{name}": value.detach().clone()
        for index, of_param in optimizer.state_dict()["state"].items()
        for name, value in of_param.items()
    }
    return states | {str(index): param.detach().clone() for index, param in enumerate(params)}


@pytest.mark.parametrize("case", CASES)
def test_replays_equal_steps_of_an_optimizer_that_syncs(case: str) -> None:
    """With clipping, one step overflows: nothing is updated or counted."""
    expected = train(case)
    (found,) = run_deferred(1, partial(train, case), seed=0, eagerness=1.0)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def captured(one: DeferredRank, lr: float | Tensor = 1e-3) -> tuple[list[nn.Parameter], Any, Graph]:
    """AdamW after two steps, and a graph of a third."""
    params, optimizer = made("adamw", capturable=True, lr=lr)
    for _ in range(2):
        fill_(params, 1)
        optimizer.step()
    graph = one.device.graph()
    with graph.capture():
        optimizer.step()
    return params, optimizer, graph


AGAIN = (CaptureError, r"apture .*again")
CHANGES: dict[str, tuple[Callable[[list[nn.Parameter], Any], object], tuple[type[Exception], str]]] = {
    "released gradients": (lambda params, _: [setattr(p, "grad", torch.zeros_like(p)) for p in params], AGAIN),
    "one gradient less": (lambda params, _: setattr(params[0], "grad", None), AGAIN),
    "a loaded state": (lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()), AGAIN),
    "a number that is None": (
        lambda _, optimizer: optimizer.param_groups[0].update(eps=None), (NumberError, "eps=None is not allowed"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_replays_with_other_memory_or_numbers_are_refused(name: str) -> None:
    change, (error, message) = CHANGES[name]

    def rank_main(one: DeferredRank) -> None:
        params, optimizer, _ = captured(one)
        optimizer.upload_groups()
        kept = [param.grad for param in params]  # so that new ones are elsewhere
        change(params, optimizer)
        with pytest.raises(error, match=message):
            optimizer.upload_groups()
        assert kept

    run_deferred(1, rank_main, seed=0, eagerness=1.0)


@pytest.mark.parametrize("forgets", [True, False], ids=["forgotten", "uploaded"])
def test_a_forgotten_upload_is_noticed_by_zero_grad(forgets: bool, caplog: pytest.LogCaptureFixture) -> None:
    def rank_main(one: DeferredRank) -> list[int]:
        params, optimizer, graph = captured(one)
        warnings = []
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            warnings.append(caplog.text.count("call upload_groups() before each replay"))
            fill_(params, step)
            if not forgets:
                optimizer.upload_groups()
            graph.replay()
            schedule(step, optimizer)
        return warnings

    (warnings,) = run_deferred(1, rank_main, seed=0, eagerness=1.0)
    # Numbers change after the first replay. The second `zero_grad` finds that, and the third that it was left so.
    assert warnings == ([0, 0, 1, 1] if forgets else [0, 0, 0, 0])


def test_a_learning_rate_on_the_device_is_live_without_a_call() -> None:
    def rank_main(one: DeferredRank) -> Tensor:
        lr = torch.full((), 0.5)
        params, _, graph = captured(one, lr)
        lr.fill_(0.0)
        before = params[0].detach().clone()
        graph.replay()
        return (params[0] - before).abs().max()

    assert run_deferred(1, rank_main, seed=0, eagerness=1.0) == [0.0]


@pytest.mark.parametrize("case", ["adamw", "adamw, clipped"])
def test_what_a_grad_scaler_sets_is_not_read(case: str) -> None:
    """A found infinity skips the step, and the loss scale divides the gradients."""

    def rank_main(one: DeferredRank) -> list[tuple[bool, float]]:
        params, optimizer = made(case, capturable=True)
        fill_(params, 1)
        optimizer.step()
        found = []
        for infinity in (1.0, 0.0):
            before = params[0].detach().clone()
            with one.device.host_reads_forbidden():
                optimizer.found_inf = torch.full((), infinity)
                optimizer.grad_scale = torch.full((1,), 4.0)
                optimizer.step()
                del optimizer.found_inf, optimizer.grad_scale
            found.append((bool((params[0] != before).any()), float(optimizer.state[params[0]]["step"])))
        return found

    assert run_deferred(1, rank_main, seed=0, eagerness=1.0) == [[(False, 1.0), (True, 2.0)]]
