"""What a formula from outside may do that none of ours does: on every backend the bits of the reference."""

import ast
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import numpy as np
import pytest
import torch
from elementwise_works import ON_FAST, only_lr

from opt_kernels.formulas import (
    Choice,
    Formula,
    FormulaError,
    Number,
    State,
    absolute,
    exp,
    floor,
    fma,
    log,
    maximum,
    minimum,
    power,
    sign,
    tanh,
    where,
)
from opt_kernels.hooks import CautiousUpdate, HookError, hooked
from opt_kernels.rules import elementwise
from opt_kernels.works import Batch, Hyper, Work


def moved(formula, backend, numbers):
    """The weights and states after each of five steps; `numbers` has dtypes of states, too."""
    generator = torch.Generator().manual_seed(0)
    rule = elementwise(formula, backend=backend, **{k: v for k, v in numbers.items() if k.endswith("_dtype")})
    own = {k: v for k, v in numbers.items() if not k.endswith("_dtype")}
    main = torch.randn(130, generator=generator)
    state = rule.init_state(main)
    found = []
    for step in range(1, 6):
        grad = torch.randn(130, generator=generator)
        given = grad.clone()
        rule.update_([Batch(Hyper(lr=0.1, step=step, own=own), [Work(grad=grad, main=main, state=state)])])
        assert torch.equal(grad, given)
        found += [main.clone(), *(value.clone() for value in state.values())]
    return found


def lookahead_scalars(*, lr, step):
    return {"lr": lr, "is_first": where(step == 1, 1.0, 0.0), "is_sync": where(step / 2 == floor(step / 2), 1.0, 0.0)}


def lookahead(p, g, slow, before, *, lr, is_first, is_sync):
    before = p
    if is_first != 0:
        slow = p
    p = fma(-lr, g, p)
    if is_sync != 0:
        slow = fma(0.5, p - slow, slow)
        p = slow
    return p, slow, before


def power_scalars(*, lr, step, gamma):
    return {
        "a": lr * step**-0.8,
        "b": lr / step**0.5,
        "c": lr * power(gamma, step),
        "d": lr * step**gamma,
        "e": step**-2,
    }


def powers(p, g, *, a, b, c, d, e):
    return p - a * g - b * g * g - c - d * g - e


KNEE = 0.75
SLOPE = np.float64(-0.5)
KIND = "soft"


def bent(x, y):
    z = x * y
    z += absolute(z) / KNEE
    return z + x


def softened(x, limit):
    size = absolute(x) + limit
    return bent(x, size) / size if KIND == "soft" else x


def by_functions(p, g, *, lr):
    return p - lr * (tanh(g * 3) + tanh(g / 1000) + tanh(g * 100) + exp(-absolute(g)) + log(KNEE + absolute(g)))


def by_powers(p, g, *, lr):
    return p - lr * (power(absolute(g), 0.25) + (absolute(p) + 0.1) ** SLOPE + pow(g, 5) + absolute(g) ** lr)


def by_helpers(p, g, *, lr):
    return p - lr * softened(g, KNEE) * softened(p, KNEE) - (softened(p, lr) if lr > 0.05 else g)


def by_masks(p, g, *, lr):
    choice = where((g > 0) & (p > 0) | (softened(p, KNEE) < SLOPE), p - lr * g, p)
    return minimum(choice, 0.9) + lr * maximum(p, g) - lr * sign(g)


def soft(x, limit):
    size = x.abs() + limit
    return (x * size + (x * size).abs() / 0.75 + x) / size


IN_TORCH = {
    by_functions: lambda p, g, lr: (
        p - lr * ((g * 3).tanh() + (g / 1000).tanh() + (g * 100).tanh() + (-g.abs()).exp() + (0.75 + g.abs()).log())
    ),
    by_powers: lambda p, g, lr: p - lr * (g.abs() ** 0.25 + (p.abs() + 0.1) ** -0.5 + g**5 + g.abs() ** lr),
    by_helpers: lambda p, g, lr: p - lr * soft(g, 0.75) * soft(p, 0.75) - soft(p, lr),
    by_masks: lambda p, g, lr: (
        torch.where((g > 0) & (p > 0) | (soft(p, 0.75) < -0.5), p - lr * g, p).clamp(max=0.9)
        + lr * torch.maximum(p, g)
        - lr * g.sign()
    ),
}


def counting_scalars(*, lr, step):
    return {"lr": lr, "half": step / 2}


def counting(p, g, seen, constant, peak, *, lr, half):
    """A state of scalars alone, one of literals alone, and maxima whose first argument is a scalar."""
    seen = half
    peak = maximum(half, minimum(lr, absolute(g)) + peak)
    return p - lr * g * seen, seen, 0.5, peak


def inverse_scalars(*, lr, weight_decay):
    return {"lr": lr, "decay": 1 - lr * weight_decay}


def inverse(p, g, size, ratio, *, lr, decay):
    size = fma(0.1, absolute(g) - size, size)
    return p * decay - lr * g / size, size, 1 / size


def with_literals(p, g, a, b, c, d, *, lr, share):
    a = p / 0.3 + 0.7 / (absolute(g) + 0.1) - 0.3
    b = 0.1 - g * share / (absolute(p) + 0.7)
    c = where(g > 0.1, 0.3, p) + maximum(0.1, g) + minimum(p, 0.7) - (g - 0.1) / 0.7 + share / (absolute(p) + 0.3)
    d = fma(g, p, 0.1) + fma(0.3, 0.7, g) + (1 / 3) * g + g / 3 - 0.1 * p**2
    return p - lr * g * 0.1, a, b, c, d


def augmented(p, g, last, trace, *, lr):
    """Assignments that change no other name, and no gradient."""
    last = p
    g *= 2
    trace += g
    lr /= g * g + 1
    p -= lr * trace
    return p, last, trace


def of(update, scalars=only_lr, *states, **fields):
    return Formula(name=update.__name__, states=states, scalars=scalars, update=update, **fields)


COUNTING = of(counting, counting_scalars, State("seen"), State("constant"), State("peak"))
INVERSE = of(inverse, inverse_scalars, State("size", signed=False), State("ratio"))
POWERS = of(powers, power_scalars, numbers=(Number("gamma", 0.7),))
CASES = {
    "a state becomes the weight of before": (of(lookahead, lookahead_scalars, State("slow"), State("before")), {}),
    **{f"gamma {gamma}": (POWERS, {"gamma": gamma}) for gamma in (0.7, 0.0, 3.0, -1.0, -1.5)},
    **{update.__name__: (of(update), {}) for update in IN_TORCH},
    **{f"states are scalars, {dtype}": (COUNTING, {"seen_dtype": dtype, "constant_dtype": dtype})
       for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)},
    # On Triton 1 / 0 beyond the end of a parameter made the scale of its last block NaN, and with it the state.
    **{f"what becomes of zeros, {dtype}": (INVERSE, {"ratio_dtype": dtype})
       for dtype in (torch.int8, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)},
    "augmented assignments": (of(augmented, only_lr, State("last"), State("trace")), {}),
    "literals": (of(with_literals, only_lr, *map(State, "abcd"), choices=(Choice("share", 0.6, (0.6, 0.7)),)), {}),
}  # fmt: skip


@ON_FAST
@pytest.mark.parametrize(("formula", "numbers"), CASES.values(), ids=CASES.keys())
def test_a_formula_has_the_bits_of_the_reference(formula, numbers, backend):
    found, wanted = (moved(formula, name, numbers) for name in (backend, "reference"))
    assert all(map(torch.equal, found, wanted))
    assert all(value.float().isfinite().all() for value in found)
    if numbers.get("constant_dtype") in (torch.float32, torch.bfloat16):
        assert [set(value.tolist()) for value in found[-3:-1]] == [{2.5}, {0.5}]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("update", IN_TORCH, ids=lambda update: update.__name__)
def test_functions_helpers_and_constants_equal_plain_torch(update, backend):
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(1000, generator=generator, dtype=torch.float64) for _ in range(2))
    wanted = IN_TORCH[update](p, g, 0.1)
    elementwise(of(update), backend=backend).update_([Batch(Hyper(lr=0.1), [Work(grad=g, main=p, state={})])])
    torch.testing.assert_close(p, wanted, rtol=1e-13, atol=1e-13)


def late_scalars(*, lr, step):
    return {"lr": lr, "is_late": where(step > 50, 1.0, 0.0)}


def late(p, g, *, lr, is_late):
    if is_late != 0:
        p = p * 0.5
    return p - lr * g


def copies(p, g, before, *, lr):
    return p - lr * g, p


@pytest.mark.parametrize("formula", [of(late, late_scalars), of(copies, only_lr, State("before"))], ids=repr)
def test_hooks_are_refused_if_an_update_depends_on_weights(formula):
    with pytest.raises(HookError, match="needs an update of the form p - lr u, with u independent of the weights"):
        hooked(elementwise(formula), (CautiousUpdate(),))


@pytest.mark.needs_extra
def test_a_backend_that_lacks_a_function_names_it(monkeypatch):
    kernels = pytest.importorskip("opt_kernels.backends.triton.update", exc_type=ImportError)
    monkeypatch.delitem(kernels._Element.CALLS, "tanh")
    formula = Formula(name="lacking", states=(), scalars=only_lr, update=by_functions)
    with pytest.raises(FormulaError, match="the triton backend has no tanh"):
        moved(formula, "triton", {})


def test_one_thread_parses_at_a_time(monkeypatch):
    """CPython 3.11 raises SystemError if two do and the garbage collector lets them take turns."""
    parse = ast.parse
    parsing = Lock()

    def alone(*args, **kwargs):
        assert parsing.acquire(blocking=False), "two threads parse"
        try:
            Event().wait(0.01)  # gives the others a turn
            return parse(*args, **kwargs)
        finally:
            parsing.release()

    monkeypatch.setattr(ast, "parse", alone)

    def declare(_):
        def descent(p, g, *, lr):
            return p - lr * g

        return of(descent)

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(declare, range(4)))) == 4
