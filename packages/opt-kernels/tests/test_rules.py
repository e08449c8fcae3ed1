"""Every elementwise rule of the registry: equal bits on all backends in every format, narrow states, signatures."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elementwise_works import (
    COMBINATIONS,
    KEPT,
    ON_FAST,
    Combination,
    assert_same,
    device_of,
    main_of,
    on,
    only_lr,
    written,
)
from tiers import NIGHT

import opt_kernels
from opt_kernels import optim
from opt_kernels.codecs import codecs_of, scale_name
from opt_kernels.formulas import FORMULAS, Formula, State
from opt_kernels.formulas.adam import ADAM
from opt_kernels.formulas.lion import LION
from opt_kernels.rules import elementwise
from opt_kernels.works import Batch, Hyper, Work

NUMEL = 128 * 9 + 37


def values(seed, numel=NUMEL, *, special=False):
    """Numbers over many decades and a block of zeros; with `special`, two blocks with values that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10 ** (-5 * torch.rand(numel, generator=generator))
    x[128:256] = 0.0
    if special:
        x[300] = torch.inf
        x[500] = torch.nan
        x[513] = -torch.inf
    return x


def moved(rule, kept="fp32", numel=NUMEL, *, special=False, first=3):
    """A work after three steps, from the first one or from the middle of a run on."""
    device = device_of(rule.backend)
    made = KEPT[kept].work(rule, values(9, numel).double().to(device))
    work = replace(made, grad=values(8, numel, special=special).to(made.grad), first=2**32 - 640)
    signed = {state.name: state.signed for state in rule.formula.states}
    for index, (name, codec) in enumerate(codecs_of(rule).items() if first > 1 else ()):
        x = values(index, numel).to(device)
        codec.encode_(work.state[name], work.state.get(scale_name(name)), x if signed[name] else x.square())
    numbers = {**rule.formula.defaults, "lr": 0.01, "weight_decay": 0.1}
    numbers["momentum"] = 0.8 if "momentum" in numbers else 0.9
    shared = {name: numbers[name] for name in ("lr", "weight_decay", "betas", "eps", "momentum") if name in numbers}
    for step in range(first, first + 3):
        hyper = Hyper(step=step, own={name: numbers[name] for name in rule.hyper_names}, **shared)
        rule.update_([Batch(hyper, [work])], grad_scale=0.3)
    return work


@ON_FAST
@pytest.mark.parametrize("combination", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_every_backend_has_the_bits_of_the_reference(combination, backend):
    made = [combination.rule(name) for name in (backend, "reference")]
    for special in (True,) if backend == "triton" and not NIGHT else (True, False):
        found, expected = (moved(rule, combination.kept, special=special) for rule in made)
        if combination.formula.name in ("adam", "sgd") and backend == "torch":
            # torch's fused sweeps: the last bits may differ, and a remainder or code with them.
            close = torch.isclose(main_of(found), main_of(expected), rtol=2.0**-7, atol=1e-4, equal_nan=True)
            assert (~close).double().mean() < 0.01
        else:
            assert_same(found, expected)


@ON_FAST
@pytest.mark.parametrize("numel", [0, 1, 63, 4097, 65537])
def test_works_of_any_size_have_the_bits_of_the_reference(numel, backend):
    numel = min(numel, 5000) if backend == "triton" else numel  # an interpreter takes its time
    for kept in ("fp32-out16", "remainder-g16"):
        assert_same(*(moved(elementwise(LION, backend=name), kept, numel) for name in (backend, "reference")))


@on("torch", "cpp")
def test_float64_works_are_updated_in_float64(backend):
    wide = {f"{state.name}_dtype": torch.float64 for state in ADAM.states}
    found, expected = (moved(elementwise(ADAM, backend=name, **wide), "fp64") for name in (backend, "reference"))
    torch.testing.assert_close(written(found), written(expected), rtol=2e-14, atol=1e-14)


OF_SIGNS = ("lion", "signum")  # rules whose update is a sign, which a rounded state seldom changes


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_narrow_states_stay_close(formula):
    expected = moved(elementwise(formula, backend="torch"), first=1).main
    for narrow in ("bf16", "fp16", "e4m3", "8-bit"):
        rule = Combination(formula, "fp32", narrow).rule("torch")
        found = moved(rule, first=1)
        assert {spec.name: spec.dtype for spec in rule.state_specs} == {n: t.dtype for n, t in found.state.items()}
        # Three steps of about lr, with states rounded to a few bits. Gradients far below the largest of their block
        # have its smallest 8-bit codes. The z of schedule-free is a copy of the weights: a step is less than a code.
        is_large = values(8).abs() > 1e-3
        # Averages are rounded stochastically: by up to a whole step of their format.
        bound = 0.01 / (6 if (formula.name, narrow) == ("schedule_free", "8-bit") else 20)
        assert (found.main - expected)[is_large].abs().median() < bound, narrow
        has_effect = not torch.equal(found.main, expected)
        assert has_effect or formula.name in OF_SIGNS, f"{narrow} states change nothing; is it a rule for OF_SIGNS?"


STATES = (State("exp_avg"), State("exp_avg_sq", signed=False))


def plain(p, g, exp_avg, exp_avg_sq, *, lr):
    return p - lr, exp_avg, exp_avg_sq


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_rule_of_the_caller_may_have_the_name_of_ours(backend):
    rule = elementwise(Formula(name="adam", states=STATES, scalars=only_lr, update=plain), backend=backend)
    main = torch.zeros(4)
    rule.update_([Batch(Hyper(lr=1e-2), [Work(grad=torch.ones(4), main=main, state=rule.init_state(main))])])
    assert torch.equal(main, torch.full((4,), -1e-2))


STUBS = (optim.catalogue, optim.matrix_catalogue)


@pytest.mark.parametrize("module", STUBS, ids=lambda module: module.__name__)
def test_type_checkers_see_the_same_signatures(module):
    parsed = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    stubs = {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}
    (names,) = (node.value for node in parsed.body if isinstance(node, ast.Assign))
    shared: dict[str, list] = {}  # the options of a TypedDict, its own before those of its base
    for node in [node for node in stubs.values() if node.keywords]:
        own = [(field.target.id, field.annotation) for field in stubs.pop(node.name).body]
        shared[node.name] = own + shared.get(ast.unparse(node.bases[0]), [])
    assert sorted(ast.literal_eval(names)) == sorted(stubs) == sorted(module.__all__)
    for name, stub in stubs.items():
        arguments = next(node for node in stub.body if isinstance(node, ast.FunctionDef)).args
        common = shared[ast.unparse(arguments.kwarg.annotation).removeprefix("Unpack[").removesuffix("]")]
        positional = arguments.args[1:]
        required = [ast.Constant(...)] * (len(positional) - len(arguments.defaults))
        given = [*positional, *arguments.kwonlyargs]
        values = [*required, *arguments.defaults, *arguments.kw_defaults, *[None] * len(common)]
        expected = inspect.signature(getattr(module, name)).parameters.values()
        stubbed = [*((arg.arg, arg.annotation) for arg in given), *common]
        assert [(n, at >= len(positional)) for at, (n, _) in enumerate(stubbed)] == [
            (p.name, p.kind is p.KEYWORD_ONLY) for p in expected
        ]
        for (_, annotated), value, parameter in zip(stubbed, values, expected, strict=True):
            default = parameter.default
            case = f"{name}: {parameter.name}"
            is_literal = isinstance(default, bool | int | float | str | tuple | torch.dtype | None)
            assert value is None or ast.unparse(value) == (repr(default) if is_literal else "..."), case
            annotation = ast.unparse(annotated) if annotated else ""
            kind = type(default).__name__ if isinstance(default, bool | int | float | str | torch.dtype) else ""
            assert annotation, case
            assert kind in annotation or (kind == "int" and "float" in annotation), case


def test_type_checkers_find_every_drop_in_at_the_top_level():
    """Symptom: mypy said that opt_kernels.AdamW does not exist. It reads `__all__` only where it is written out."""
    nodes = ast.walk(ast.parse(Path(opt_kernels.__file__).read_text()))
    starred = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"}
    assert {module.__name__ for module in STUBS} <= starred
