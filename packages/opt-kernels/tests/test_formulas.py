"""One formula on every backend: the same bits where formats are the same, and what a formula may not contain."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_kernels.backends.cpp import update as cpp
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.reference import update as reference
from opt_kernels.backends.torch_native import update as torch_native
from opt_kernels.codecs import codec_for
from opt_kernels.formulas import (
    Choice,
    Formula,
    FormulaError,
    Number,
    State,
    absolute,
    exp,
    fma,
    log,
    maximum,
    minimum,
    sign,
    sqrt,
    where,
)
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.registry import FORMULAS as REGISTERED
from opt_kernels.formulas.sgd import SGD
from opt_kernels.rules.elementwise import elementwise
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


def user_scalars(*, lr: float, gain: float, step: float) -> dict[str, float]:
    rate = lr / step
    return {"rate": rate, "gain": gain, "is_early": where(step < 3, 1.0, 0.0)}


def user_update(p: Any, g: Any, trace: Any, peak: Any, third: Any, *, rate: Any, gain: Any, is_early: Any) -> Any:
    trace = fma(gain, g, trace)
    peak = maximum(peak, trace * trace)
    if is_early != 0:
        rate = rate * 0.5
    third += where(g > 0, 1.0, -1.0)
    return p - rate * sign(trace) / (sqrt(peak) + 1.0), trace, peak, third


USER = Formula(
    name="user",
    states=(State(name="trace"), State(name="peak", signed=False), State(name="third")),
    numbers=(Number("gain", 0.9, low=0.0),),
    scalars=user_scalars,
    update=user_update,
)


@pytest.mark.parametrize(
    "run", [torch_native.update_, pytest.param(cpp.update_, marks=needs_compiler)], ids=["torch", "cpp"]
)
@pytest.mark.parametrize("step", [2, 3])
def test_a_formula_of_three_states_and_numbers_of_its_own_runs_everywhere(run: Callable[..., None], step: int) -> None:
    hyper = Hyper(lr=0.1, step=step, own={"gain": 0.7})
    work, codecs = work_of(USER, FORMATS["fp32"], STATES["8-bit"])
    expected, _ = work_of(USER, FORMATS["fp32"], STATES["8-bit"])
    reference.update_([Batch(hyper, [expected])], USER, codecs)
    run([Batch(hyper, [work])], USER, codecs)
    assert_same_numbers(work, expected)


def no_scalars(*, lr: float) -> dict[str, float]:
    return {"lr": lr}


def keeps(p: Any, g: Any, trace: Any) -> Any:
    return p - g, trace


def steps(p: Any, g: Any, step: Any) -> Any:
    return p - g, step


def branches(p: Any, g: Any) -> Any:
    if g > 0:
        p = p - g
    return p


def loops(p: Any, g: Any) -> Any:
    for _ in (1, 2):
        p = p - g
    return p


def calls(p: Any, g: Any) -> Any:
    return p - torch.sin(g)


def forgets(p: Any, g: Any, trace: Any) -> Any:
    return p - g


REFUSED = {
    "a branch on elements": (branches, (), "branches on elements"),
    "a loop": (loops, (), "may not contain"),
    "another function": (calls, (), "a formula may call"),
    "a state that is not returned": (forgets, (State(name="trace"),), "must end with `return p, trace`"),
    "other parameters": (forgets, (), "must be p, g"),
}


@pytest.mark.parametrize(("update", "states", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_translated_is_refused_when_the_formula_is_built(
    update: Callable[..., Any], states: tuple[State, ...], message: str
) -> None:
    with pytest.raises(FormulaError, match=message):
        Formula(name="refused", states=states, scalars=no_scalars, update=update)


LIMITS = (3.0, 4.0)


def reads_a_module(p: Any, g: Any, trace: Any) -> Any:
    return p - LIMITS * g, trace


def recursive(x: Any) -> Any:
    return recursive(x)


def calls_a_recursive_helper(p: Any, g: Any, trace: Any) -> Any:
    return p - recursive(g), trace


def branching(x: Any) -> Any:
    if x > 0:
        x = -x
    return x


def calls_a_branching_helper(p: Any, g: Any, trace: Any) -> Any:
    return p - branching(g), trace


def calls_a_helper_of_another_arity(p: Any, g: Any, trace: Any) -> Any:
    return p - branching(g, p), trace  # type: ignore[call-arg]


def compares_in_a_chain(p: Any, g: Any, trace: Any) -> Any:
    return where(g > 0 & p > 0, p - g, p), trace


def reads_an_absent_state(p: Any, g: Any, trace: Any, peak: Any) -> Any:
    return p - peak, trace, peak


def scalars_of_a_module(*, lr: float) -> dict[str, float]:
    return {"lr": lr * LIMITS}


def scalars_that_loop(*, lr: float) -> dict[str, float]:
    return {"lr": sum(lr for _ in range(3))}


TRACE, PEAK = State("trace"), State("peak", when="has_peak")


def chooses_with_if(p: Any, g: Any, trace: Any) -> Any:
    return p - g if g > 0 else p, trace


def asks_for_both(p: Any, g: Any, trace: Any) -> Any:
    return where(g > 0 and p > 0, p - g, p), trace


def around(update: Any = lambda p, g, trace: (p - g, trace)) -> Any:
    return update


def doubled(function: Any) -> Any:
    @wraps(function)
    def update(p: Any, g: Any, trace: Any) -> Any:
        return function(p, 2 * g, trace)

    return update


@doubled
def decorated(p: Any, g: Any, trace: Any) -> Any:
    return p - g, trace


ABSENT = {"states": (TRACE, PEAK), "choices": (Choice("has_peak", False),), "update": reads_an_absent_state}
DECLARED: Mapping[str, tuple[dict[str, Any], str]] = {
    "a state twice": ({"states": (TRACE, TRACE)}, "its positional parameters must be p, g, trace, trace"),
    "a number twice": ({"numbers": (Number("lr", 1.0), Number("lr", 2.0))}, "numbers lr, lr: one of them is declared"),
    "a state's scale": ({"numbers": (Number("trace_scale", 1.0),)}, "'trace_scale' as a state's scale and as a number"),
    "a number of a state's name": ({"numbers": (Number("trace", 1.0),)}, "has 'trace' as a state and as a number"),
    "a choice of a number's name": ({"choices": (Choice("lr", False),)}, "has 'lr' as a number and as a choice"),
    "a state called step": ({"states": (State("step"),), "update": steps}, "'step' as a state and as a reserved name"),
    "a module's constant": ({"update": reads_a_module}, "reads LIMITS, which is not defined"),
    "a module's constant in scalars": ({"scalars": scalars_of_a_module}, "reads LIMITS, which is not defined"),
    "a comprehension in scalars": ({"scalars": scalars_that_loop}, "a formula may call"),
    "a helper that calls itself": ({"update": calls_a_recursive_helper}, "does not call itself"),
    "a helper that branches": ({"update": calls_a_branching_helper}, "a helper of a formula may contain assignments"),
    "a helper of another arity": ({"update": calls_a_helper_of_another_arity}, "with 2 arguments; branching takes 1"),
    "a chain of comparisons": ({"update": compares_in_a_chain}, r"to combine them, as in \(a > 0\) & \(b > 0\)"),
    "a state without its choice": (ABSENT, "reads peak, which is not defined"),
    "an expression that branches on elements": ({"update": chooses_with_if}, r"`if g > 0` branches on elements \(g\)"),
    "a conjunction of elements": ({"update": asks_for_both}, r"elements \(g, p\); .* with & and \|, in parentheses"),
    "a lambda": ({"update": lambda p, g, trace: (p, trace)}, "a lambda cannot be translated"),
    "a lambda in a function": ({"update": around()}, "a lambda cannot be translated"),
    "a decorated function": ({"update": decorated}, "decorated is decorated, which backends would ignore"),
    "a constant that no choice declares": (
        {"constants": (("nesterov", True),)},
        "nesterov=True: formula 'refused' has",
    ),
}


@pytest.mark.parametrize(("fields", "message"), DECLARED.values(), ids=DECLARED.keys())
def test_a_declaration_whose_parts_do_not_fit_is_refused_when_built(fields: dict[str, Any], message: str) -> None:
    whole = {"name": "refused", "states": (TRACE,), "scalars": no_scalars, "update": keeps, **fields}
    with pytest.raises(ValueError, match=message):
        Formula(**whole)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_rule_is_one_file_of_at_most_sixty_lines(name: str) -> None:
    source = inspect.getsource(importlib.import_module(f"opt_kernels.formulas.{name}"))
    assert source.count("Formula(") == 1
    assert len(source.splitlines()) <= 60


def test_several_numbers_are_for_betas_alone() -> None:
    with pytest.raises(ValueError, match="only `betas` may be a tuple"):
        Number("etas", (0.5, 1.2))


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


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("cpp", marks=pytest.mark.skipif(not usable(), reason="no C++ compiler here")),
        pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")),
    ],
)
def test_functions_of_elements_have_the_same_bits_on_every_backend(backend: str) -> None:
    """Exponentials of float32 differ between libraries; those of float64, rounded to float32, do not."""

    def moved(backend: str) -> Tensor:
        rule = elementwise(WAVES, backend=backend)
        main = values(0, special=False)
        rule.update_([Batch(HYPER, [Work(grad=values(1, special=False), main=main, state={})])])
        return main

    assert torch.equal(moved(backend), moved("reference"))


def waves(p: Any, g: Any, *, lr: Any) -> Any:
    x = minimum(absolute(g), 3.0)
    return p - lr * (exp(x) - 1.0) / (exp(x) + 1.0) - lr * log(1.0 + x**2) - lr * x**3 / 3.0


WAVES = Formula(name="waves", states=(), scalars=no_scalars, update=waves)


def test_a_number_that_is_not_declared_is_named() -> None:
    with pytest.raises(
        FormulaError, match=r"read gain, which is not declared.*numbers=\(Number\('gain', 1.0, low=0.0\),\)"
    ):
        replace(USER, numbers=())
