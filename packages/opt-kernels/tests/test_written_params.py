"""Weights that other code writes to parameters between steps: no step restores the old ones from a float32 main."""

import copy

import pytest
import torch
from drop_ins import step
from elementwise_works import FAST, MARKS, ON_FAST
from torch import nn

from opt_kernels import optim


def trained(rule="AdamW", dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, dtype=dtype)
    optimizer = getattr(optim, rule)(model.parameters(), lr=1e-6, **{"mains": "float32", **options})
    for seed in range(2):
        step(optimizer, seed)
    return model, optimizer


def load(weight):
    module = nn.Module()
    module.weight = weight
    module.load_state_dict({"weight": torch.full_like(weight, 3.0)})


IN_USE = []


def assign_elsewhere(weight):
    IN_USE.append(weight.data)
    weight.data = torch.full_like(weight, 3.0)


WRITES = {
    "load": load,
    "fill": lambda weight: weight.fill_(3.0),
    "assign": lambda weight: setattr(weight, "data", torch.full_like(weight, 3.0)),
    "vector": lambda weight: nn.utils.vector_to_parameters(torch.full_like(weight, 3.0).view(-1), [weight]),
    "assign while the old memory is in use": assign_elsewhere,
    "move within the storage": lambda weight: setattr(
        weight, "data", torch.cat([weight.detach(), torch.full_like(weight, 3.0)])[len(weight) :]
    ),
}


def write(weight, way="fill"):
    with torch.no_grad():
        WRITES[way](weight)


@pytest.mark.parametrize("rule", ["AdamW", "Lion", "Muon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_goes_on_from_written_weights(rule, dtype):
    for way in WRITES:
        model, optimizer = trained(rule, dtype)
        write(model.weight, way)
        step(optimizer, 2)
        assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2), way
        assert optimizer.state[model.weight]["main"].mean().item() == pytest.approx(3.0, abs=1e-4), way


@ON_FAST
@pytest.mark.parametrize("mains", ["float32", "remainder"])
def test_elements_moved_or_rewritten_equal_keep_their_low_bits(backend, mains):
    """Only written elements lose the lower half of their main; a NaN is followed like any other value."""
    (model, optimizer), (other, undisturbed) = (trained(backend=backend, mains=mains) for _ in range(2))
    model.weight.data = model.weight.detach().clone()
    step(optimizer, 2)
    step(undisturbed, 2)
    assert torch.equal(model.weight, other.weight)
    state = optimizer.state[model.weight]
    wanted = undisturbed.state[other.weight]
    assert all(map(torch.equal, state.values(), wanted.values()))
    if mains == "float32":
        with torch.no_grad():
            model.weight.copy_(model.weight.clone())
            model.weight[0] = 2.0
            model.weight[1, 0] = torch.nan
        step(optimizer, 3)
        step(undisturbed, 3)
        assert torch.equal(state["main"][2:], wanted["main"][2:])
        assert torch.equal(state["main"][1, 1:], wanted["main"][1, 1:])
        assert (state["main"][0] - 2.0).abs().max() < 1e-5
        assert state["main"][1, 0].isnan()


@pytest.mark.parametrize("way", ["fill", "assign"])
@pytest.mark.parametrize("next_grad", ["infinite", None])
def test_a_write_before_a_skipped_step_is_followed_in_the_next(way, next_grad):
    model, optimizer = trained(max_norm=1.0)
    write(model.weight, way)
    model.weight.grad = torch.full_like(model.weight, torch.inf) if next_grad else None
    optimizer.step()
    optimizer.step()
    step(optimizer, 2)
    assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)


OF_TORCH = [("AdamW", None), ("Muon", None), ("SOAP", None), ("Muon", "torch"), ("SOAP", "torch")]


@pytest.mark.parametrize(
    ("rule", "backend"), [*OF_TORCH, *(pytest.param("AdamW", name, marks=MARKS.get(name, ())) for name in FAST)]
)
def test_a_main_that_is_written_is_not_undone(backend, rule):
    """The writes of torch's operations counted as those of others: every step compared all mains with weights."""
    model, optimizer = trained(rule, backend=backend)
    step(optimizer, 2)
    optimizer.state[model.weight]["main"].fill_(3.0)
    step(optimizer, 3)
    assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)


@pytest.mark.parametrize("is_frozen_once", [False, True])
def test_weights_at_the_same_address_in_other_memory_are_noticed(is_frozen_once):
    """Where an allocator gives new weights the memory of the old; also if the rows of a step are made anew."""
    memory = bytearray(128)
    (model, optimizer) = trained()
    for value in (1.0, 3.0):
        model.weight.data = torch.frombuffer(memory, dtype=torch.bfloat16).fill_(value).view(8, 8)
        if is_frozen_once:
            model.weight.grad = None
            optimizer.step()
        step(optimizer, 2)
    assert model.weight.float().mean().item() == pytest.approx(3.0, abs=1e-2)


@pytest.mark.parametrize("model_first", [True, False])
def test_a_load_of_both_continues_bit_for_bit(model_first):
    model, optimizer = trained()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(optimizer, 2)
    other, resumed = trained()
    step(resumed, 5)
    loads = [lambda: other.load_state_dict(saved[0]), lambda: resumed.load_state_dict(saved[1])]
    for load_part in loads if model_first else reversed(loads):
        load_part()
    step(resumed, 2)
    assert torch.equal(optimizer.state[model.weight]["main"], resumed.state[other.weight]["main"])


def test_a_parameter_not_updated_may_be_in_an_older_graph():
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    weight = nn.Parameter(torch.ones(3))
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
    for seed in range(2):
        step(optimizer, seed)
    assert not torch.equal(model.weight, before)
