"""Entries of parameter groups that change between steps: each takes effect in the next step, or is refused by name.

The cases follow from the registry: every entry of every drop-in's group, with values derived from its default.
"""

import copy
import math

import drop_ins
import numpy as np
import pytest
import torch
from drop_ins import NAMES, step
from torch import nn

from opt_kernels import optim
from opt_kernels.hooks import CautiousDecay, Hyperball
from opt_kernels.params import HOOKS

ON_NAMES = pytest.mark.parametrize("name", NAMES)
SPLITS = {"split_rows": (4, 2, 2), "split_sizes": (3, 5), "num_heads": 2}
NEW = {"adjust_lr_fn": "match_rms_adamw", "use_matrix_rule": False, **SPLITS, "dampening": 0.5, "momentum": 0.5}


def parameters():
    return [drop_ins.parameter(8, 6), drop_ins.parameter(5)]


def built(name, params=None, **options):
    of_sgd = {"momentum": 0.75} if name == "SGD" else {}
    return drop_ins.built(name, params or parameters(), **{"lr": 0.1, **of_sgd, **options})


def entries_of(name):
    return {entry: value for entry, value in built(name).param_groups[0].items() if entry != "params"}


def another(entry, value, name):
    """An allowed value of the entry of this optimizer that is not its present one."""
    if entry in NEW:
        return NEW[entry]
    if isinstance(value, str):
        (choice,) = (choice for choice in getattr(optim, name).formula.choices if choice.name == entry)
        return next(allowed for allowed in choice.allowed if allowed != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(number * 0.875 for number in value)
    return value * 0.5 if value else 0.25 if isinstance(value, float) else 3


def assert_equal(some, others):
    assert all(map(torch.equal, some, others))


@ON_NAMES
def test_a_changed_entry_takes_effect_or_is_refused(name):
    for entry, value in entries_of(name).items():
        optimizer = built(name)
        before = step(optimizer, 2)
        state = copy.deepcopy(optimizer.state_dict())
        for group in (optimizer.param_groups[0], state["param_groups"][0]):
            group[entry] = another(entry, value, name)
        fresh = built(name, [nn.Parameter(weight.clone()) for weight in before])
        try:
            fresh.load_state_dict(state)
            expected = step(fresh, 3)
        except (ValueError, RuntimeError):
            with pytest.raises((ValueError, RuntimeError), match=rf"\b{entry}\b"):
                step(optimizer, 3)
            assert_equal(before, optimizer.param_groups[0]["params"])
        else:
            assert_equal(expected, step(optimizer, 3))


@ON_NAMES
def test_removed_or_unsupported_entries_are_refused_later_too(name):
    optimizer = built(name)
    group = optimizer.param_groups[0]
    for seed in (2, 3):  # before the first step, and after
        for entry in {"maximize", "amsgrad", "differentiable"} - group.keys():
            group[entry] = True
            with pytest.raises(ValueError, match=entry):
                step(optimizer, seed)
            del group[entry]
        before = step(optimizer, seed)
    for entry, value in entries_of(name).items():
        del group[entry]
        for added in ({}, {"a_key_of_others": 1}):  # with as many entries as before
            group |= added
            with pytest.raises((ValueError, RuntimeError), match=rf"\b{entry}\b"):
                step(optimizer, 3)
        del group["a_key_of_others"]
        group[entry] = value
    for betas in ((0.9,), (0.5, 0.6, 0.7, 0.8), 0.9, (0.9, 1.5)) if "betas" in group else ():
        present = group["betas"]
        group["betas"] = betas
        with pytest.raises(ValueError, match="betas="):
            step(optimizer, 3)
        group["betas"] = present
    assert_equal(before, group["params"])
    group["use_muon"] = True  # keys of the caller's own code are set after construction
    step(optimizer, 3)


@ON_NAMES
def test_an_impossible_rate_or_decay_is_refused_in_every_step(name):
    """Symptom: a scheduler that had computed NaN made NaN of every weight."""
    optimizer = built(name)
    group = optimizer.param_groups[0]
    for _ in range(2):
        before = [param.detach().clone() for param in group["params"]]
        for entry, value in [
            ("lr", math.nan),
            ("lr", math.inf),
            ("lr", -1.0),
            ("lr", "0.1"),
            ("lr", 10**400),
            ("lr", torch.tensor(math.nan)),
            ("weight_decay", math.nan),
            ("weight_decay", -1.0),
        ]:
            usual = group[entry]
            group[entry] = value
            with pytest.raises(ValueError, match=f"{entry}=.* is not allowed"):
                step(optimizer, 1)
            assert_equal(group["params"], before)
            group[entry] = usual
        for rate in (-1e-17, np.float32(0.1), torch.tensor(0.1)):
            group["lr"] = rate
            step(optimizer, 1)


def test_a_matrix_may_become_none_before_its_first_step_only():
    optimizer = built("Muon")
    adam = built("Adam", decoupled_weight_decay=True)
    optimizer.param_groups[0] |= {"use_matrix_rule": False, "weight_decay": 0.0}
    assert_equal(step(optimizer, 2), step(adam, 2))
    optimizer.param_groups[0]["use_matrix_rule"] = None
    with pytest.raises(ValueError, match=r"use_matrix_rule=None was set after the first step .* rule 'adam'"):
        step(optimizer, 3)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_group_appended_without_its_entries_is_refused(name):
    optimizer = built(name)
    step(optimizer, 2)
    optimizer.param_groups.append({"params": parameters(), "lr": 0.1, "weight_decay": 0.0})
    with pytest.raises(ValueError, match=r"parameter group 1 has no entry '(betas|momentum)'"):
        step(optimizer, 3)


def test_hooks_that_change_in_place_take_effect():
    hooks = []
    optimizer = built("AdamW", weight_decay=0.5)
    cautious = built("AdamW", weight_decay=0.5)
    optimizer.param_groups[0][HOOKS] = hooks
    assert_equal(step(optimizer, 2), step(cautious, 2))
    hooks.append(CautiousDecay())
    cautious.param_groups[0][HOOKS] = [CautiousDecay()]
    assert_equal(step(optimizer, 3), step(cautious, 3))
    del optimizer.param_groups[0][HOOKS]  # from now on those of the optimizer, of which there are none
    cautious.param_groups[0][HOOKS] = []
    assert_equal(step(optimizer, 4), step(cautious, 4))


def test_unsupported_hooks_of_parameters_are_refused_later_too():
    optimizer = built("Muon", weight_decay=0.5)
    step(optimizer, 2)
    optimizer.param_groups[0][HOOKS] = {"muon": [Hyperball()]}
    with pytest.raises(ValueError, match=r"weight_decay=0\.5: it keeps the norm"):
        step(optimizer, 3)


def test_a_mode_that_was_set_by_hand_is_refused():
    optimizer = built("AdamWScheduleFree")
    trained = step(optimizer, 2)
    optimizer.eval()
    optimizer.param_groups[0]["train_mode"] = True
    with pytest.raises(RuntimeError, match="train_mode"):
        step(optimizer, 3)
    optimizer.train()
    assert_equal(trained, optimizer.param_groups[0]["params"])
    step(optimizer, 3)
