"""Sweeps over coded states run a formula in two parts, and divide roots by scalars without a division."""

import ast
from typing import Any

import pytest
import torch
from cpp_works import needs_compiler

from opt_kernels.backends import reference
from opt_kernels.backends.cpp import update as cpp
from opt_kernels.backends.cpp.chunks import cut
from opt_kernels.codecs import codec_for, init_state
from opt_kernels.formulas import Formula, State, sqrt
from opt_kernels.works import Batch, Hyper, Work

SPECIAL = [0.0, 1e-45, 1e-38, 3e38, torch.inf, torch.nan]
DIVISORS = [1.0, 0.3, 0.9999999, 1e-4, 2.0**-39, 1.1e12, 2.0**-41, 1e-30, 1e30, 1e38, 1e-45, -0.7, 0.0, torch.inf]


def no_scalars(*, lr: float) -> dict[str, float]:
    return {"lr": lr}


def root_over_lr(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    return sqrt(g) / lr, x


def divided(g: torch.Tensor, divisor: float) -> torch.Tensor:
    """sqrt(g) / divisor of a sweep with an 8-bit state."""
    formula = Formula(name="root", states=(State(name="x"),), scalars=no_scalars, update=root_over_lr)
    codec = codec_for("x", torch.int8, signed=True)
    work = Work(grad=g, main=torch.zeros_like(g), state=init_state({"x": codec}, g))
    cpp.update_([Batch(Hyper(lr=divisor), [work])], formula, {"x": codec})
    assert work.main is not None
    return work.main


@needs_compiler
@pytest.mark.parametrize("divisor", DIVISORS)
def test_a_root_over_a_scalar_is_rounded_correctly(divisor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-120, 120, (5000,), generator=generator)
    g = torch.cat([torch.tensor(SPECIAL), torch.ldexp(1 + torch.rand(5000, generator=generator), powers)])
    expected = g.double().sqrt().float() / torch.tensor(divisor)
    torch.testing.assert_close(divided(g, divisor), expected, rtol=0, atol=0, equal_nan=True)


@needs_compiler
def test_quotients_next_to_a_tie_are_rounded_correctly() -> None:
    # Squares of 12-bit integers have roots of 12 bits; over divisors of 24 bits some quotients come next to a tie.
    g = torch.arange(1.0, 4096.0).square()
    for divisor in (2**24 - 1.0, 2**24 - 3.0, 2**23 + 1.0, 12345677.0, 16764931.0):
        assert torch.equal(divided(g, divisor), g.double().sqrt().float() / torch.tensor(divisor))


def parts(source: str, *results: str) -> tuple[list[str], list[str], list[str]]:
    found = cut(ast.parse(source).body, [ast.parse(result, mode="eval").body for result in results])
    before, after = ([ast.unparse(line) for line in part] for part in ([*found.before, *found.roots], found.after))
    return before, after, [ast.unparse(result) for result in found.results]


def test_adam_is_cut_at_its_root_and_reads_the_main_after_it() -> None:
    source = "p = p * decay\nm = m + g\nv = v + g * g\np = p - m / (sqrt(v) + eps)"
    before, after, _ = parts(source, "p", "m", "v")
    assert before == ["m = m + g", "v = v + g * g", "0_root = sqrt(v)"]
    assert after == ["p = p * decay", "p = p - m / (0_root + eps)"]


def test_a_root_in_the_results_is_cut_off() -> None:
    assert parts("v = v + g", "p - sqrt(v)", "v") == (["v = v + g", "0_root = sqrt(v)"], [], ["p - 0_root", "v"])


@pytest.mark.parametrize(
    "source",
    ["q = g\ng = g * 2\nv = v + g", "q = g\nv = q + g", "q = 1.0\nq = q + v\nv = q * 2"],
    ids=["reads what changes", "is read", "is changed"],
)
def test_statements_that_others_depend_on_do_not_move(source: str) -> None:
    before, after, _ = parts(f"{source}\np = q / sqrt(v)", "p", "v")
    assert before == [*source.split("\n"), "0_root = sqrt(v)"]
    assert after == ["p = q / 0_root"]


@pytest.mark.parametrize("source", ["p = p + g", "if lr > 0:\n    p = sqrt(g)", "p = sqrt(g) if lr > 0 else g"])
def test_a_formula_without_roots_or_with_a_choice_of_them_is_not_cut(source: str) -> None:
    before, after, results = parts(source, "p")
    assert (before, after, results) == ([], [ast.unparse(ast.parse(source))], ["p"])


def test_an_inner_root_is_cut_off_first() -> None:
    before, after, _ = parts("p = sqrt(g + sqrt(v))", "p")
    assert (before, after) == (["0_root = sqrt(v)"], ["p = sqrt(g + 0_root)"])


def keeps_last_main(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    return p - sqrt(g), p


def replaces_main_in_a_branch(p: Any, g: Any, x: Any, *, lr: Any) -> Any:
    if lr > 1:
        p = g
    q = sqrt(g)
    return p - q, q + p


@needs_compiler
@pytest.mark.parametrize("lr", [0.5, 2.0])
@pytest.mark.parametrize("update", [keeps_last_main, replaces_main_in_a_branch])
def test_the_first_part_has_the_main_that_it_does_not_compute(
    update: Any, lr: float, caplog: pytest.LogCaptureFixture
) -> None:
    # The first did not compile; the second took zero for the main where the branch was not taken.
    formula = Formula(name="mains", states=(State(name="x"),), scalars=no_scalars, update=update)
    codec = codec_for("x", torch.int8, signed=True)
    works = []
    for sweep in (cpp, reference):
        g = torch.rand(300, generator=torch.Generator().manual_seed(0))
        works.append(Work(grad=g, main=3 + g.flip(0), state=init_state({"x": codec}, g)))
        sweep.update_([Batch(Hyper(lr=lr), works[-1:])], formula, {"x": codec})
    assert not caplog.records
    assert works[0].main is not None
    assert works[1].main is not None
    assert torch.equal(works[0].main, works[1].main)
    assert torch.equal(works[0].state["x"], works[1].state["x"])
