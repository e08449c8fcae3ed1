"""Entries of `param_groups` that change after the optimizer was built: each takes effect in the next step, or is
refused by name. The cases follow from the registry: every entry of every rule's groups."""

import copy
from typing import Any

import pytest
import torch
from stack_models import make_model, weights
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_kernels.optim import Adam, AdamW
from opt_stack import Optimizer, get_optimizer, release_gradients
from opt_stack.rules.registry import Registry

# Entries that only schedulers read, or nothing: they describe the group.
OF_SCHEDULERS = ("wd_mult", "lr_mult", "max_lr", "min_lr", "is_decoupled_lr", "default_config")


def built(name: str) -> tuple[nn.Module, Optimizer]:
    model = make_model()
    return model, get_optimizer(OptimizerConfig(optimizer=name, lr=0.1, weight_decay=0.1), [model])


def step(model: nn.Module, optimizer: Optimizer, *, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()
    return [weight.clone() for weight in weights(model).values()]


def other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case str():
            return "lion" if value != "lion" else "sgd"
        case (str(), *_):  # a record of choices
            return value[1:]
        case tuple():
            return tuple(one * 0.875 for one in value)
    return value * 0.5 if value > 1e-3 else 0.25 if isinstance(value, float) else 30


ADDED = {"clip_grad": False, "hooks": ("CautiousDecay()",), "maximize": True, "amsgrad": True, "nesterov": True}
NAMES = list(Registry().entries)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_entry_takes_effect_or_is_refused(name: str) -> None:
    """`optimizer`, `clip_grad` and torch's `nesterov` and `maximize` were ignored."""
    model, optimizer = built(name)
    for seed in range(6):  # RAdam's first steps read no eps
        before = step(model, optimizer, seed=seed)
    saved, group = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups[0]
    unchanged = step(model, optimizer, seed=7)
    read = [entry for entry in group if entry not in ("params", "param_ids", *OF_SCHEDULERS)]
    for entry in {*read, *ADDED}:
        present = dict(group)
        with torch.no_grad():
            for param, weight in zip(model.parameters(), before, strict=True):
                param.copy_(weight)
        optimizer.load_state_dict(copy.deepcopy(saved))
        group[entry] = other(group[entry]) if entry in group else ADDED[entry]
        try:
            after = step(model, optimizer, seed=7)
        except ValueError as error:
            assert f"{entry}=" in str(error)  # noqa: PT017 - a change may also take effect
            after = before
            assert all(map(torch.equal, before, weights(model).values()))
        assert not all(map(torch.equal, after, unchanged)), f"{entry} is ignored"
        group.clear()
        group.update(present)


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_entry_is_refused(name: str) -> None:
    """The default of another rule was used instead."""
    model, optimizer = built(name)
    before = step(model, optimizer, seed=2)
    group = optimizer.param_groups[0]
    for entry in [entry for entry in group if entry not in ("params", "param_ids", *OF_SCHEDULERS)]:
        value = group.pop(entry)
        with pytest.raises(ValueError, match=f"no entry '{entry}'"):
            step(model, optimizer, seed=3)
        group[entry] = value
    assert all(map(torch.equal, before, weights(model).values()))
    step(model, optimizer, seed=3)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("betas", (0.9,), r"betas=\(0.9,\) was set where the optimizer was built with \(0.9, 0.999\)"),
        ("betas", (0.9, 0.99, 0.999), r"betas=\(0.9, 0.99, 0.999\) was set where"),
        ("betas", 0.9, r"betas=0.9 was set where"),
        ("eps", "1e-8", r"eps='1e-8' was set where the optimizer was built with 1e-08"),
        ("momentum", 0.5, r"group 'default': momentum=0.5 was added, but its rule does not read it; it reads lr, "),
        ("clip_grad", False, r"clip_grad=False was set after the optimizer was built with None, .* build another"),
    ],
)
def test_what_no_step_can_use_is_refused(entry: str, value: Any, message: str) -> None:
    model, optimizer = built("adam")
    before = step(model, optimizer, seed=2)
    optimizer.param_groups[0][entry] = value
    with pytest.raises(ValueError, match=message):
        step(model, optimizer, seed=3)
    assert all(map(torch.equal, before, weights(model).values()))


def test_keys_of_schedulers_and_of_the_callers_code_are_left_alone() -> None:
    model, optimizer = built("adam")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    optimizer.param_groups[0]["a_tag"] = "mine"
    step(model, optimizer, seed=2)


def test_a_parameter_that_was_moved_to_another_group_is_refused() -> None:
    """Its group is fixed. The next step updated it with the numbers of the old one."""
    model, optimizer = built("adam")
    some, others = (group["params"] for group in optimizer.param_groups)
    others.insert(0, some.pop())
    with pytest.raises(UnusableGradientError, match="param_groups hold other parameters"):
        step(model, optimizer, seed=0)


def test_gradients_that_are_released_in_backward_are_not_used_either() -> None:
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [model])
    release_gradients(optimizer)
    before = [weight.clone() for weight in weights(model).values()]
    optimizer.param_groups[0]["clip_grad"] = False
    with pytest.raises(ValueError, match="clip_grad=False"):
        model(torch.ones(2, 5)).sum().backward()
    assert all(map(torch.equal, before, weights(model).values()))


def test_an_entry_that_one_rank_changes_is_refused_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> str:
        model = make_model()
        axes = Axes(dp=comm, tp=Alone())
        optimizer = get_optimizer(
            OptimizerConfig(lr=0.1), [model], pg_collection=Roles(dense=axes, expert=axes, everyone=comm)
        )
        if comm.rank == 1:
            optimizer.param_groups[0]["optimizer"] = "lion"
        before = [weight.clone() for weight in weights(model).values()]
        with pytest.raises((ValueError, UnusableGradientError)) as caught:
            step(model, optimizer, seed=2)
        assert all(map(torch.equal, before, weights(model).values()))
        return str(caught.value)

    other_rank, own = run_threads(2, rank_main)
    assert "1 other rank(s) refused" in other_rank
    assert "optimizer='lion' was set after the optimizer was built" in own


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "nesterov"])
def test_flags_of_torchs_optimizers_are_compared_when_their_state_is_loaded(flag: str) -> None:
    """The state of an optimizer that maximized or had Nesterov momentum was loaded, and the flag ignored."""
    model, optimizer = built("adam" if flag == "amsgrad" else "sgd")
    of_torch = {"amsgrad": torch.optim.AdamW, "maximize": torch.optim.SGD, "nesterov": torch.optim.SGD}[flag]
    momentum: dict[str, Any] = {} if flag == "amsgrad" else {"momentum": 0.9}

    def state_of_torch(**options: Any) -> dict[str, Any]:
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        return of_torch(groups, **options, **momentum).state_dict()

    with pytest.raises(ValueError, match=f"was saved with {flag}=True, but optimizer '.*' has False"):
        optimizer.load_state_dict(state_of_torch(**{flag: True}))
    optimizer.load_state_dict(state_of_torch())
    step(model, optimizer, seed=2)


@pytest.mark.parametrize("decoupled", [True, False])
def test_state_of_an_optimizer_with_another_kind_of_weight_decay_is_refused_when_it_is_loaded(decoupled: bool) -> None:
    """The state of torch's Adam, whose decay is L2, was loaded into AdamW, and refused one step later."""
    model = make_model()
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.1, decoupled_weight_decay=decoupled), [model])

    def state_of(drop_in: Any) -> dict[str, Any]:
        return drop_in([{"params": group["params"]} for group in optimizer.param_groups]).state_dict()

    same, other = (AdamW, Adam) if decoupled else (Adam, AdamW)
    message = f"was saved with decoupled_weight_decay={not decoupled}, but optimizer 'adam' has {decoupled}"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_of(other))
    optimizer.load_state_dict(state_of(same))
    step(model, optimizer, seed=2)
