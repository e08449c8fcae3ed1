"""Numbers that a formula never reads: an explicit value is refused, the default is accepted."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from opt_kernels.formulas import Formula, FormulaError, Number, NumberError, State, fma
from opt_kernels.hooks import CautiousDecay, CautiousUpdate, ClipUpdateRms, CoupledDecay, Hook, LrDecoupledDecay
from opt_kernels.optim import drop_in


def scalars(*, lr: float, beta1: float) -> dict[str, float]:
    return {"lr": lr, "weight": 1 - beta1}


def update(p: Any, g: Any, m: Any, *, lr: Any, weight: Any) -> Any:
    m = fma(weight, g - m, m)
    return p - lr * m, m


FORMULA = Formula(
    name="undecayed", states=(State("m"),), numbers=(Number("betas", (0.9, 0.99)),), scalars=scalars, update=update
)
Undecayed = drop_in(FORMULA)


def weight() -> nn.Parameter:
    param = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    param.grad = torch.linspace(2, -1, 12).reshape(3, 4)
    return param


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": 0.1}, "weight_decay=0.1 has no effect: formula 'undecayed' never reads it; pass 0.0, or"),
        ({"betas": (0.9, 0.5)}, "betas=(0.9, 0.5): formula 'undecayed' never reads beta2; leave it at 0.99"),
        ({"betas": [0.5, 0.98]}, "formula 'undecayed' never reads beta2; leave it at 0.99"),
        ({"betas": 0.9}, "betas=0.9 is not allowed; pass 2 numbers of at least 0 and below 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("of_group", [False, True], ids=["argument", "group"])
def test_a_drop_in_refuses_a_number_without_effect(options: dict[str, Any], message: str, of_group: bool) -> None:
    with pytest.raises(NumberError, match=re.escape(message)):
        Undecayed([{"params": [weight()], **options}]) if of_group else Undecayed([weight()], **options)
    optimizer = Undecayed([weight()])
    with pytest.raises(NumberError, match=re.escape(message)):
        optimizer.add_param_group({"params": [weight()], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.0}, {"betas": (0.5, 0.99)}, {"betas": [0.9, 0.99]}], ids=str
)
def test_defaults_and_what_is_read_are_accepted(options: dict[str, Any]) -> None:
    param = weight()
    optimizer = Undecayed([param], lr=0.5, **options)
    optimizer.step()
    beta1 = options.get("betas", (0.9, 0.99))[0]
    torch.testing.assert_close(param.data, weight().data - 0.5 * (1 - beta1) * param.grad)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(("name", "value"), [("weight_decay", 0.1), ("betas", (0.9, 0.5))])
def test_a_number_without_effect_that_is_written_later_is_refused_by_the_next_step(name: str, value: Any) -> None:
    """A scheduler of weight decay ran over a rule without one, in silence."""
    param = weight()
    optimizer = Undecayed([param], lr=0.5)
    optimizer.step()
    before = param.detach().clone()
    present = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    with pytest.raises(NumberError, match="never reads"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.param_groups[0][name] = 0.0 * present if name == "weight_decay" else (0.5, present[1])
    optimizer.step()
    if name == "weight_decay":  # as saved by a version that did not refuse it
        optimizer.param_groups[0][name] = value
        resumed = Undecayed([weight()])
        resumed.load_state_dict(optimizer.state_dict())
        resumed.step()


@pytest.mark.parametrize("hook", [CautiousDecay(), LrDecoupledDecay(1.0), CoupledDecay()], ids=repr)
def test_hooks_that_decay_read_weight_decay(hook: Hook) -> None:
    plain, decayed = weight(), weight()
    Undecayed([plain], lr=0.5, hooks=(hook,)).step()
    Undecayed([decayed], lr=0.5, weight_decay=0.25, hooks=(hook,)).step()
    assert not torch.equal(plain, decayed)
    with pytest.raises(NumberError, match="never reads beta2"):
        Undecayed([weight()], betas=(0.9, 0.5), weight_decay=0.25, hooks=(hook,))


@pytest.mark.parametrize(("hook", "factor"), [(ClipUpdateRms(1e6), 1.0), (CautiousUpdate(), 12 / 13)], ids=repr)
def test_hooks_with_norms_support_rules_without_weight_decay(hook: Hook, factor: float) -> None:
    """Symptom: they were refused, with a message on the form of a decay that the rule does not have."""
    param = weight()
    Undecayed([param], lr=0.5, hooks=(hook,)).step()
    # In the first step u = 0.1 g has the sign of g everywhere: nothing is masked or clipped.
    torch.testing.assert_close(param.data, weight().data - factor * 0.5 * 0.1 * param.grad)
    with pytest.raises(NumberError, match=re.escape("weight_decay=0.1 has no effect")):
        Undecayed([weight()], weight_decay=0.1, hooks=(hook,))
    Undecayed([weight()], weight_decay=0.1, hooks=(hook, CautiousDecay()))


def rateless(*, weight_decay: float) -> dict[str, float]:
    return {"lr": weight_decay}


def descend(p: Any, g: Any, *, lr: Any) -> Any:
    return p - lr * g


def test_a_formula_without_a_learning_rate_is_refused() -> None:
    with pytest.raises(FormulaError, match="the scalars of formula 'rateless' do not read lr"):
        Formula(name="rateless", states=(), scalars=rateless, update=descend)
