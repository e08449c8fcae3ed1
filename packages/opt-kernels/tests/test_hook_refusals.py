"""Hooks that are refused by name, and numbers of hooks that are checked."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from elementwise_works import main_of
from hook_oracle import LR
from hooked_works import SHAPE, Kept, run, start_of
from torch import Tensor

from opt_kernels.formulas import FORMULAS
from opt_kernels.hooks import (
    CautiousDecay,
    CentralizeGradient,
    ClipUpdateRms,
    CoupledDecay,
    Hook,
    HookError,
    Hyperball,
    LrDecoupledDecay,
    RelativeUpdate,
    RowFloor,
    hooked,
    shape_problem,
)
from opt_kernels.rules import SGD, Adam, Needs, Rule, SOAPRule, elementwise
from opt_kernels.works import StateSpec

pytestmark = pytest.mark.usefixtures("poisoned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strange:
    """A rule whose step depends on the weights."""

    name: str = "strange"
    needs: Needs = Needs.ELEMENTS
    state_specs: tuple[StateSpec, ...] = ()

    @property
    def codecs(self) -> dict[str, Any]:
        return {}

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return {}

    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        for hyper, works in batches:
            for work in works:
                work.main.sub_(hyper.lr * work.grad * work.main.abs())


@pytest.mark.parametrize(
    ("rule", "given", "words"),
    [
        (Adam(), [CautiousDecay], "is not a hook of opt_kernels.hooks; pass CautiousDecay()"),
        (Adam(), ["cautious"], "'cautious', which is not a hook"),
        (Adam(), [ClipUpdateRms(), ClipUpdateRms(2.0)], "ClipUpdateRms 2 times"),
        (Adam(), [CautiousDecay(), CoupledDecay()], "each replaces the weight decay"),
        (Adam(), [CautiousDecay(), Hyperball()], "each replaces the weight decay"),
        (Adam(), [RowFloor(0.5), ClipUpdateRms()], "which changes the update's norm"),
        (Adam(), [Hyperball(), RowFloor(0.5)], "which changes the update's norm"),
        (Adam(), [RelativeUpdate(), Hyperball()], "sets the update's norm itself"),
        (Strange(), [ClipUpdateRms()], "needs an update of the form p - lr u"),
        (SOAPRule(), [ClipUpdateRms()], "whose first step changes no weights, not even by weight decay"),
        (elementwise(FORMULAS["adan"]), [RelativeUpdate()], "whose weight decay is neither"),
        (hooked(Adam(), [CautiousDecay()]), [ClipUpdateRms()], "already has (CautiousDecay(),)"),
    ],
)
def test_what_cannot_be_is_refused_by_name(rule: Rule, given: list[Any], words: str) -> None:
    with pytest.raises(HookError, match=words.replace("(", r"\(").replace(")", r"\)")):
        hooked(rule, given)


@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.inf, torch.nan, "1"])
def test_numbers_of_hooks_are_checked(wrong: Any) -> None:
    for make in (LrDecoupledDecay, ClipUpdateRms, Hyperball, RowFloor):
        with pytest.raises(HookError, match="pass a number above 0"):
            make(wrong)


def test_a_floor_compares_rows_with_the_weights_and_stacks_are_refused() -> None:
    # It compared rows with the update, which is another rule than the one of this name (modded-nanogpt, track 3).
    subject = hooked(SGD(backend="torch"), [RowFloor(0.5)])
    grad, start = torch.zeros(SHAPE, dtype=torch.float64), start_of()
    grad[0], grad[1] = 10.0, 1e-3 * torch.randn(SHAPE[1], dtype=torch.float64).sign()
    moved = main_of(run(subject, Kept().work(subject, start), [grad], weight_decay=0.0)) - start_of()
    assert float(start_of()[0].norm()) < float(grad[0].norm())
    torch.testing.assert_close(moved[0], -LR * grad[0], rtol=1e-4, atol=0)
    assert float(moved[1].norm()) == pytest.approx(LR * 0.5 * float(start_of()[1].norm()), rel=1e-4)
    assert not moved[2:].any()
    assert "stacks of matrices" in shape_problem(RowFloor(1.0), Needs.MATRICES, (2, 4, 4))
    assert not shape_problem(CentralizeGradient(), Needs.MATRICES, (2, 4, 4))


def test_no_hooks_leave_the_rule_as_it_is() -> None:
    rule = Adam()
    assert hooked(rule, ()) is rule


@pytest.mark.parametrize("hook", [CautiousDecay(), LrDecoupledDecay(1.0), ClipUpdateRms(), Hyperball()], ids=str)
def test_a_formula_whose_step_depends_on_the_weights_takes_no_hook_that_sees_it(hook: Hook) -> None:
    with pytest.raises(HookError, match="needs an update of the form p - lr u"):
        hooked(elementwise(FORMULAS["schedule_free"], backend="torch"), [hook])
