"""What other code may do to tensors between two steps: the next step reads and writes them where they are then.

A twin forgets all rows and tables of addresses before every step.
"""

from copy import deepcopy
from weakref import ref

import pytest
import torch
from drop_ins import parameter, same, step
from elementwise_works import on
from torch import nn

from opt_kernels.backends.cpp import update as cpp
from opt_kernels.hooks import CautiousUpdate
from opt_kernels.optim import AdamW, Muon

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton import grad_stats, launches
from opt_kernels.matrices.muon import rounds

pytestmark = pytest.mark.needs_extra

SHAPES = ((8, 8), (6, 4), (5,))
FORMS = {
    "float32": (torch.float32, {}),
    "bfloat16 with remainders": (torch.bfloat16, {"mains": "remainder"}),
    "bfloat16 with mains": (torch.bfloat16, {"mains": "float32"}),
    "rounded stochastically": (torch.bfloat16, {"stochastic_rounding": True}),
    "codes": (torch.float32, {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}),
}


def built(backend, groups, **options):
    if backend == "muon":
        return Muon(groups, lr=0.1, backend="triton", scalar_optimizer="adam", nesterov=False, **options)
    return AdamW(groups, lr=0.1, backend=backend, **options)


def forget(optimizer):
    optimizer._rows = None
    for tables in (launches.known_calls, grad_stats.known_tables, rounds.known_tables, cpp._known_sweeps):
        tables.cache_clear()


def new_grads(params, number):
    """Gradients in place, where there are any."""
    generator = torch.Generator().manual_seed(number)
    for param in params:
        value = torch.randn(param.shape, generator=generator)
        if param.grad is None:
            param.grad = value.to(param.dtype)
        else:
            param.grad.copy_(value)


GRADS = ["grad elsewhere", "data of grad elsewhere", "grad transposed", "grads of other dtypes", "grad gone"]
WEIGHTS = ["weight elsewhere", "weight transposed", "weight replaced", "new group"]
STATES = ["state replaced", "state elsewhere", "state emptied", "loaded", "saved", "counts written unseen"]
GROUPS = ["numbers", "hooks"]


def disturb(what, optimizer, params):
    first, second, third = params
    groups = optimizer.param_groups
    state = optimizer.state[first]
    name = "momentum_buffer" if isinstance(optimizer, Muon) else "exp_avg"
    saved = optimizer.state_dict()["state"].values()
    match what:
        case "grad elsewhere":
            first.grad = first.grad.clone()
        case "data of grad elsewhere":
            first.grad.data = first.grad.clone()
        case "grad transposed":
            first.grad.data = first.grad.t()  # the same address
        case "grads of other dtypes":
            first.grad.data = first.grad.half()
            second.grad.data = second.grad.double().float()
        case "grad gone":
            third.grad = None
            third.requires_grad_(False)
        case "weight elsewhere":
            first.data = first.detach().clone()
        case "weight transposed":
            first.data = first.detach().t()  # the same address
        case "weight replaced":
            params[1] = groups[0]["params"][1] = nn.Parameter(torch.ones_like(second))
        case "in another group":
            groups[1]["params"].insert(0, groups[0]["params"].pop())
        case "new group":
            params.append(nn.Parameter(torch.ones(3, dtype=first.dtype)))
            optimizer.add_param_group({"params": params[-1:], "lr": 0.5})
        case "state replaced":
            state[name] = state[name].clone().neg_()
        case "state elsewhere":
            state[name].data = state[name].clone().neg_()
        case "state emptied":
            optimizer.state[second] = {}
        case "loaded":
            changed = deepcopy(optimizer.state_dict())
            for of_saved in changed["state"].values():
                of_saved["exp_avg"].mul_(2)
                of_saved["step"].fill_(11)
            optimizer.load_state_dict(changed)
        case "saved":  # writes to a state_dict are writes to values, not to the places of states
            for of_saved in saved:
                of_saved["exp_avg"].data = torch.full_like(of_saved["exp_avg"], 3)
        case "counts written unseen":  # as `dist.broadcast` writes: without another version of the tensor
            for param in params:
                optimizer.state[param]["step"].data.fill_(40)
        case "numbers":
            groups[0]["lr"] = 0.03
            groups[1]["betas"] = (0.5, 0.9)
        case "hooks":
            groups[0]["hooks"] = (CautiousUpdate(),)


def trained(what, form, backend, *, forgets):
    """Weights, states and errors over steps, with a change between two of them."""
    dtype, options = FORMS[form]
    params = [parameter(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(SHAPES)]
    optimizer = built(backend, [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], **options)
    found = []
    for number in range(5):
        new_grads([param for param in params if param.requires_grad], number)
        if number == 3:
            disturb(what, optimizer, params)
        if forgets:
            forget(optimizer)
        try:
            optimizer.step()
        except ValueError as error:
            found.append(str(error))
    states = [tensor for param in params for tensor in optimizer.state[param].values()]
    return [*found, *(tensor.detach().clone() for tensor in (*params, *states))]


def check(what, form, backend):
    assert same(*(trained(what, form, backend, forgets=forgets) for forgets in (False, True)))


@on("triton", "cpp")
@pytest.mark.parametrize("what", [*GRADS, *WEIGHTS, "in another group", *STATES, *GROUPS])
def test_a_step_reads_tensors_where_they_are(what, backend):
    check(what, "float32", backend)


@on("triton", "cpp")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "float32"])
def test_a_step_in_any_form_reads_tensors_where_they_are(form, backend):
    for what in ("weight elsewhere", "state elsewhere"):
        check(what, form, backend)


@pytest.mark.parametrize("what", ["grad transposed", "grads of other dtypes"])
def test_steps_follow_moved_tensors_where_torch_has_no_guards(what, monkeypatch):
    monkeypatch.setattr("opt_kernels.backends.tables._GUARDS", None)
    check(what, "float32", "triton")


@pytest.mark.parametrize(
    "what", ["grad elsewhere", "grad transposed", "weight elsewhere", "state elsewhere", "numbers"]
)
def test_the_rounds_of_muon_read_tensors_where_they_are(what):
    check(what, "bfloat16 with remainders", "muon")


@on("triton", "cpp", "muon")
def test_a_first_gradient_that_comes_late_is_used(backend):
    def run(make):
        params = [parameter(*shape) for shape in SHAPES]
        optimizer = make(params)
        for number in range(6):
            params[1].grad = None
            new_grads([param for place, param in enumerate(params) if place != 1 or 3 <= number < 5], number)
            optimizer.step()
        return params, [float(optimizer.state[param]["step"]) for param in params]

    params, counts = run(lambda params: built(backend, params))
    assert counts == [6.0, 2.0, 6.0]
    if backend != "muon":
        torch.testing.assert_close(params, run(lambda params: torch.optim.AdamW(params, lr=0.1))[0])


@on("triton", "cpp", "muon")
def test_tables_keep_no_gradients_alive(backend):
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = built(backend, params)
    for number in range(4):
        new_grads(params, number)
        optimizer.step()
    grads = [ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None, None]


@on("triton", "cpp")
def test_gradients_at_new_and_old_places_are_read_where_they_are(backend):
    """Tables are kept for some sets of addresses: here more than there is room for, in no order."""

    def run(*, forgets):
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = built(backend, [{"params": params[1:]}, {"params": params[:1], "lr": 0.2}])
        places = [[torch.zeros(shape) for shape in SHAPES] for _ in range(10)]
        for number in (0, 0, 0, 1, 2, 1, 3, 4, 5, 6, 7, 8, 9, 0, 3, 3):
            for param, grad in zip(params, places[number], strict=True):
                param.grad = grad
            new_grads(params, number)
            if forgets:
                forget(optimizer)
            optimizer.step()
        return params

    assert same(run(forgets=False), run(forgets=True))


def test_a_gradient_that_turns_sparse_is_refused_before_counting():
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    optimizer = AdamW([{"params": [param]} for param in params], lr=0.1)
    before = step(optimizer, 0, 1, 2)
    params[1].grad = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match="a sparse gradient"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3]
