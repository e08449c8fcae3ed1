"""Everything that can happen to tensors between two steps: the next step reads and writes them where they are then.

Each case runs twice: as usual, and with a twin that forgets all rows and tables of addresses before every step.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.hooks import CautiousUpdate
from opt_kernels.optim import SGD, AdamW, Muon

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton import grad_stats, launches
from opt_kernels.matrices.muon import round_tables

pytestmark = pytest.mark.needs_extra

SHAPES = ((8, 8), (6, 4), (5,))
Disturb = Callable[[Any, list[nn.Parameter]], None]

FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16 with remainders": (torch.bfloat16, {"mains": "remainder"}),
    "bfloat16 with mains": (torch.bfloat16, {"mains": "float32"}),
    "rounded stochastically": (torch.bfloat16, {"stochastic_rounding": True}),
    "codes": (torch.float32, {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}),
}


def forget(optimizer: Any) -> None:
    optimizer._forget_rows()
    for tables in (launches.known_calls, grad_stats.known_tables, round_tables.known_tables):
        tables.cache_clear()


def new_grads(params: list[nn.Parameter], step: int) -> None:
    """Gradients in place, where there are any of the same kind."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        value = torch.randn(param.shape, generator=generator)
        if param.grad is None:
            param.grad = value.to(param.dtype)
        else:
            param.grad.copy_(value)


def grad_elsewhere(_: Any, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad.clone()


def grad_data_elsewhere(_: Any, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad.data = params[0].grad.detach().clone()


def grad_transposed(_: Any, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad.data = params[0].grad.detach().t()  # the same address


def grad_wider(_: Any, params: list[nn.Parameter]) -> None:
    assert params[1].grad is not None
    params[1].grad.data = params[1].grad.detach().double().float()
    params[0].grad.data = params[0].grad.detach().half()  # type: ignore[union-attr]


def grad_gone(_: Any, params: list[nn.Parameter]) -> None:
    params[2].grad = None
    params[2].requires_grad_(False)


def grads_gone_and_back(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.zero_grad()
    new_grads(params, 77)


def weight_elsewhere(_: Any, params: list[nn.Parameter]) -> None:
    params[0].data = params[0].detach().clone()


def weight_transposed(_: Any, params: list[nn.Parameter]) -> None:
    params[0].data = params[0].detach().t()  # the same address


def weight_wider(_: Any, params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = None
        param.data = param.detach().double().float()


def weight_replaced(optimizer: Any, params: list[nn.Parameter]) -> None:
    params[1] = nn.Parameter(torch.ones_like(params[1]))
    optimizer.param_groups[0]["params"][1] = params[1]


def weight_of_another_group(optimizer: Any, params: list[nn.Parameter]) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].insert(0, moved)


def group_added(optimizer: Any, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.ones(3, dtype=params[0].dtype)))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.5})


def numbers_changed(optimizer: Any, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] = 0.03
    optimizer.param_groups[1]["betas"] = (0.5, 0.9)


def state_replaced(optimizer: Any, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg"] = state["exp_avg"].clone().neg_()


def state_elsewhere(optimizer: Any, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg"].data = state["exp_avg"].clone().neg_()


def states_named_anew(optimizer: Any, params: list[nn.Parameter]) -> None:
    """The same tensors in the same order, under each other's names."""
    state = optimizer.state[params[0]]
    first, second = state.pop("exp_avg").abs_(), state.pop("exp_avg_sq")
    state["exp_avg_sq"], state["exp_avg"] = first, second


def memory_of_states_replaced(optimizer: Any, _: list[nn.Parameter]) -> None:
    """Tensors of a state_dict share the memory of states, which a resize of their storage replaces."""
    for state in optimizer.state_dict()["state"].values():
        values = state["exp_avg"].clone()
        state["exp_avg"].untyped_storage().resize_(1 << 16)
        state["exp_avg"].copy_(values)


def hooks_replaced(optimizer: Any, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["hooks"] = (CautiousUpdate(),)


def state_emptied(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.state[params[1]] = {}


def all_states_dropped(optimizer: Any, _: list[nn.Parameter]) -> None:
    optimizer.state.clear()


def states_set(optimizer: Any, params: list[nn.Parameter]) -> None:
    copied = {param: {name: tensor.clone() for name, tensor in optimizer.state[param].items()} for param in params}
    optimizer.state = type(optimizer.state)(dict, copied)


def counts_set(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"].fill_(9)


def counts_written_unseen(optimizer: Any, params: list[nn.Parameter]) -> None:
    """As `dist.broadcast` writes: without another version of the tensor."""
    for param in params:
        optimizer.state[param]["step"].data.fill_(40)


def count_written_as_array(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"].numpy()[...] = 40


def count_replaced(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(5.0)


def loaded(optimizer: Any, _: list[nn.Parameter]) -> None:
    saved = deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].mul_(2)
        state["step"].fill_(11)
    optimizer.load_state_dict(saved)


def saved(optimizer: Any, _: list[nn.Parameter]) -> None:
    """What is done to the tensors of a state_dict is done to values, not to the places of states."""
    for state in optimizer.state_dict()["state"].values():
        state["exp_avg"].data = torch.full_like(state["exp_avg"], 3)


def restored(optimizer: Any, _: list[nn.Parameter]) -> None:
    optimizer.__setstate__(deepcopy(optimizer.__getstate__()) | {"param_groups": optimizer.param_groups})


DISTURBED: list[Disturb] = [
    grad_elsewhere, grad_data_elsewhere, grad_transposed, grad_wider, grad_gone, grads_gone_and_back, weight_elsewhere,
    weight_transposed, weight_wider, weight_replaced, weight_of_another_group, group_added, numbers_changed,
    state_replaced, state_elsewhere, state_emptied, all_states_dropped, states_set, counts_set, count_replaced, loaded,
    saved, restored, counts_written_unseen, count_written_as_array, states_named_anew, memory_of_states_replaced,
    hooks_replaced,
]  # fmt: skip


def adamw(groups: Any, **options: Any) -> Any:
    return AdamW(groups, lr=0.1, backend="triton", **options)


def adamw_in_cpp(groups: Any, **options: Any) -> Any:
    return AdamW(groups, lr=0.1, backend="cpp", **options)


def muon(groups: Any, **options: Any) -> Any:
    return Muon(groups, lr=0.1, backend="triton", scalar_optimizer="adam", nesterov=False, **options)


def run(disturb: Disturb, form: str, *, usual: bool, build: Any = adamw) -> list[Any]:
    """Weights, states and errors over steps, with `disturb` between two of them."""
    dtype, options = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.2}]
    optimizer = build(groups, **options)
    found: list[Any] = []
    for step in range(5):
        new_grads([param for param in params if param.requires_grad], step)
        if step == 3:
            disturb(optimizer, params)
        if not usual:
            forget(optimizer)
        try:
            optimizer.step()
        except ValueError as error:
            found.append(str(error))
    states = optimizer.state
    found += [tensor.detach().clone() for tensor in (*params, *(t for p in params for t in states[p].values()))]
    return found


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(found, expected, strict=True)
    )


ON_BACKENDS = pytest.mark.parametrize(
    "build",
    [adamw, pytest.param(adamw_in_cpp, marks=pytest.mark.skipif(not usable(), reason="no C++ compiler is installed"))],
)


def nothing(_: Any, __: list[nn.Parameter]) -> None:
    return None


@ON_BACKENDS
@pytest.mark.parametrize("disturb", [nothing, *DISTURBED])
def test_a_step_reads_tensors_where_they_are(disturb: Disturb, build: Any) -> None:
    expected = run(disturb, "float32", usual=False, build=build)
    assert same(run(disturb, "float32", usual=True, build=build), expected)


@pytest.mark.parametrize("disturb", [grad_elsewhere, weight_elsewhere, state_elsewhere, loaded])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "float32"])
@ON_BACKENDS
def test_the_same_in_every_form(disturb: Disturb, form: str, build: Any) -> None:
    assert same(run(disturb, form, usual=True, build=build), run(disturb, form, usual=False, build=build))


@pytest.mark.parametrize("disturb", [grad_gone, grad_transposed, grad_wider])
def test_the_same_where_torch_has_no_guards(disturb: Disturb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opt_kernels.backends.layouts._GUARDS", None)
    assert same(run(disturb, "float32", usual=True), run(disturb, "float32", usual=False))


def late_gradient(build: Any, late: int, *, usual: bool) -> tuple[list[nn.Parameter], list[float]]:
    """Weights and step counts after six steps, in which one parameter has gradients only in the fourth and fifth."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = build(params, lr=0.1)
    for step in range(6):
        params[late].grad = None
        new_grads([param for place, param in enumerate(params) if place != late or 3 <= step < 5], step)
        if not usual:
            forget(optimizer)
        optimizer.step()
    return params, [float(optimizer.state[param]["step"]) for param in params]


def adamw_on_triton(params: Any, lr: float) -> Any:
    return AdamW(params, lr=lr, backend="triton")


def muon_on_triton(params: Any, lr: float) -> Any:
    return muon(params)


@pytest.mark.parametrize("build", [adamw_on_triton, muon_on_triton, AdamW])
@pytest.mark.parametrize("late", range(len(SHAPES)))
def test_a_first_gradient_that_comes_late_is_used(build: Any, late: int) -> None:
    """It was ignored as long as the other gradients had their old layouts."""
    params, counts = late_gradient(build, late, usual=True)
    assert counts == [2.0 if place == late else 6.0 for place in range(len(SHAPES))]
    assert same([*params], [*late_gradient(build, late, usual=False)[0]])
    if build is not muon_on_triton:
        torch.testing.assert_close(params, late_gradient(torch.optim.AdamW, late, usual=True)[0])


def muons_state_elsewhere(optimizer: Any, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[0]]
    state["momentum_buffer"].data = state["momentum_buffer"].clone().neg_()


OF_MUON = [
    nothing, grad_elsewhere, grad_transposed, grad_wider, grad_gone, grads_gone_and_back, weight_elsewhere,
    weight_transposed, weight_replaced, numbers_changed, group_added, muons_state_elsewhere,
]  # fmt: skip


@pytest.mark.parametrize("disturb", OF_MUON)
def test_the_same_for_the_rounds_of_muon(disturb: Disturb) -> None:
    expected = run(disturb, "bfloat16 with remainders", usual=False, build=muon)
    assert same(run(disturb, "bfloat16 with remainders", usual=True, build=muon), expected)


@pytest.mark.parametrize("build", [adamw, adamw_in_cpp, muon])
def test_tables_keep_no_gradients_alive(build: Any) -> None:
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = build(params)
    for step in range(4):
        new_grads(params, step)
        optimizer.step()
    grads = [ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None, None]


@pytest.mark.parametrize("build", [adamw, adamw_in_cpp, muon])
def test_gradients_at_new_and_old_places_are_read_where_they_are(build: Any) -> None:
    """Tables are kept for some sets of addresses: here more than there is room for, in no order."""

    def trained(*, usual: bool) -> list[Any]:
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = build([{"params": params[1:]}, {"params": params[:1], "lr": 0.2}])
        places = [[torch.zeros(shape) for shape in SHAPES] for _ in range(10)]
        for step in (0, 0, 0, 1, 2, 1, 3, 4, 5, 6, 7, 8, 9, 0, 3, 3):
            for param, grad in zip(params, places[step], strict=True):
                param.grad = grad
            new_grads(params, step)
            if not usual:
                forget(optimizer)
            optimizer.step()
        return params

    assert same(trained(usual=True), trained(usual=False))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_a_state_that_was_taken_once_may_be_moved_at_any_time(name: str) -> None:
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer = AdamW([param], lr=0.1, backend="triton")
    optimizer.step()
    taken = optimizer.state[param][name]
    for _ in range(3):
        optimizer.step()
    before = taken
    taken.data = torch.zeros(4)
    optimizer.step()
    assert optimizer.state[param][name] is before
    assert before.count_nonzero() == 4


def test_a_momentum_that_is_set_later_gets_its_buffer() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = SGD([param], lr=0.1, backend="triton")
    for momentum in (0.0, 0.0, 0.9, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        param.grad = torch.ones(4)
        optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.full((4,), 1.9))


def test_a_gradient_that_becomes_sparse_is_refused_before_anything_is_counted() -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    optimizer = AdamW([{"params": [param]} for param in params], lr=0.1)
    for step in range(3):
        new_grads(params, step)
        optimizer.step()
    before = [param.detach().clone() for param in params]
    params[1].grad = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match="a sparse gradient"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3]
