"""`x += y` in a formula gives `x` a new value; it writes to no tensor."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpp_works import needs_compiler

from opt_kernels.backends.cpp import update as cpp
from opt_kernels.backends.reference import update as reference
from opt_kernels.backends.torch_native import update as torch_native
from opt_kernels.codecs import codec_for
from opt_kernels.formulas import Formula, State
from opt_kernels.works import Batch, Hyper, Work


def scalars(*, lr: float) -> dict[str, float]:
    return {"lr": lr}


def update(p: Any, g: Any, last: Any, trace: Any, *, lr: Any) -> Any:
    last = p
    g *= 2
    trace += g
    lr /= g * g + 1
    p -= lr * trace
    return p, last, trace


FORMULA = Formula(name="augmented", states=(State(name="last"), State(name="trace")), scalars=scalars, update=update)


@pytest.mark.parametrize(
    "run",
    [reference.update_, torch_native.update_, pytest.param(cpp.update_, marks=needs_compiler)],
    ids=["reference", "torch", "cpp"],
)
def test_an_augmented_assignment_changes_no_other_name_and_no_gradient(run: Callable[..., None]) -> None:
    # On the first two, `last` was the new main, the gradient of float32 parameters doubled, and lr had no room for g.
    p, g, trace = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0, 0.0]), torch.tensor([0.0, 1.0, 2.0])
    work = Work(grad=g.clone(), main=p.clone(), state={"last": torch.zeros(3), "trace": trace.clone()})
    codecs = {name: codec_for(name, torch.float32, signed=True) for name in ("last", "trace")}
    run([Batch(Hyper(lr=0.25), [work])], FORMULA, codecs)
    assert torch.equal(work.grad, g)
    assert torch.equal(work.state["last"], p)
    assert torch.equal(work.state["trace"], trace + 2 * g)
    assert work.main is not None
    assert torch.equal(work.main, p - 0.25 / (4 * g * g + 1) * (trace + 2 * g))


def averaged(p: Any, last: Any, *, lr: Any) -> Any:
    last *= lr
    p += last
    return p


def trained(p: Any, last: Any, *, lr: Any) -> Any:
    return p - last * lr


def test_an_evaluation_changes_neither_weights_nor_states() -> None:
    # It wrote to the live main of an optimizer.
    formula = replace(FORMULA, evaluation=(averaged, trained))
    p, last = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    assert torch.equal(formula.evaluated(p, {"last": last}, Hyper(lr=0.5)), torch.tensor([3.0, 6.0]))
    assert torch.equal(p, torch.tensor([1.0, 2.0]))
    assert torch.equal(last, torch.tensor([4.0, 8.0]))
