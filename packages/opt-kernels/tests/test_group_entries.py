"""Entries of parameter groups that change between steps: each takes effect in the next step, or is refused by name.

The cases follow from the registry: every entry of every drop-in's group, with values derived from its default.
"""

import copy
from typing import Any

import drop_ins
import pytest
import torch
from torch import Tensor, nn

from opt_kernels import RuleOptimizer, optim
from opt_kernels.hooks import CautiousDecay, Hyperball
from opt_kernels.optim.groups import HOOKS

NAMES = drop_ins.NAMES
SPLITS = {"split_rows": (4, 2, 2), "split_sizes": (3, 5), "num_heads": 2}
NEW = {"adjust_lr_fn": "match_rms_adamw", "use_matrix_rule": False, **SPLITS, "dampening": 0.5, "momentum": 0.5}


def built(name: str, params: list[nn.Parameter], **options: Any) -> RuleOptimizer:
    optimizer: RuleOptimizer = drop_ins.built(
        name, params, **{"lr": 0.1, **({"momentum": 0.75} if name == "SGD" else {}), **options}
    )
    return optimizer


def parameters() -> list[nn.Parameter]:
    return [drop_ins.parameter(8, 6), drop_ins.parameter(5)]


def step(optimizer: RuleOptimizer, *, seed: int) -> list[Tensor]:
    return drop_ins.step(optimizer, seed)


def other(name: str, value: Any, *, of: str) -> Any:
    """An allowed value of the entry `name` of the optimizer `of` that is not its present one."""
    if name in NEW:
        return NEW[name]
    if isinstance(value, str):
        (choice,) = (choice for choice in getattr(optim, of).formula.choices if choice.name == name)
        return next(one for one in choice.allowed if one != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(one * 0.875 for one in value)
    return value * 0.5 if value else 0.25 if isinstance(value, float) else 3


def entries() -> list[tuple[str, str]]:
    found = []
    for name in NAMES:
        group = built(name, parameters()).param_groups[0]
        found += [(name, entry) for entry in group if entry != "params"]
    return found


def as_a_fresh_optimizer(name: str, state: dict[str, Any], weights: list[Tensor], options: dict[str, Any]) -> Any:
    """The weights after a step of an optimizer that loaded this state, or None where it refuses the state."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    try:
        fresh = built(name, params, **options)
        fresh.load_state_dict(state)
        return step(fresh, seed=3)
    except (ValueError, RuntimeError):
        return None


def check_change(name: str, entry: str, value: Any, **options: Any) -> None:
    optimizer = built(name, parameters(), **options)
    before = step(optimizer, seed=2)
    state = copy.deepcopy(optimizer.state_dict())
    for group in (optimizer.param_groups[0], state["param_groups"][0]):
        group[entry] = value
    expected = as_a_fresh_optimizer(name, state, before, options)
    if expected is None:
        with pytest.raises((ValueError, RuntimeError), match=rf"\b{entry}\b"):
            step(optimizer, seed=3)
        assert all(map(torch.equal, before, (p.detach() for p in optimizer.param_groups[0]["params"])))
    else:
        assert all(map(torch.equal, expected, step(optimizer, seed=3)))


@pytest.mark.parametrize(("name", "entry"), entries())
def test_a_changed_entry_takes_effect_or_is_refused(name: str, entry: str) -> None:
    """Entries that choose the rule's behaviour, such as nesterov, num_heads and ns_steps, were ignored."""
    check_change(name, entry, other(entry, built(name, parameters()).param_groups[0][entry], of=name))


@pytest.mark.parametrize(("name", "entry"), [case for case in entries() if case[1] in SPLITS])
def test_a_change_back_of_a_split_takes_effect_or_is_refused(name: str, entry: str) -> None:
    default = built(name, parameters()).param_groups[0][entry]
    optimizer = built(name, parameters())
    group = {"params": parameters()[:1], entry: SPLITS[entry]}
    optimizer.add_param_group(group)
    step(optimizer, seed=2)
    optimizer.param_groups[1][entry] = default
    state, weights = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups[1]["params"][0].detach().clone()
    fresh = built(name, parameters())
    fresh.add_param_group({"params": [nn.Parameter(weights)]})
    with torch.no_grad():
        for param, present in zip(fresh.param_groups[0]["params"], optimizer.param_groups[0]["params"]):
            param.copy_(present)
    try:
        fresh.load_state_dict(state)
    except ValueError:
        with pytest.raises(ValueError, match=entry):
            step(optimizer, seed=3)
        return
    assert all(map(torch.equal, step(optimizer, seed=3), step(fresh, seed=3)))


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_entry_is_refused(name: str) -> None:
    """The default of `Hyper` was used instead, AdamW's betas for any rule."""
    optimizer = built(name, parameters())
    before = step(optimizer, seed=2)
    group = optimizer.param_groups[0]
    for entry in [entry for entry in group if entry != "params"]:
        value = group.pop(entry)
        with pytest.raises((ValueError, RuntimeError), match=rf"\b{entry}\b"):
            step(optimizer, seed=3)
        group["a_key_of_others"] = 1  # as many entries as before
        with pytest.raises((ValueError, RuntimeError), match=rf"\b{entry}\b"):
            step(optimizer, seed=3)
        del group["a_key_of_others"]
        group[entry] = value
    assert all(map(torch.equal, before, (param.detach() for param in group["params"])))
    step(optimizer, seed=3)


@pytest.mark.parametrize("name", [name for name in NAMES if "betas" in built(name, parameters()).param_groups[0]])
@pytest.mark.parametrize("betas", [(0.9,), (0.5, 0.6, 0.7, 0.8), 0.9, (0.9, 1.5)], ids=str)
def test_betas_of_another_form_are_refused(name: str, betas: Any) -> None:
    """A third number was ignored, a single one raised a TypeError without a name."""
    optimizer = built(name, parameters())
    step(optimizer, seed=2)
    optimizer.param_groups[0]["betas"] = betas
    with pytest.raises(ValueError, match="betas="):
        step(optimizer, seed=3)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_of_torch_that_is_added_later_is_refused(name: str) -> None:
    optimizer = built(name, parameters())
    group = optimizer.param_groups[0]
    for seed in (2, 3):  # before the first step, and after
        for entry in {"maximize", "amsgrad", "differentiable"} - group.keys():
            group[entry] = True
            with pytest.raises(ValueError, match=entry):
                step(optimizer, seed=seed)
            del group[entry]
        step(optimizer, seed=seed)
    group["use_muon"] = True  # keys of the caller's own code are set after construction
    step(optimizer, seed=3)


def test_a_matrix_may_become_none_before_its_first_step_only() -> None:
    optimizer, adam = built("Muon", parameters()), built("Adam", parameters(), decoupled_weight_decay=True)
    optimizer.param_groups[0] |= {"use_matrix_rule": False, "weight_decay": 0.0}
    assert all(map(torch.equal, step(optimizer, seed=2), step(adam, seed=2)))
    optimizer.param_groups[0]["use_matrix_rule"] = None
    with pytest.raises(ValueError, match=r"use_matrix_rule=None was set after the first step .* rule 'adam'"):
        step(optimizer, seed=3)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_group_that_was_appended_without_its_entries_is_refused(name: str) -> None:
    optimizer = built(name, parameters())
    step(optimizer, seed=2)
    optimizer.param_groups.append({"params": parameters(), "lr": 0.1, "weight_decay": 0.0})
    with pytest.raises(ValueError, match=r"parameter group 1 has no entry '(betas|momentum)'"):
        step(optimizer, seed=3)


def test_hooks_that_change_in_place_take_effect() -> None:
    """A list of hooks that was modified in place was compared by its identity alone."""
    hooks: list[Any] = []
    optimizer, cautious = (built("AdamW", parameters(), weight_decay=0.5) for _ in range(2))
    for each, own in ((optimizer, hooks), (cautious, [CautiousDecay()])):
        each.param_groups[0][HOOKS] = []
        step(each, seed=2)
        each.param_groups[0][HOOKS] = own
    step(optimizer, seed=3)
    step(cautious, seed=3)
    hooks.append(CautiousDecay())
    with torch.no_grad():
        for param, of_cautious in zip(optimizer.param_groups[0]["params"], cautious.param_groups[0]["params"]):
            param.copy_(of_cautious)
    assert all(map(torch.equal, step(optimizer, seed=4), step(cautious, seed=4)))
    del optimizer.param_groups[0][HOOKS]  # from now on those of the optimizer, of which there are none
    cautious.param_groups[0][HOOKS] = []
    assert all(map(torch.equal, step(optimizer, seed=5), step(cautious, seed=5)))


def test_hooks_that_a_parameter_does_not_support_are_refused_later_too() -> None:
    optimizer = built("Muon", parameters(), weight_decay=0.5)
    step(optimizer, seed=2)
    optimizer.param_groups[0][HOOKS] = {"muon": [Hyperball()]}
    with pytest.raises(ValueError, match=r"weight_decay=0\.5: it keeps the norm"):
        step(optimizer, seed=3)


def test_a_mode_that_was_set_by_hand_is_refused() -> None:
    """Training went on from the averaged weights."""
    optimizer = built("AdamWScheduleFree", parameters())
    trained = step(optimizer, seed=2)
    optimizer.eval()  # type: ignore[attr-defined]
    optimizer.param_groups[0]["train_mode"] = True
    with pytest.raises(RuntimeError, match="train_mode"):
        step(optimizer, seed=3)
    optimizer.train()  # type: ignore[attr-defined]
    assert all(map(torch.equal, trained, (param.detach() for param in optimizer.param_groups[0]["params"])))
    step(optimizer, seed=3)
