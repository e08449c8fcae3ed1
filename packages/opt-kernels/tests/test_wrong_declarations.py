"""Formulas that mean nothing, or mean another thing to another backend: refused when they are declared."""

import functools
import re
from typing import Any

import pytest
import torch

from opt_kernels.formulas import Choice, Formula, FormulaError, Number, NumberError, State, fma, maximum, sqrt, where
from opt_kernels.rules.elementwise import elementwise
from opt_kernels.works import Batch, Hyper, Work


def scalars(*, lr: float) -> dict[str, float]:
    return {"lr": lr}


def update(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - lr * g, m


def declared(**changes: Any) -> Formula:
    fields: dict[str, Any] = {"name": "mine", "states": (State("m"),), "scalars": scalars, "update": update}
    return Formula(**fields | changes)


# --- updates ----------------------------------------------------------------------------------------------------------


def used_before(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    before = late  # type: ignore[has-type,used-before-def]  # noqa: F821
    late = g
    return p - lr * before * late, m


def set_in_one_branch(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    if lr > 0:
        direction = g
    return p - lr * direction, m


def shadows_a_function(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    sqrt = g
    return p - lr * sqrt, m


def too_many_arguments(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - lr * sqrt(g, m), m  # type: ignore[call-arg]


def too_few_arguments(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - lr * maximum(g), m  # type: ignore[call-arg]


def divides_by_zero(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - g / 0 * lr, m


def constant_that_overflows(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - lr * maximum(g, 1e39), m


def constant_that_underflows(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - lr * g / (m + 1e-50), m


def complex_constant(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - lr * g * 1j, m


def impossible_constant(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    return p - lr * g * (1 / 0), m


def only_a_docstring(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    """Nothing."""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (used_before, "reads late, which is not defined there"),  # C++ read memory that nobody had written
        (set_in_one_branch, "reads direction, which is not defined there"),
        (shadows_a_function, "has a variable 'sqrt', which is the name of a function"),
        (too_many_arguments, "calls sqrt(g, m) with 2 arguments; sqrt takes 1"),
        (too_few_arguments, "calls maximum(g) with 1 arguments; maximum takes 2"),
        (divides_by_zero, "'g / 0' divides by zero"),
        (constant_that_overflows, "has the constant 1e+39, which is not a float32 number"),
        (constant_that_underflows, "has the constant 1e-50, which is not a float32 number"),
        (complex_constant, "the constant '1j' is neither a number nor a string"),
        (impossible_constant, "the constant '1 / 0' cannot be computed: division by zero"),
        (only_a_docstring, "must end with `return p, m`"),
        (max, "<built-in function max> is not a function"),
        (functools.partial(update), "is not a function; define it with `def` in a file"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_an_update_that_cannot_be_right_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(FormulaError, match=re.escape(message)) as caught:
        declared(update=wrong)
    assert "formula 'mine'" in str(caught.value)


def assigns_a_choice(p: Any, g: Any, m: Any, *, lr: Any, gain: Any) -> Any:
    gain = gain * 2
    return p - lr * gain * g, m


def adds_to_a_choice_in_a_branch(p: Any, g: Any, m: Any, *, lr: Any, gain: Any) -> Any:
    if lr > 1:
        gain += 1.0
    return p - lr * gain * g, m


@pytest.mark.parametrize("wrong", [assigns_a_choice, adds_to_a_choice_in_a_branch])
def test_an_update_that_assigns_a_choice_is_refused(wrong: Any) -> None:
    # Compiled sweeps went on with the declared value, while torch's operations took the new one.
    with pytest.raises(FormulaError, match=f"{wrong.__name__} assigns gain, which is a choice"):
        declared(update=wrong, choices=(Choice("gain", 1.0, (1.0, 2.0)),))


# --- scalars ----------------------------------------------------------------------------------------------------------


def named_as_a_state(*, lr: float) -> dict[str, float]:
    return {"lr": lr, "m": lr}


def named_as_the_gradient(*, lr: float) -> dict[str, float]:
    return {"lr": lr, "g": lr}


def twice(*, lr: float) -> dict[str, float]:
    return {"lr": lr, "lr": 2 * lr}  # noqa: F601


def unused(*, lr: float) -> dict[str, float]:
    return {"lr": lr, "decay": 1 - lr}


def set_in_one_branch_of_scalars(*, lr: float, step: float) -> dict[str, float]:
    if step > 1:
        rate = lr
    return {"lr": rate}


def infinite(*, lr: float) -> dict[str, float]:
    return {"lr": lr * 1e999}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (named_as_a_state, "declares the scalar 'm', which `update` does not read"),  # Triton read it for the state
        (named_as_the_gradient, "declares the scalar 'g', which `update` does not read"),
        (twice, "twice returns 'lr' twice"),  # Triton took the first
        (unused, "declares the scalar 'decay', which `update` does not read"),
        (set_in_one_branch_of_scalars, "reads rate, which is not defined there"),
        (infinite, "has the constant inf; constants are finite"),
        (None, "None is not a function"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_scalars_that_cannot_be_right_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(FormulaError, match=re.escape(message)) as caught:
        declared(scalars=wrong)
    assert "formula 'mine'" in str(caught.value)


# --- what is declared beside them -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "my rule"}, "formula 'my rule' has the name 'my rule'"),
        ({"title": "My Rule"}, "has the name 'My Rule'"),
        ({"states": [State("m")]}, "pass a tuple of State(...)"),
        ({"states": ("m",)}, "pass a tuple of State(...)"),
        ({"numbers": {"alpha": 0.5}}, "pass a tuple of Number(...)"),
        ({"states": (State("m", when="amsgrad"),)}, "depends on a choice that is not declared"),
        ({"numbers": (Number("alpha", 0.5),)}, "declares the number 'alpha', which `scalars` does not read"),
        ({"choices": (Choice("mode", True),)}, "declares the choice 'mode', which `scalars` or `update` does not read"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_declarations_without_a_meaning_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormulaError, match=re.escape(message)):
        declared(**changes)


def test_the_default_of_a_choice_is_allowed() -> None:
    with pytest.raises(NumberError, match="mode='c' is not allowed; pass 'a' or 'b'"):
        Choice("mode", "c", ("a", "b"))


def by_warmup(*, lr: float, warmup: float) -> dict[str, float]:
    return {"lr": lr / warmup}


def test_numbers_without_scalars_are_named() -> None:
    """A ZeroDivisionError named neither the rule nor the number."""
    rule = elementwise(declared(scalars=by_warmup, numbers=(Number("warmup", 1.0, low=0.0),)))
    main = torch.ones(3)
    work = Work(grad=main, main=main, state=rule.init_state(main))
    with pytest.raises(
        NumberError,
        match=r"the scalars of formula 'mine' cannot be computed from lr=0.1, warmup=0.0: .*division by zero",
    ):
        rule.update_([Batch(Hyper(lr=0.1, own={"warmup": 0.0}), [work])])


# --- what is right ----------------------------------------------------------------------------------------------------


def with_fma(*, lr: float) -> dict[str, float]:
    return {"lr": fma(lr, 3.0, 0.1 / 3)}


def with_number_literals(p: Any, g: Any, m: Any, *, lr: Any) -> Any:
    size = fma(2, g, 1) if lr > 1 else where(g > 0, 0.3, 0.7) / 3
    return p - lr * size, m


@pytest.mark.parametrize("backend", ["torch", "cpp", "triton"])
@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_numbers_alone_have_the_bits_of_the_compiled_backends(backend: str, default: torch.dtype) -> None:
    """`fma` of numbers was an AttributeError; `where` of two numbers had torch's default dtype."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    formula = declared(scalars=with_fma, update=with_number_literals)
    found = []
    torch.set_default_dtype(default)
    try:
        for lr in (0.1, 1.0):
            for name in ("reference", backend):
                rule = elementwise(formula, backend=name)
                main = torch.linspace(-1.0, 1.0, 130, dtype=torch.float32)
                work = Work(grad=main.clone(), main=main, state=rule.init_state(main))
                rule.update_([Batch(Hyper(lr=lr), [work])])
                found.append(main)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
