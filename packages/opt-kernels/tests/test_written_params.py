"""Weights that other code writes to parameters between steps: no step restores the old ones from a float32 main."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from opt_kernels import optim
from opt_kernels.backends.cpp.compiler import usable

BACKENDS = [
    pytest.param("torch"),
    pytest.param("cpp", marks=pytest.mark.skipif(not usable(), reason="no C++ compiler")),
    pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")),
]
RULES = ["AdamW", "Lion", "Muon"]


def trained(rule="AdamW", dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, dtype=dtype)
    optimizer = getattr(optim, rule)(model.parameters(), lr=1e-6, **{"mains": "float32", **options})
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    return model, optimizer


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def load(weight):
    module = nn.Module()
    module.weight = weight
    module.load_state_dict({"weight": torch.full_like(weight, 3.0)})


@torch.no_grad()
def fill(weight):
    weight.fill_(3.0)


def assign(weight):
    weight.data = torch.full_like(weight, 3.0)


def set_from_vector(weight):
    torch.nn.utils.vector_to_parameters(torch.full((weight.numel(),), 3.0, dtype=weight.dtype), [weight])


def move_within_its_storage(weight):
    weight.data = torch.cat([weight.detach(), torch.full_like(weight, 3.0)])[len(weight) :]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [load, fill, assign, set_from_vector, move_within_its_storage])
def test_a_step_goes_on_from_written_weights(rule, dtype, write):
    """The next step restored the weights of before the load, without a word."""
    model, optimizer = trained(rule, dtype)
    write(model.weight)
    step(model, optimizer, 2)
    assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)
    assert optimizer.state[model.weight]["main"].mean().item() == pytest.approx(3.0, abs=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_elements_that_are_written_with_the_value_they_have_keep_their_main(backend):
    """Only written elements lose the lower half of their main; a NaN is followed like any other value."""
    (model, optimizer), (other, undisturbed) = trained(backend=backend), trained(backend=backend)
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
        model.weight[0] = 2.0
        model.weight[1, 0] = torch.nan
    step(model, optimizer, 2)
    step(other, undisturbed, 2)
    main, wanted = optimizer.state[model.weight]["main"], undisturbed.state[other.weight]["main"]
    assert torch.equal(main[2:], wanted[2:])
    assert torch.equal(main[1, 1:], wanted[1, 1:])
    assert (main[0] - 2.0).abs().max() < 1e-5
    assert main[1, 0].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mains", ["float32", "remainder"])
def test_a_parameter_that_is_moved_keeps_the_low_bits_of_its_main(backend, mains):
    (model, optimizer), (other, undisturbed) = (trained(backend=backend, mains=mains) for _ in range(2))
    model.weight.data = model.weight.detach().clone()
    step(model, optimizer, 2)
    step(other, undisturbed, 2)
    for state, wanted in zip(optimizer.state[model.weight].values(), undisturbed.state[other.weight].values()):
        assert torch.equal(state, wanted)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("is_reused", [False, True])
def test_weights_that_are_assigned_before_a_skipped_step_or_to_a_parameter_without_a_gradient(is_reused):
    model, optimizer = trained(max_norm=1.0)
    assign(model.weight)
    model.weight.grad = torch.full_like(model.weight, torch.inf) if is_reused else None
    optimizer.step()
    step(model, optimizer, 2)
    assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)


def overlapping():
    data = torch.zeros(12)
    return [nn.Parameter(data[:8]), nn.Parameter(data[6:])]


def tied():
    data = torch.zeros(4)
    return [nn.Parameter(data), nn.Parameter(torch.zeros(3)), nn.Parameter(data)]


@pytest.mark.parametrize("made", [overlapping, tied])
@pytest.mark.parametrize("in_groups", [False, True])
def test_parameters_that_share_memory_are_refused(made, in_groups):
    """One of the two updates was lost."""
    params = made()
    with pytest.raises(ValueError, match=r"share memory; tie parameters by using one nn\.Parameter twice"):
        optim.AdamW([{"params": [param]} for param in params] if in_groups else params)


def test_parameters_that_are_parts_of_one_vector_are_trained():
    data = torch.zeros(12)
    params = [nn.Parameter(data[:8]), nn.Parameter(data[8:8]), nn.Parameter(data[8:])]
    optimizer = optim.AdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert (data != 0).all()


def test_a_write_before_a_skipped_step_is_followed_in_the_next():
    model, optimizer = trained(max_norm=1.0)
    fill(model.weight)
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    optimizer.step()
    step(model, optimizer, 2)
    assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)


def test_a_write_to_a_parameter_without_a_gradient_is_followed_when_it_has_one():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2)])
    optimizer = optim.AdamW(model.parameters(), lr=1e-6, mains="float32")
    step(model, optimizer, 0)
    fill(model[1].weight)
    model[0].weight.grad, model[1].weight.grad = torch.ones_like(model[0].weight), None
    optimizer.step()
    optimizer.step()
    step(model, optimizer, 1)
    assert model[1].weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)


@pytest.mark.parametrize(
    ("rule", "backend"),
    [
        *((rule, None) for rule in ("AdamW", "Muon", "SOAP")),
        *((rule, "torch") for rule in ("Muon", "SOAP")),
        *(pytest.param("AdamW", *param.values, marks=param.marks) for param in BACKENDS),
    ],
)
def test_mains_are_compared_after_a_write_of_others_only(backend, rule, monkeypatch):
    """The writes of torch's operations counted as those of others: every step compared all mains, and undid what was
    written to a main."""
    model, optimizer = trained(rule, backend=backend)
    compared = []
    monkeypatch.setattr("opt_kernels.optim.state.follow_", lambda main, param: compared.append(param))
    for seed in range(3):
        step(model, optimizer, seed)
    assert not compared
    fill(model.weight)
    step(model, optimizer, 3)
    assert len(compared) == 1


def test_a_main_that_was_set_in_the_state_is_kept():
    model, optimizer = trained()
    optimizer.state[model.weight]["main"].fill_(3.0)
    step(model, optimizer, 2)
    assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_load_of_both_continues_bit_for_bit(model_first):
    model, optimizer = trained()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer, 2)
    other, resumed = trained()
    step(other, resumed, 5)
    loads = [lambda: other.load_state_dict(saved[0]), lambda: resumed.load_state_dict(saved[1])]
    for load_one in loads if model_first else reversed(loads):
        load_one()
    step(other, resumed, 2)
    assert torch.equal(optimizer.state[model.weight]["main"], resumed.state[other.weight]["main"])


def test_a_parameter_that_is_not_updated_may_take_part_in_an_older_graph():
    """A step counted writes to frozen parameters and to those without a gradient, so that this backward pass raised."""
    frozen, weight = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([frozen, weight], lr=1e-2)
    x = torch.ones(3, requires_grad=True)
    loss = (x * frozen).square().sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    loss.backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("mains", ["param", "float32"])
def test_a_model_made_in_inference_mode_is_trained(mains):
    with torch.inference_mode():
        model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=0.5, mains=mains)
    before = model.weight.detach().clone()
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    assert not torch.equal(model.weight, before)


def test_weights_loaded_in_evaluation_mode_are_not_dropped_in_silence():
    model, optimizer = trained("AdamWScheduleFree", mains="param")
    optimizer.eval()
    optimizer.state_dict()
    fill(model.weight)
    with pytest.warns(UserWarning, match="written in evaluation mode"):
        optimizer.train()


@pytest.mark.filterwarnings("error::UserWarning")
def test_evaluation_without_a_load_does_not_warn():
    model, optimizer = trained("AdamWScheduleFree", mains="float32")
    before = optimizer.state[model.weight]["main"].clone()
    optimizer.eval()
    copy.deepcopy(optimizer.state_dict())
    optimizer.train()
    optimizer.eval()
    optimizer.train()
    assert torch.equal(optimizer.state[model.weight]["main"], before)
    step(model, optimizer, 2)
