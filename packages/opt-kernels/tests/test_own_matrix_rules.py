"""A matrix rule from outside, with states of shapes that it chooses: as a drop-in, saved, resumed, refused."""

import copy
import pickle
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from drop_ins import layers, same, step
from torch import nn

from opt_kernels import MatrixError, Number, RuleStateError, StateDictError, StateKind, StateSpec, WholeMatrices
from opt_kernels.formulas import NumberError
from opt_kernels.matrices.access import assign_
from opt_kernels.optim import drop_in
from opt_kernels.rules import init_state
from opt_kernels.works import NOT_SPLIT, Batch, Hyper, Work


@dataclass(frozen=True, kw_only=True)
class LowRank(WholeMatrices):
    """States of the shapes (m, n), (m, r), (n, r) and (r, r)."""

    rank: int = 3
    name = "low_rank"
    numbers = (Number("momentum", 0.9, low=0.0, below=1.0), Number("gain", 2.0, low=1.0))

    @property
    def state_specs(self):
        shapes = {"left": ("m", self.rank), "right": ("n", self.rank), "gram": (self.rank, self.rank)}
        shaped = (StateSpec(name=name, kind=StateKind.SHAPED, shape=shape) for name, shape in shapes.items())
        return (StateSpec(name="total", whole=True), *shaped)

    def init_state(self, main):
        state = super().init_state(main)
        state["right"].diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return state

    def transform_(self, tasks, inputs, skip):
        found = []
        for (hyper, work), grad in zip(tasks, inputs):
            values = moved(work.state, grad, hyper.momentum, hyper.own["gain"])
            assign_([work.state[name] for name in values], values.values(), skip)
            found.append(values["left"] @ values["right"].mT)
        return torch.stack(found)


def moved(state, grad, momentum, gain):
    total = momentum * state["total"] + grad
    left = torch.linalg.qr(total @ state["right"]).Q
    right = gain * nn.functional.normalize(total.mT @ left, dim=-2)
    return {"total": total, "left": left, "right": right, "gram": state["gram"] + right.mT @ right}


LowRankOptimizer = drop_in(LowRank, lr=0.1, rank=2)


def test_a_drop_in_takes_the_steps_of_its_equation():
    trained = layers(6, 5, 4)
    plain = layers(6, 5, 4)
    optimizer = LowRankOptimizer(trained, gain=1.5, weight_decay=0.1, scalar_optimizer="adam", betas=(0.8, 0.9))
    others = torch.optim.AdamW([p for p in plain.parameters() if p.dim() == 1], 0.1, (0.8, 0.9), weight_decay=0.1)
    states = {}
    for param in (p for p in plain.parameters() if p.dim() == 2):
        m, n = param.shape
        states[param] = {"total": torch.zeros(m, n), "right": torch.eye(n, 2), "gram": torch.zeros(2, 2)}
    for seed in range(3):
        step(optimizer, seed)
        for param, given in zip(plain.parameters(), trained.parameters(), strict=True):
            param.grad = given.grad
        others.step()
        for param, state in states.items():
            state.update(moved(state, param.grad, 0.9, 1.5))
            param.data.mul_(1 - 0.1 * 0.1).sub_(0.1 * state["left"] @ state["right"].mT)
    for param, want in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, want)
        for name, value in states.get(want, {}).items():
            torch.testing.assert_close(optimizer.state[param][name], value)


def test_it_is_copied_saved_and_resumed():
    trained = layers(6, 5, 4)
    resumed = layers(6, 5, 4)
    optimizer, other = (LowRankOptimizer(of, scalar_optimizer="lion") for of in (trained, resumed))
    step(optimizer, 1, 2, 3)
    resumed.load_state_dict(trained.state_dict())
    other.load_state_dict(pickle.loads(pickle.dumps(copy.deepcopy(optimizer))).state_dict())
    assert same(step(optimizer, 4, 5), step(other, 4, 5))


def test_options_that_are_not_allowed_are_refused_by_name():
    for options, error, message in (
        ({"gain": 0.5}, NumberError, "gain=0.5 is not allowed; pass a number of at least 1"),
        ({"rank": 2, "lr": -1.0}, NumberError, "lr=-1.0 is not allowed"),
        ({"ranks": 2}, TypeError, "ranks"),
        ({}, MatrixError, "'0.bias' of shape (5,) is not a matrix"),
        ({"rank": 0}, ValueError, "state 'left' with shape=('m', 0)"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            LowRankOptimizer(layers(6, 5, 4), **options)
    with pytest.raises(TypeError, match="pass a Formula, or a class of matrix rules"):
        drop_in(LowRank())
    with pytest.raises(NumberError, match="ranks=2: rule 'LowRank' has no such option"):
        drop_in(LowRank, ranks=2)
    for shape in ((), ("m", "k"), ("m", 0), ("n", 2.0), ("n", True)):
        with pytest.raises(ValueError, match="pass a tuple of 'm'"):
            StateSpec(name="left", kind=StateKind.SHAPED, shape=shape)


def test_a_subclass_with_other_defaults_keeps_bounds():
    class Other(LowRankOptimizer):
        numbers: ClassVar = {**LowRankOptimizer.numbers, "gain": 3.0, "betas": (0.8, 0.9)}

    for name, value in (("gain", 0.5), ("momentum", 1.0), ("betas", (0.8, 1.0)), ("lr", -1.0)):
        with pytest.raises(NumberError, match=f"{name}=.* not allowed"):
            Other([nn.Parameter(torch.zeros(4, 3))], **{name: value})


class Wrong(LowRank):
    def init_state(self, main):
        state = super().init_state(main)
        changed = {1: {"right": state["right"].mT}, 2: {"gram": state["gram"].double()}, 3: {"left": None}}
        return {name: value for name, value in (state | changed[self.rank]).items() if value is not None}


WrongOptimizer = drop_in(Wrong)


def test_a_wrong_state_is_refused_by_the_name_of_its_parameter():
    for rank, name, found, declared in (
        (1, "right", "has shape (1, 6) and torch.float32", "torch.float32 of shape (6, 1)"),
        (2, "gram", "has shape (2, 2) and torch.float64", "torch.float32 of shape (2, 2)"),
        (3, "left", "is missing", "torch.float32 of shape (5, 3)"),
    ):
        message = f"state {name!r} of '0.weight' of shape (5, 6) {found}, but rule 'low_rank' declares {declared}"
        with pytest.raises(RuleStateError, match=re.escape(message)):
            WrongOptimizer(layers(6, 5, 4), rank=rank, scalar_optimizer="adam")
        with pytest.raises(RuleStateError, match=r"of layer\.weight"):
            init_state(Wrong(rank=rank), torch.zeros(5, 6), NOT_SPLIT, of="layer.weight")


def test_a_wrong_state_is_refused_where_it_enters_later():
    rule = LowRank()
    main = torch.randn(5, 6)
    state = {**rule.init_state(main), "right": torch.zeros(3, 6)}
    with pytest.raises(RuleStateError, match=r"'right' of a parameter of shape \(5, 6\) has shape \(3, 6\)"):
        rule.update_([Batch(Hyper(lr=0.1), [Work(grad=main, main=main, state=state)])])
    optimizer = LowRankOptimizer(layers(6, 5, 4), scalar_optimizer="adam")
    step(optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["right"] = saved["state"][0]["right"].mT.contiguous()
    with pytest.raises(StateDictError, match=r"'right' of '0.weight' of shape \(5, 6\).*shape"):
        optimizer.load_state_dict(saved)
    del saved["state"][0]["right"]
    with pytest.raises(StateDictError, match=r"'right' of '0.weight' of shape \(5, 6\) is missing"):
        optimizer.load_state_dict(saved)
