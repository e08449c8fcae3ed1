"""Elementwise rules, the formats of their values, and works with float64 references."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from codec_values import DTYPES
from tiers import sampled
from torch import Tensor

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.codecs import join, split_
from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.rules import SGD, Adam, Lion, Rule, elementwise
from opt_kernels.works import Batch, Hyper, Work

Make = Callable[..., Rule]
HYPER = Hyper(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, momentum=0.8)
RULES: Mapping[str, Make] = {
    "adamw": Adam,
    "adam-l2": lambda **options: Adam(decoupled=False, **options),
    "adamw-te": lambda **options: Adam(order="te", **options),
    "adam-te-l2": lambda **options: Adam(order="te", decoupled=False, **options),
    "sgd": SGD,
    "sgd-nesterov": lambda **options: SGD(nesterov=True, **options),
    "sgd-dampening": lambda **options: SGD(dampening=0.3, **options),
    "sgd-plain": lambda **options: SGD(momentum_buffer=False, **options),
    "lion": Lion,
}


def only_lr(*, lr: float) -> dict[str, float]:
    """The scalars of a formula that has one."""
    return {"lr": lr}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The numbers that a parameter is kept in."""

    main: torch.dtype | None = torch.float32
    out: torch.dtype | None = None
    grad: torch.dtype = torch.float32
    remainder: torch.dtype = torch.int16  # of works without a main

    def work(self, rule: Rule, start: Tensor) -> Work:
        """A work that begins at `start`, float64, with no gradient yet."""
        main = None if self.main is None else start.to(self.main, copy=True)
        out = None if self.out is None else torch.empty_like(start, dtype=self.out)
        remainder = torch.empty_like(start, dtype=self.remainder) if self.main is None else None
        if remainder is not None:
            assert out is not None
            split_(out, remainder, start.float())
        elif out is not None:
            out.copy_(start)
        anchor = out if main is None else main
        assert anchor is not None
        state = rule.init_state(anchor)
        return Work(grad=torch.zeros_like(start, dtype=self.grad), main=main, out=out, remainder=remainder, state=state)


KEPT: Mapping[str, Kept] = {
    "fp64": Kept(main=torch.float64, grad=torch.float64),
    "fp32": Kept(main=torch.float32),
    "fp32-g16": Kept(main=torch.float32, grad=torch.bfloat16),
    "fp32-gfp16": Kept(main=torch.float32, grad=torch.float16, out=torch.float16),
    "fp32-out16": Kept(main=torch.float32, out=torch.bfloat16),
    "fp32-out16-g16": Kept(main=torch.float32, out=torch.bfloat16, grad=torch.bfloat16),
    "remainder": Kept(main=None, out=torch.bfloat16),
    "remainder-g16": Kept(main=None, out=torch.bfloat16, grad=torch.bfloat16),
    "short-remainder": Kept(main=None, out=torch.bfloat16, remainder=torch.int8),
    "bf16": Kept(main=torch.bfloat16, grad=torch.bfloat16),
}
VARIANTS = {name: make().formula for name, make in RULES.items() if "-" in name}


class Combination(NamedTuple):
    """A formula with formats of its parameter and states."""

    formula: Formula
    kept: str  # of KEPT
    states: str  # of DTYPES

    def rule(self, backend: str) -> Rule:
        signed, unsigned = DTYPES[self.states]
        dtypes = {f"{state.name}_dtype": signed if state.signed else unsigned for state in self.formula.declared}
        return elementwise(self.formula, backend=backend, **dtypes)


# Each is a library to compile: every format with one formula, every formula with two formats.
COMBINATIONS = {
    f"{name}-{kept}-{states}": Combination(formula, kept, states)
    for name, formula in {**FORMULAS, **VARIANTS}.items()
    for kept in KEPT
    for states in DTYPES
    if (kept, states) == ("remainder-g16", "8-bit")
    or ((kept, states) == ("fp32", "fp32") and name in {"adam", "sgd", "lion", *VARIANTS})
    or (name == "adam" and (kept == "fp32" or states == "e4m3") and kept != "fp64")
}


NEEDS_COMPILER = pytest.mark.skipif(not usable(), reason="no C++ compiler here")
NEEDS_TRITON = [
    pytest.mark.needs_extra,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]
MARKS = {"cpp": NEEDS_COMPILER, "triton": NEEDS_TRITON}
FAST = {name: name for name in ("torch", "cpp", "triton")}
BACKENDS = {"reference": "reference", **FAST}


def on(*backends: str) -> pytest.MarkDecorator:
    """Parametrize by backends, each skipped where it is not installed."""
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=MARKS.get(name, ())) for name in backends])


ON_FAST = on(*FAST)
ON_BACKENDS = on(*BACKENDS)
COMPILED = on("cpp", "triton")


def in_another_process(script: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """`script` in a fresh interpreter; a variable that is None is not set there."""
    changed = {key: value for key, value in (os.environ | environment).items() if value is not None}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=changed, capture_output=True, text=True, timeout=300, check=False)


def device_of(backend: str | None) -> torch.device:
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


def on_pairs_of(**axes: Mapping[str, object]) -> pytest.MarkDecorator:
    """Parametrize by enough cases that every two values of these arguments meet; by all at night."""
    cases = list(product(*(axis.items() for axis in axes.values())))
    names = [[name for name, _ in case] for case in cases]
    cases = [case for case, of in zip(cases, names) if not {"triton", "fp64"} <= {*of}]  # Triton sweeps no float64
    cases = sampled(cases, lambda case: [(at, name) for at, (name, _) in enumerate(case)])
    named = []
    for case in cases:
        marks = next((MARKS[name] for name, _ in case if name in MARKS), ())
        named.append(pytest.param(*(value for _, value in case), id="-".join(name for name, _ in case), marks=marks))
    return pytest.mark.parametrize(",".join(axes), named)


def gradients(shape: tuple[int, ...], dtype: torch.dtype, steps: int = 3) -> list[Tensor]:
    """Gradients of very different sizes, in numbers that every dtype has; a tenth of them zero."""
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn((2, *shape), generator=generator) for _ in range(steps)]
    kept = [torch.rand(shape, generator=generator) > 0.1 for _ in range(steps)]
    return [(n[0] * torch.exp(n[1]) * k).bfloat16().to(dtype) for n, k in zip(noise, kept)]


def run(rule: Rule, work: Work, grads: Any = None, *, scale: Any = 1.0, steps: int = 3, **hyper: Any) -> Work:
    """`work` after steps with these gradients, or with so many."""
    for step, grad in enumerate(grads or gradients(tuple(work.grad.shape), work.grad.dtype, steps), start=1):
        work = replace(work, grad=grad.to(work.grad))
        rule.update_([Batch(replace(HYPER, step=step, **hyper), [work])], grad_scale=scale)
    return work


def start_of(shape: tuple[int, ...], backend: str | None = None) -> Tensor:
    """Weights that bfloat16 represents exactly, so that all storage formats start equal."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().double().to(device_of(backend))


def work_of(rule: Rule, numel: int = 1025, kept: str = "fp32-out16-g16", backend: str | None = None) -> Work:
    """A work before its first step, with a gradient."""
    work = KEPT[kept].work(rule, start_of((numel,), backend))
    return replace(work, grad=gradients((numel,), KEPT[kept].grad)[0].to(device_of(backend)))


def shifted(work: Work, offset: int = 3) -> Work:
    """The same values, `offset` elements after an aligned address."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.new_empty(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)

    return mapped(work, lambda name, tensor: moved(tensor))


def assert_same(one: Work, other: Work) -> None:
    """Check that all that a rule may write has the same bits, except for the payloads of NaNs."""
    for a, b in zip(written(one), written(other), strict=True):
        a = a.cpu()
        b = b.cpu()
        assert a.dtype is b.dtype
        assert torch.equal(a.isnan(), b.isnan())
        same = a.reshape(-1, 1).view(torch.uint8) == b.reshape(-1, 1).view(torch.uint8)  # (elements, bytes)
        assert (same.all(dim=1) | a.isnan().reshape(-1)).all()


def written(work: Work) -> list[Tensor]:
    return [t for t in (work.main, work.out, work.remainder, *work.state.values()) if t is not None]


def main_of(work: Work) -> Tensor:
    """The main values, in float64, on the host."""
    if work.main is not None:
        return work.main.double().cpu()
    assert work.out is not None
    assert work.remainder is not None
    return join(work.out, work.remainder).double().cpu()


def mapped(work: Work, function: Callable[[str, Tensor], Tensor]) -> Work:
    """`work` with the results of a function of the name and the tensor."""
    state = {name: function(name, tensor) for name, tensor in work.state.items()}
    others = {name: getattr(work, name) for name in ("grad", "main", "out", "remainder")}
    return replace(work, state=state, **{name: None if t is None else function(name, t) for name, t in others.items()})


def cut(work: Work, part: slice, block: int = 1) -> Work:
    scales = slice(part.start // block, -(-part.stop // block))
    pieces = mapped(work, lambda name, tensor: tensor[scales if name.endswith("_scale") else part])
    return replace(pieces, first=work.first + part.start)
