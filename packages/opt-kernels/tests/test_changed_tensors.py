"""Everything that can happen to tensors between two steps: the next step reads and writes them where they are then.

Each case runs twice: as usual, and with a twin that forgets all rows and tables of addresses before every step.
"""

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from drop_ins import parameter, params_of, same, states_of, step
from elementwise_works import NEEDS_COMPILER, on
from torch import nn

from opt_kernels.backends.cpp import update as cpp
from opt_kernels.hooks import CautiousUpdate
from opt_kernels.optim import AdamW, Muon

pytest.importorskip("triton", reason="triton is not installed")

from opt_kernels.backends.triton import grad_stats, launches
from opt_kernels.matrices.muon import rounds

pytestmark = pytest.mark.needs_extra

SHAPES = ((8, 8), (6, 4), (5,))
FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16 with remainders": (torch.bfloat16, {"mains": "remainder"}),
    "bfloat16 with mains": (torch.bfloat16, {"mains": "float32"}),
    "rounded stochastically": (torch.bfloat16, {"stochastic_rounding": True}),
    "codes": (torch.float32, {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}),
}
BUILDS: dict[str, Any] = {
    "triton": lambda groups, **options: AdamW(groups, lr=0.1, backend="triton", **options),
    "cpp": lambda groups, **options: AdamW(groups, lr=0.1, backend="cpp", **options),
    "muon": lambda groups, **options: Muon(
        groups, lr=0.1, backend="triton", scalar_optimizer="adam", nesterov=False, **options
    ),
}
ADAMW = ["triton", pytest.param("cpp", marks=NEEDS_COMPILER)]
ALL = [*ADAMW, "muon"]


def forget(optimizer: Any) -> None:
    optimizer._rows = None
    for tables in (launches.known_calls, grad_stats.known_tables, rounds.known_tables, cpp._known_sweeps):
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


GRADS = (
    "elsewhere", "data elsewhere", "transposed", "of other dtypes", "gone", "gone and back",
)  # fmt: skip
WEIGHTS = ("elsewhere", "transposed", "wider", "replaced", "in another group", "in a new group")
STATES = (
    "replaced", "elsewhere", "emptied", "all dropped", "all set", "named anew", "memory replaced", "loaded", "saved",
    "restored",
)  # fmt: skip
COUNTS = ("set", "written unseen", "written as an array", "replaced")


def disturb_grads(what: str, optimizer: Any, params: list[nn.Parameter]) -> None:
    first, second = params[0].grad, params[1].grad
    assert first is not None
    assert second is not None
    match what:
        case "elsewhere":
            params[0].grad = first.clone()
        case "data elsewhere":
            first.data = first.clone()
        case "transposed":
            first.data = first.t()  # the same address
        case "of other dtypes":
            first.data, second.data = first.half(), second.double().float()
        case "gone":
            params[2].grad = None
            params[2].requires_grad_(False)
        case "gone and back":
            optimizer.zero_grad()
            new_grads(params, 77)


def disturb_weights(what: str, optimizer: Any, params: list[nn.Parameter]) -> None:
    groups = optimizer.param_groups
    match what:
        case "elsewhere":
            params[0].data = params[0].detach().clone()
        case "transposed":
            params[0].data = params[0].detach().t()  # the same address
        case "wider":
            for param in params:
                param.grad = None
                param.data = param.detach().double().float()
        case "replaced":
            params[1] = groups[0]["params"][1] = nn.Parameter(torch.ones_like(params[1]))
        case "in another group":
            groups[1]["params"].insert(0, groups[0]["params"].pop())
        case "in a new group":
            params.append(nn.Parameter(torch.ones(3, dtype=params[0].dtype)))
            optimizer.add_param_group({"params": params[-1:], "lr": 0.5})


def disturb_states(what: str, optimizer: Any, params: list[nn.Parameter]) -> None:
    state, name = optimizer.state[params[0]], "momentum_buffer" if isinstance(optimizer, Muon) else "exp_avg"
    saved = optimizer.state_dict()["state"].values()
    match what:
        case "replaced":
            state[name] = state[name].clone().neg_()
        case "elsewhere":
            state[name].data = state[name].clone().neg_()
        case "emptied":
            optimizer.state[params[1]] = {}
        case "all dropped":
            optimizer.state.clear()
        case "all set":
            copied = {
                param: {key: tensor.clone() for key, tensor in optimizer.state[param].items()} for param in params
            }
            optimizer.state = type(optimizer.state)(dict, copied)
        case "named anew":  # the same tensors in the same order, under each other's names
            first, second = state.pop("exp_avg").abs_(), state.pop("exp_avg_sq")
            state["exp_avg_sq"], state["exp_avg"] = first, second
        case "memory replaced":  # which tensors of a state_dict share
            for of_saved in saved:
                values = of_saved["exp_avg"].clone()
                of_saved["exp_avg"].untyped_storage().resize_(1 << 16)
                of_saved["exp_avg"].copy_(values)
        case "loaded":
            changed = deepcopy(optimizer.state_dict())
            for of_saved in changed["state"].values():
                of_saved["exp_avg"].mul_(2)
                of_saved["step"].fill_(11)
            optimizer.load_state_dict(changed)
        case "saved":  # writes to a state_dict are writes to values, not to the places of states
            for of_saved in saved:
                of_saved["exp_avg"].data = torch.full_like(of_saved["exp_avg"], 3)
        case "restored":
            optimizer.__setstate__(deepcopy(optimizer.__getstate__()) | {"param_groups": optimizer.param_groups})


def disturb_counts(what: str, optimizer: Any, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[0]]
    match what:
        case "set":
            state["step"].fill_(9)
        case "written unseen":  # as `dist.broadcast` writes: without another version of the tensor
            for param in params:
                optimizer.state[param]["step"].data.fill_(40)
        case "written as an array":
            state["step"].numpy()[...] = 40
        case "replaced":
            state["step"] = torch.tensor(5.0)


def disturb_groups(what: str, optimizer: Any, _: list[nn.Parameter]) -> None:
    if what == "numbers":
        optimizer.param_groups[0]["lr"] = 0.03
        optimizer.param_groups[1]["betas"] = (0.5, 0.9)
    elif what == "hooks":
        optimizer.param_groups[0]["hooks"] = (CautiousUpdate(),)


KINDS = {
    "grads": (disturb_grads, GRADS), "weights": (disturb_weights, WEIGHTS), "states": (disturb_states, STATES),
    "counts": (disturb_counts, COUNTS), "groups": (disturb_groups, ("numbers", "hooks", "nothing")),
}  # fmt: skip
CASES = [(kind, what) for kind, (_, of_kind) in KINDS.items() for what in of_kind]


def run(kind: str, what: str, form: str, build: str, *, usual: bool) -> list[Any]:
    """Weights, states and errors over steps, with a change between two of them."""
    dtype, options = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = BUILDS[build]([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], **options)
    found: list[Any] = []
    for number in range(5):
        new_grads([param for param in params if param.requires_grad], number)
        if number == 3:
            KINDS[kind][0](what, optimizer, params)
        if not usual:
            forget(optimizer)
        try:
            optimizer.step()
        except ValueError as error:
            found.append(str(error))
    states = [tensor for param in params for tensor in optimizer.state[param].values()]
    return [*found, *(tensor.detach().clone() for tensor in (*params, *states))]


def check(kind: str, what: str, form: str, build: str) -> None:
    assert same(run(kind, what, form, build, usual=True), run(kind, what, form, build, usual=False)), (form, build)


@pytest.mark.parametrize("build", ADAMW)
@pytest.mark.parametrize(("kind", "what"), CASES)
def test_a_step_reads_tensors_where_they_are(kind: str, what: str, build: str) -> None:
    check(kind, what, "float32", build)


@pytest.mark.parametrize("build", ADAMW)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "float32"])
def test_the_same_in_every_form(form: str, build: str) -> None:
    for kind, what in (("grads", "elsewhere"), ("weights", "elsewhere"), ("states", "elsewhere"), ("states", "loaded")):
        check(kind, what, form, build)


@pytest.mark.parametrize("what", ["gone", "transposed", "of other dtypes"])
def test_the_same_where_torch_has_no_guards(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opt_kernels.backends.tables._GUARDS", None)
    check("grads", what, "float32", "triton")


OF_MUON = [
    (kind, what) for kind, what in CASES if kind in ("grads", "groups") or (kind, what) == ("states", "elsewhere")
]
OF_MUON += [("weights", what) for what in WEIGHTS if what not in ("wider", "in another group")]


@pytest.mark.parametrize(("kind", "what"), OF_MUON)
def test_the_same_for_the_rounds_of_muon(kind: str, what: str) -> None:
    check(kind, what, "bfloat16 with remainders", "muon")


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("late", range(len(SHAPES)))
def test_a_first_gradient_that_comes_late_is_used(build: str, late: int) -> None:
    """It was ignored as long as the other gradients had their old layouts."""

    def trained(make: Any) -> tuple[list[Any], list[float]]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        optimizer = make(params)
        for number in range(6):
            params[late].grad = None
            new_grads([param for place, param in enumerate(params) if place != late or 3 <= number < 5], number)
            optimizer.step()
        return params, [float(optimizer.state[param]["step"]) for param in params]

    def theirs(params: list[nn.Parameter]) -> Any:
        return torch.optim.AdamW(params, lr=0.1)

    params, counts = trained(BUILDS[build])
    assert counts == [2.0 if place == late else 6.0 for place in range(len(SHAPES))]
    if build != "muon":
        torch.testing.assert_close(params, trained(theirs)[0])


@pytest.mark.parametrize("build", ALL)
def test_tables_keep_no_gradients_alive(build: str) -> None:
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = BUILDS[build](params)
    for number in range(4):
        new_grads(params, number)
        optimizer.step()
    grads = [ref(param.grad) for param in params]
    optimizer.zero_grad()
    assert [grad() for grad in grads] == [None, None]


@pytest.mark.parametrize("build", ALL)
def test_gradients_at_new_and_old_places_are_read_where_they_are(build: str) -> None:
    """Tables are kept for some sets of addresses: here more than there is room for, in no order."""

    def trained(*, usual: bool) -> list[Any]:
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = BUILDS[build]([{"params": params[1:]}, {"params": params[:1], "lr": 0.2}])
        places = [[torch.zeros(shape) for shape in SHAPES] for _ in range(10)]
        for number in (0, 0, 0, 1, 2, 1, 3, 4, 5, 6, 7, 8, 9, 0, 3, 3):
            for param, grad in zip(params, places[number], strict=True):
                param.grad = grad
            new_grads(params, number)
            if not usual:
                forget(optimizer)
            optimizer.step()
        return params

    assert same(trained(usual=True), trained(usual=False))


def test_a_gradient_that_becomes_sparse_is_refused_before_anything_is_counted() -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    optimizer = AdamW([{"params": [param]} for param in params], lr=0.1)
    for number in range(3):
        new_grads(params, number)
        optimizer.step()
    before = [param.detach().clone() for param in params]
    params[1].grad = torch.ones(3).to_sparse()
    with pytest.raises(ValueError, match="a sparse gradient"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3]


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("copied", [deepcopy, pickled])
@pytest.mark.parametrize("in_place", [False, True], ids=["new-gradients", "gradients-in-place"])
@pytest.mark.parametrize("form", ["float32", "bfloat16 with remainders", "codes"])
@on("cpp", "torch", "triton")
def test_a_copy_and_its_original_continue_as_if_each_were_alone(
    backend: str, form: str, in_place: bool, copied: Callable[[Any], Any]
) -> None:
    """What an optimizer keeps between steps has addresses of its own tensors: its copy must not use them."""
    dtype, options = FORMS[form]

    def trained(*seeds: int) -> Any:
        params = [parameter(*shape, dtype=dtype) for shape in SHAPES]
        optimizer = AdamW(params, lr=0.1, backend=backend, **options)
        step(optimizer, *seeds, in_place=in_place)
        return optimizer

    original = trained(0, 1, 2)
    other = copied(original)
    for seed in range(3, 6):
        step(original, seed, in_place=in_place)
        step(other, seed + 10, in_place=in_place)
    for found, seeds in ((original, (3, 4, 5)), (other, (13, 14, 15))):
        expected = trained(0, 1, 2, *seeds)
        assert same([*params_of(found), *states_of(found)], [*params_of(expected), *states_of(expected)])
