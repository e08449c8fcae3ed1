"""Every elementwise rule of the registry: equal bits on all backends, states in any dtype, drop-ins."""

import ast
import inspect
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opt_kernels
from opt_kernels import optim
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.rules import ElementwiseRule, elementwise
from opt_kernels.works import Batch, Hyper, Work

NUMEL = 128 * 3 + 37
EVERY = pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
NARROW = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "8-bit": (torch.int8, torch.uint8),
}
FAST = [
    "torch",
    pytest.param("cpp", marks=pytest.mark.skipif(not usable(), reason="no C++ compiler here")),
    pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")),
]


def dtypes(formula: Formula, narrow: str) -> dict[str, torch.dtype]:
    signed, unsigned = NARROW[narrow]
    return {f"{state.name}_dtype": signed if state.signed else unsigned for state in formula.declared}


def values(seed: int) -> Tensor:
    """Numbers over several decades, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUMEL, generator=generator) * 10 ** (-4 * torch.rand(NUMEL, generator=generator))
    return x.masked_fill(torch.rand(NUMEL, generator=generator) < 0.05, 0.0)


def hyper_of(rule: ElementwiseRule, step: int) -> Hyper:
    numbers = rule.formula.defaults | {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9}
    shared = {name: numbers[name] for name in ("lr", "weight_decay", "betas", "eps", "momentum") if name in numbers}
    return Hyper(step=step, own={name: numbers[name] for name in rule.hyper_names}, **shared)  # type: ignore[arg-type]


def work_of(rule: ElementwiseRule, **tensors: Tensor | None) -> Work:
    given: dict[str, Any] = {"main": values(0), "grad": torch.zeros(NUMEL)} | tensors
    device = given["main"] if given["main"] is not None else given["out"]
    return Work(state=rule.init_state(device), **given)


def run(rule: ElementwiseRule, work: Work, *, steps: int = 3, **options: Any) -> Work:
    for step in range(1, steps + 1):
        rule.update_(
            [Batch(hyper_of(rule, step), [replace(work, grad=values(10 + step).to(work.grad.dtype))])], **options
        )
    return work


def written(work: Work) -> dict[str, Tensor]:
    found = {"main": work.main, "out": work.out, "remainder": work.remainder, **work.state}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def assert_same(one: Work, other: Work) -> None:
    for (name, a), b in zip(written(one).items(), written(other).values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@EVERY
@pytest.mark.parametrize("backend", FAST)
def test_every_backend_has_the_bits_of_the_reference(formula: Formula, backend: str) -> None:
    """Mains and outs in other numbers, 8-bit states: three steps, of which the first and a rectified one differ."""
    options = dtypes(formula, "8-bit")
    slow, fast = (elementwise(formula, backend=name, **options) for name in ("reference", backend))
    expected, found = (work_of(rule, out=torch.empty(NUMEL, dtype=torch.float16)) for rule in (slow, fast))
    run(slow, expected, grad_scale=0.3)
    run(fast, found, grad_scale=0.3)
    if formula.name in ("adam", "sgd") and backend == "torch":  # torch's fused sweeps: the last bits may differ
        torch.testing.assert_close(found.main, expected.main, rtol=1e-5, atol=1e-6)
    else:
        assert_same(found, expected)


@EVERY
@pytest.mark.parametrize("narrow", NARROW)
def test_narrow_states_stay_close(formula: Formula, narrow: str) -> None:
    wide, thin = elementwise(formula, backend="torch"), elementwise(formula, backend="torch", **dtypes(formula, narrow))
    expected, found = run(wide, work_of(wide)), run(thin, work_of(thin))
    assert {spec.name: spec.dtype for spec in thin.state_specs} == {n: t.dtype for n, t in found.state.items()}
    assert expected.main is not None
    assert found.main is not None
    # Three steps of about lr, with states rounded to a few bits: for most elements far less than one step.
    assert (found.main - expected.main).abs().median() < 0.01 / 4
    if formula.name not in ("lion", "signum"):  # their signs survive
        assert not torch.equal(found.main, expected.main)


# --- drop-ins --------------------------------------------------------------------------------------------------------

DROP_INS = pytest.mark.parametrize("name", optim.catalogue.__all__)


@DROP_INS
def test_a_drop_in_has_a_signature_and_says_what_it_computes(name: str) -> None:
    cls = getattr(optim, name)
    parameters = inspect.signature(cls).parameters
    assert [*parameters][:2] == ["params", "lr"]
    assert {number.name for number in cls.formula.numbers} <= {*parameters}
    assert cls.formula.description in inspect.getdoc(cls)
    assert cls.__module__ == "opt_kernels.optim.catalogue"


STUBS = (optim.catalogue, optim.matrix_catalogue)


@pytest.mark.parametrize("module", STUBS, ids=lambda module: module.__name__)
def test_type_checkers_see_the_same_signatures(module: Any) -> None:
    for name, stub in stubs_of(module).items():
        arguments = next(node for node in stub.body if isinstance(node, ast.FunctionDef)).args
        positional, by_name = arguments.args[1:], arguments.kwonlyargs
        required = [ast.Constant(...)] * (len(positional) - len(arguments.defaults))
        written = [*zip(positional, required + arguments.defaults), *zip(by_name, arguments.kw_defaults)]
        expected = inspect.signature(getattr(module, name)).parameters.values()
        assert [(arg.arg, arg in by_name) for arg, _ in written] == [
            (p.name, p.kind is p.KEYWORD_ONLY) for p in expected
        ]
        for (arg, value), parameter in zip(written, expected, strict=True):
            default = parameter.default
            is_literal = isinstance(default, bool | int | float | str | tuple | torch.dtype | None)
            assert value is not None
            assert ast.unparse(value) == (repr(default) if is_literal else "..."), f"{name}: {arg.arg}"
            annotation = ast.unparse(arg.annotation) if arg.annotation else ""
            kind = type(default).__name__ if isinstance(default, bool | int | float | str | torch.dtype) else ""
            assert annotation, f"{name}: {arg.arg}"
            assert kind in annotation or (kind == "int" and "float" in annotation), f"{name}: {arg.arg}"


def stubs_of(module: Any) -> dict[str, ast.ClassDef]:
    parsed = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}


def test_type_checkers_find_every_drop_in_at_the_top_level() -> None:
    """Symptom: mypy said that opt_kernels.AdamW does not exist. It reads `__all__` only where it is written out."""
    imports = [node for node in ast.walk(ast.parse(Path(str(opt_kernels.__file__)).read_text())) if is_star(node)]
    for module in STUBS:
        assert module.__name__ in {node.module for node in imports}
        assert {*stubs_of(module)} == {*module.__all__}
        parsed = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
        (names,) = (node.value for node in parsed.body if isinstance(node, ast.Assign))
        assert sorted(ast.literal_eval(names)) == sorted(module.__all__)


def is_star(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
