"""One formula on every backend: the same bits where formats are the same, and what a formula may not contain."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_kernels.backends import reference
from opt_kernels.backends.cpp import update as cpp
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.codecs import codec_for
from opt_kernels.formulas import FORMULAS as REGISTERED
from opt_kernels.formulas import Formula
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.sgd import SGD
from opt_kernels.rules import elementwise
from opt_kernels.works import Batch, Hyper, Work

HYPER = Hyper(lr=1e-2, weight_decay=0.1, step=3, betas=(0.9, 0.95), eps=1e-8, momentum=0.8)
NUMEL = 128 * 9 + 37
FORMULAS = {
    "adamw": ADAM,
    "adam-l2": ADAM.with_constants(decoupled_weight_decay=False),
    "adamw-te": ADAM.with_constants(order="te"),
    "adam-te-l2": ADAM.with_constants(order="te", decoupled_weight_decay=False),
    "lion": LION,
    "sgd-nesterov": SGD.with_constants(nesterov=True),
    "sgd-dampening": SGD.with_defaults(dampening=0.3),
    "sgd-plain": SGD.with_constants(has_momentum=False),
}
# Main, out and gradient, and what the states are kept in.
FORMATS: Mapping[str, tuple[torch.dtype, torch.dtype | None, torch.dtype]] = {
    "fp32": (torch.float32, None, torch.float32),
    "fp16-out": (torch.float32, torch.float16, torch.float16),
    "bf16": (torch.bfloat16, None, torch.bfloat16),
    "fp16": (torch.float16, None, torch.float16),
}
STATES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2),
    "8-bit": (torch.int8, torch.uint8),
}
needs_compiler = pytest.mark.skipif(not usable(), reason="no C++ compiler here")


def values(seed: int, *, special: bool) -> Tensor:
    """Numbers over many decades and a block of zeros; with `special`, two blocks with values that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUMEL, generator=generator) * 10 ** (-5 * torch.rand(NUMEL, generator=generator))
    x[128:256] = 0.0
    if special:
        x[300], x[500], x[513] = torch.inf, torch.nan, -torch.inf
    return x


def work_of(
    formula: Formula,
    formats: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    special: bool = False,
) -> tuple[Work, dict[str, Any]]:
    main, out, grad = formats
    codecs = {s.name: codec_for(s.name, dtypes[0 if s.signed else 1], signed=s.signed) for s in formula.states}
    state: dict[str, Tensor] = {}
    for index, (one, codec) in enumerate(zip(formula.states, codecs.values())):
        x = values(index, special=False)
        state[one.name] = torch.empty(NUMEL, dtype=codec.dtype)
        scales = torch.empty(-(-NUMEL // codec.block)) if codec.block else None
        codec.encode_(state[one.name], scales, x if one.signed else x.square())
        state |= {} if scales is None else {f"{one.name}_scale": scales}
    work = Work(
        grad=values(8, special=special).to(grad),
        main=values(9, special=False).to(main),
        out=None if out is None else torch.empty(NUMEL, dtype=out),
        state=state,
        first=2**32 - 640,
    )
    return work, codecs


def written(work: Work) -> dict[str, Tensor]:
    found = {"main": work.main, "out": work.out, **work.state}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_same_numbers(one: Work, other: Work) -> None:
    for (name, a), b in zip(written(one).items(), written(other).values(), strict=True):
        assert torch.equal(a.isnan(), b.isnan()), name
        finite = ~a.isnan()
        assert torch.equal(a[finite].float(), b[finite].float()), name


# Each is a library to compile: every format with one formula, every formula with two formats.
CASES = {
    f"{formula}-{kept}-{states}": (FORMULAS[formula], FORMATS[kept], STATES[states])
    for formula in FORMULAS
    for kept in FORMATS
    for states in STATES
    if (kept, states) in (("fp32", "fp32"), ("fp16-out", "8-bit"))
    or (formula == "adamw" and (kept == "fp32" or states == "fp8"))
}


@needs_compiler
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize(("formula", "formats", "dtypes"), CASES.values(), ids=CASES.keys())
def test_the_compiled_sweep_has_the_bits_of_the_reference(
    formula: Formula,
    formats: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    dtypes: tuple[torch.dtype, torch.dtype],
    special: bool,
) -> None:
    compiled, codecs = work_of(formula, formats, dtypes, special=special)
    expected, _ = work_of(formula, formats, dtypes, special=special)
    reference.update_([Batch(HYPER, [expected])], formula, codecs, grad_scale=0.3)
    cpp.update_([Batch(HYPER, [compiled])], formula, codecs, grad_scale=0.3)
    assert_same_numbers(compiled, expected)


@needs_compiler
@pytest.mark.parametrize("step", [1, 2**20 + 17])
def test_the_compiled_sweep_rounds_stochastically_as_the_reference_does(step: int) -> None:
    compiled, codecs = work_of(ADAM, FORMATS["bf16"], STATES["8-bit"])
    expected, _ = work_of(ADAM, FORMATS["bf16"], STATES["8-bit"])
    batch = replace(HYPER, step=step)
    reference.update_([Batch(batch, [expected])], ADAM, codecs, stochastic_rounding=True)
    cpp.update_([Batch(batch, [compiled])], ADAM, codecs, stochastic_rounding=True)
    assert_same_numbers(compiled, expected)
    nearest, _ = work_of(ADAM, FORMATS["bf16"], STATES["8-bit"])
    cpp.update_([Batch(batch, [nearest])], ADAM, codecs)
    assert nearest.main is not None
    assert compiled.main is not None
    assert not torch.equal(nearest.main, compiled.main)


def no_scalars(*, lr: float) -> dict[str, float]:
    return {"lr": lr}


@pytest.mark.parametrize("name", REGISTERED)
def test_a_rule_is_one_file_of_at_most_sixty_lines(name: str) -> None:
    source = inspect.getsource(importlib.import_module(f"opt_kernels.formulas.{name}"))
    assert source.count("Formula(") == 1
    assert len(source.splitlines()) <= 60


def own_adam(p: Any, g: Any, exp_avg: Any, exp_avg_sq: Any, *, lr: Any) -> Any:
    return p - lr, exp_avg, exp_avg_sq


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_rule_of_ones_own_may_have_the_name_of_ours(backend: str) -> None:
    # It ran as torch's fused AdamW.
    formula = Formula(name="adam", states=ADAM.states, scalars=no_scalars, update=own_adam)
    rule = elementwise(formula, backend=backend)
    main = torch.zeros(4)
    rule.update_([Batch(HYPER, [Work(grad=torch.ones(4), main=main, state=rule.init_state(main))])])
    assert torch.equal(main, torch.full((4,), -1e-2))
