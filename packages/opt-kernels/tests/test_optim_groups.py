"""Groups, gradients and states that change under the drop-in optimizers, while a run goes on."""

import pytest
import torch
from torch import nn

from opt_kernels import optim

pytestmark = pytest.mark.usefixtures("poisoned")


def test_groups_of_a_state_dict_must_be_as_many() -> None:
    one, two = (optim.AdamW([nn.Parameter(torch.ones(2)) for _ in range(count)]) for count in (1, 2))
    with pytest.raises(optim.StateDictError, match=r"\[1\] parameters where this optimizer has \[2\]"):
        two.load_state_dict(one.state_dict())


def test_a_group_that_is_added_is_checked_too() -> None:
    late = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))])
    for options, advice in ({"lr": -1.0}, "lr=-1.0"), ({"nesterov": True}, "nesterov=True"), ({"eps": 0.9}, "0.9"):
        with pytest.raises(ValueError, match=advice):
            optimizer.add_param_group({"params": [late]} | options)
    assert len(optimizer.param_groups) == 1


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], *, without: int | None = None) -> None:
    """One step with a gradient of ones for every parameter but the one `without`."""
    for index, param in enumerate(params):
        param.grad = None if index == without else torch.ones_like(param)
    optimizer.step()


def counts(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[float]:
    return [float(optimizer.state[param]["step"]) for param in params]


def test_parameters_that_move_together_are_counted_one_by_one() -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = optim.AdamW(params, backend="torch")
    stepped(optimizer, params)
    stepped(optimizer, params, without=1)
    stepped(optimizer, params)
    assert counts(optimizer, params) == [3.0, 2.0, 3.0]
    # Steps may be set from outside, in place or by another tensor, and count on from there.
    optimizer.state[params[0]]["step"].fill_(10)
    optimizer.state[params[2]]["step"] = torch.tensor(20.0)
    stepped(optimizer, params)
    assert counts(optimizer, params) == [11.0, 3.0, 21.0]


def test_a_saved_step_stays_when_the_optimizer_goes_on() -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = optim.AdamW(params, backend="torch")
    stepped(optimizer, params)
    saved = optimizer.state_dict()
    stepped(optimizer, params)
    assert [float(state["step"]) for state in saved["state"].values()] == [1.0, 1.0]


def test_a_first_step_of_zero_gradients_and_rates_makes_state_and_counts_nothing() -> None:
    """As torch.distributed.checkpoint makes state, before a first step, to save or to load into."""
    params = [torch.nn.Parameter(torch.rand(3, 2)) for _ in range(2)]
    params[1].data.copy_(params[0].data)
    probed, plain = (optim.AdamW([param], weight_decay=0.1) for param in params)
    params[0].grad = torch.zeros(3, 2)
    probed.param_groups[0]["lr"] = 0.0
    probed.step()
    probed.param_groups[0]["lr"] = 1e-3
    assert float(probed.state[params[0]]["step"]) == 0.0
    for optimizer, param in zip((probed, plain), params, strict=True):
        param.grad = torch.ones(3, 2)
        optimizer.step()
    assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("mains", ["float32", "remainder"])
def test_a_float32_parameter_goes_on_from_the_main_of_a_bfloat16_one(mains: str) -> None:
    narrow = torch.nn.Parameter(torch.rand(5, 7).bfloat16())
    optimizer = optim.AdamW([narrow], lr=1e-3, mains=mains)
    for _ in range(3):
        narrow.grad = torch.rand(5, 7).bfloat16()
        optimizer.step()
    wide = torch.nn.Parameter(narrow.detach().float())
    other = optim.AdamW([wide], lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(wide.detach(), optimizer.state_dict()["state"][0]["main"])
    assert not torch.equal(wide.detach(), narrow.detach().float())
