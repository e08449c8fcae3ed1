"""What drop-in optimizers refuse by name: numbers that are none, a parameter given twice, states of another rule."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from opt_kernels import optim
from opt_kernels.optim import catalogue, matrix_catalogue

MATRICES = ["Muon", "SOAP", "NorMuon", "NAMO"]


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape))


def stepped(optimizer: torch.optim.Optimizer, count: int = 2) -> torch.optim.Optimizer:
    for step in range(count):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, step + 1.0)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", [*MATRICES, "AdamW"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "1e-3"}, r"lr='1e-3' is not allowed; pass a number of at least 0"),
        ({"lr": torch.ones(2)}, r"lr=tensor\(\[1., 1.\]\) is not allowed; pass a number of at least 0"),
        ({"lr": math.inf}, r"lr=inf is not allowed; pass a finite number of at least 0"),
        ({"weight_decay": math.inf}, r"weight_decay=inf is not allowed; pass a finite number of at least 0"),
        ({"weight_decay": None}, r"weight_decay=None is not allowed; pass a number of at least 0"),
        ({"betas": 0.9}, r"betas=0.9 is not allowed; pass 2 numbers of at least 0 and below 1"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\) are not allowed; pass 2 numbers of at least 0 and below 1"),
    ],
    ids=lambda case: str(case)[:24],
)
def test_numbers_are_checked_when_the_optimizer_is_built(name, options, message):
    """Matrix optimizers raised a TypeError without a name, or failed in the first step."""
    with pytest.raises(ValueError, match=message):
        getattr(optim, name)([weights(3, 3)], **options)
    with pytest.raises(ValueError, match=message):
        getattr(optim, name)([{"params": [weights(3, 3)], **options}])


def test_a_norm_that_never_clips_may_be_infinite():
    optimizer = optim.AdamW([weights(3, 3)], max_norm=math.inf)
    assert stepped(optimizer, 1).grad_norm == 3.0


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_a_parameter_given_twice_is_refused(name):
    """torch.optim warns and updates it twice; one fused sweep would race with itself."""
    param = weights(3, 3)
    with pytest.raises(ValueError, match=r"parameter 1 of a group, of shape \(3, 3\), is also parameter 0"):
        getattr(optim, name)([param, param])
    optimizer = getattr(optim, name)([weights(2, 2)])
    with pytest.raises(ValueError, match="pass each parameter once"):
        optimizer.add_param_group({"params": [param, param]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("SOAP", "AdamW"), ("AdamW", "Lion"), ("Adan", "AdamW")])
def test_states_of_another_rule_are_refused(saved_by, loaded_by):
    """SOAP's moments, which are in a rotated basis, were loaded as Adam's."""
    saved = stepped(getattr(optim, saved_by)([weights(3, 3)], betas=(0.9,) * 3 if saved_by == "Adan" else (0.9, 0.99)))
    saved = saved.state_dict()
    saved["param_groups"][0]["betas"] = (0.9, 0.99)
    optimizer = stepped(getattr(optim, loaded_by)([weights(3, 3)]))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(optim.StateDictError, match=r"unknown to rule .*; load one that was saved by the same rule"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


def test_adamw_refuses_the_state_of_nadam():
    """Their moments have the same names; NAdam's products of momenta give its state away."""
    saved = stepped(optim.NAdam([weights(3, 3)], decoupled_weight_decay=True)).state_dict()
    with pytest.raises(optim.StateDictError, match=r"\['mu_product'\] are unknown to rule 'adam'"):
        optim.AdamW([weights(3, 3)]).load_state_dict(saved)


def test_a_momentum_that_was_switched_off_does_not_keep_a_state_from_loading():
    optimizer = stepped(optim.SGD([weights(3, 3)], momentum=0.9))
    optimizer.param_groups[0]["momentum"] = 0.0
    other = optim.SGD([weights(3, 3)])
    other.load_state_dict(stepped(optimizer).state_dict())
    assert float(other.state[other.param_groups[0]["params"][0]]["step"]) == 4.0


@pytest.mark.parametrize("name", [*catalogue.__all__, *matrix_catalogue.__all__])
def test_copies_go_on_as_the_original_does(name):
    optimizer = stepped(getattr(optim, name)([weights(3, 3)], lr=0.1))
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = stepped(optimizer).param_groups[0]["params"][0]
    for other in copies:
        assert torch.equal(stepped(other).param_groups[0]["params"][0], expected)
