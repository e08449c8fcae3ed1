"""Every elementwise rule of the registry: equal bits on all backends, states in any dtype, drop-ins."""

import ast
import copy
import inspect
import pickle
from collections.abc import Callable
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
from opt_kernels.formulas import FORMULAS, Formula, NumberError
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


def build(name: str, **options: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    param = torch.nn.Parameter(values(0).to(options.pop("dtype", torch.float32)))
    make: Callable[..., torch.optim.Optimizer] = getattr(optim, name)
    return param, make([param], lr=0.01, weight_decay=0.1, backend="torch", **options)


def train(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        param.grad = values(100 + step).to(param.dtype)
        optimizer.step()


@DROP_INS
@pytest.mark.parametrize("narrow", ["8-bit", None])
def test_a_resumed_drop_in_goes_on_bit_for_bit(name: str, narrow: str | None) -> None:
    formula: Formula = getattr(optim, name).formula
    options: dict[str, Any] = {"mains": "remainder", "dtype": torch.bfloat16} if narrow else {}
    options |= dtypes(formula, narrow) if narrow else {}
    param, optimizer = build(name, **options)
    train(param, optimizer, range(3))
    again, resumed = build(name, **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    again.data.copy_(param.data)
    train(param, optimizer, range(3, 6))
    train(again, resumed, range(3, 6))
    assert torch.equal(param, again)
    assert type(copy.deepcopy(optimizer)) is type(pickle.loads(pickle.dumps(optimizer))) is type(optimizer)


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


REFUSED: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "a number below its range": ("AdEMAMix", {"alpha": -1.0}, NumberError, "alpha=-1.0 is not allowed; pass a"),
    "a NaN": ("AdEMAMix", {"alpha": float("nan")}, NumberError, "alpha=nan is not allowed"),
    "a beta of 1": ("AdEMAMix", {"betas": (0.9, 1.0, 0.9)}, NumberError, "pass 3 numbers of at least 0 and below 1"),
    "too few betas": ("Adan", {"betas": (0.9, 0.99)}, NumberError, r"betas=\(0.9, 0.99\) are not allowed; pass 3"),
    "a string": ("MARSAdamW", {"gamma": "0.1"}, NumberError, "gamma='0.1' is not allowed; pass a number of at least 0"),
    "a misspelt number": ("AdEMAMix", {"alhpa": 1.0}, TypeError, "unexpected keyword argument 'alhpa'"),
    "another rule's number": ("Lion", {"alpha": 1.0}, TypeError, "unexpected keyword argument 'alpha'"),
    "a choice": ("AdamW", {"order": "apex"}, NumberError, "order='apex' is not allowed; pass 'torch' or 'te'"),
    "capturable": ("NAdam", {"capturable": True}, ValueError, "capturable=True with a parameter on 'cpu'"),
    "codes of the other kind": ("RAdam", {"exp_avg_sq_dtype": torch.int8}, ValueError, "exp_avg_sq_dtype=torch.int8"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "options", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_wrong_option_is_refused_by_name_when_built(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(name, **options)


def test_a_wrong_number_of_a_group_is_refused_by_name() -> None:
    param = torch.nn.Parameter(values(0))
    with pytest.raises(NumberError, match=r"alpha=-2.0 is not allowed"):
        optim.AdEMAMix([{"params": [param], "alpha": -2.0}])
    optimizer = optim.AdEMAMix([{"params": [param], "alpha": 2.0}])
    assert optimizer.param_groups[0]["alpha"] == 2.0
    saved = optimizer.state_dict()
    saved["param_groups"][0]["alpha"] = -2.0
    with pytest.raises(optim.StateDictError, match=r"alpha=-2.0 is not allowed"):
        optimizer.load_state_dict(saved)
