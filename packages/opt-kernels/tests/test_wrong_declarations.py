"""Formulas that mean nothing, or mean another thing to another backend: refused when they are declared."""

import functools
import linecache
import re

import pytest
import torch
from drop_ins import Undecayed
from elementwise_works import on, only_lr
from torch import nn

from opt_kernels import formulas
from opt_kernels.formulas import Choice, Formula, Number, NumberError, State, fma, where
from opt_kernels.hooks import CautiousDecay, CautiousUpdate, ClipUpdateRms, CoupledDecay, LrDecoupledDecay
from opt_kernels.rules import elementwise
from opt_kernels.works import Batch, Hyper, Work

LIMITS = (3.0, 4.0)


def update(p, g, m, *, lr):
    return p - lr * g, m


def recursive(x):
    return recursive(x)


def branching(x):
    if x > 0:
        x = -x
    return x


@functools.wraps(update)
def decorated(p, g, m, *, lr):
    return update(p, 2 * g, m, lr=lr)


def function_of(head, body):
    """A function of this module from its source, which formulas find as if it were in a file."""
    source = f"def {head}:\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    file = f"<{head} {body}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {**vars(formulas), **globals()}
    exec(compile(source, file, "exec"), names)
    return names[head.partition("(")[0]]


def declared(**changes):
    return Formula(**{"name": "mine", "states": (State("m"),), "scalars": only_lr, "update": update} | changes)


UPDATES = {
    "before = late\nlate = g\nreturn p - lr * before * late, m": "reads late, which is not defined there",
    "if lr > 0:\n    way = g\nreturn p - lr * way, m": "reads way, which is not defined there",
    "sqrt = g\nreturn p - lr * sqrt, m": "has a variable 'sqrt', which is the name of a function",
    "return p - lr * sqrt(g, m), m": "calls sqrt(g, m) with 2 arguments; sqrt takes 1",
    "return p - lr * torch.sin(g), m": "calls torch.sin(g); a formula may call",
    "return p - g / 0 * lr, m": "'g / 0' divides by zero",
    "return p - lr * maximum(g, 1e39), m": "has the constant 1e+39, which is not a float32 number",
    "return p - lr * g * 1j, m": "the constant '1j' is neither a number nor a string",
    "return p - lr * g * (1 / 0), m": "the constant '1 / 0' cannot be computed: division by zero",
    '"""Nothing."""': "must end with `return p, m`",
    "for _ in (1, 2):\n    p = p - lr * g\nreturn p, m": "may not contain",
    "if g > 0:\n    p = p - lr * g\nreturn p, m": "`if g > 0` branches on elements (g)",
    "return where(g > 0 and p > 0, p - lr, p), m": "elements (g, p); combine comparisons of elements with & and |",
    "return where(g > 0 & p > 0, p - lr, p), m": "to combine them, as in (a > 0) & (b > 0)",
    "return p - lr * floor(g), m": "calls floor on elements, but only scalars may",
    "return p - lr * recursive(g), m": "does not call itself",
    "return p - lr * branching(g), m": "a helper of a formula may contain assignments",
}
SCALARS = {
    'return {"lr": lr, "m": lr}': "declares the scalar 'm', which `update` does not read",  # Triton read the state
    'return {"lr": lr, "lr": 2 * lr}': "scalars returns 'lr' twice",  # Triton took the first
    'if step > 1:\n    rate = lr\nreturn {"lr": rate}': "reads rate, which is not defined there",
    'return {"lr": lr * LIMITS}': "reads LIMITS, which is not defined",
    'return {"lr": sum(lr for _ in range(3))}': "a formula may call",
    'return {"lr": lr / (1 + step // 2)}': "'step // 2'; allowed are + - * / **, names and calls; in scalars a // b is",
}
GAIN = {"choices": (Choice("gain", 1.0, (1.0, 2.0)),)}
WRONG = [
    *(({"update": function_of("update(p, g, m, *, lr)", body)}, message) for body, message in UPDATES.items()),
    *(({"scalars": function_of("scalars(*, lr, step)", body)}, message) for body, message in SCALARS.items()),
    *((GAIN | {"update": function_of("update(p, g, m, *, lr, gain)", f"{body}\nreturn p - gain * lr, m")},
       "update assigns gain, which is a choice") for body in ("gain = gain * 2", "if lr > 1:\n    gain += 1.0")),
    ({"name": "my rule"}, "formula 'my rule' has the name 'my rule'"),
    ({"title": "My Rule"}, "has the name 'My Rule'"),
    ({"update": max}, "<built-in function max> is not a function"),
    ({"update": functools.partial(update)}, "is not a function; define it with `def` in a file"),
    ({"update": lambda p, g, m: (p, m)}, "a lambda cannot be translated"),
    ({"update": decorated}, "is decorated, which backends would ignore"),
    ({"scalars": None}, "None is not a function"),
    ({"scalars": function_of("scalars(*, weight_decay)", 'return {"lr": weight_decay}')}, "do not read lr"),
    ({"scalars": function_of("scalars(*, lr, gain)", 'return {"lr": lr * gain}')},
     "read gain, which is not declared; allowed are step and the numbers lr, weight_decay. Declare it with its "
     "default: numbers=(Number('gain', 1.0, low=0.0),)"),
    ({"states": ("m",)}, "pass a tuple of State(...)"),
    ({"states": (State("m"), State("m"))}, "its positional parameters must be p, g, m, m"),
    ({"states": ()}, "its positional parameters must be p, g: the main"),
    ({"states": (State("step"),), "update": function_of("update(p, g, step, *, lr)", "return p - lr * g, step")},
     "'step' as a state and as a reserved name"),
    ({"states": (State("out"),), "update": function_of("update(p, g, out, *, lr)", "return p - lr * g, out")},
     "'out' as a state and as a reserved name"),
    ({"states": (State("m", when="amsgrad"),)}, "depends on a choice that is not declared"),
    ({"states": (State("m", when="has_m"),), "choices": (Choice("has_m", False),),
      "update": function_of("update(p, g, m, *, lr)", "return p - lr * m, m")}, "reads m, which is not defined"),
    ({"numbers": {"alpha": 0.5}}, "pass a tuple of Number(...)"),
    ({"numbers": (Number("alpha", 0.5),)}, "declares the number 'alpha', which `scalars` does not read"),
    ({"numbers": (Number("lr", 1.0), Number("lr", 2.0))}, "numbers lr, lr: one of them is declared"),
    ({"numbers": (Number("m_scale", 1.0),)}, "'m_scale' as a state's scale and as a number"),
    ({"numbers": (Number("m", 1.0),)}, "has 'm' as a state and as a number"),
    ({"choices": (Choice("lr", False),)}, "has 'lr' as a number and as a choice"),
    ({"choices": (Choice("mode", True),)}, "declares the choice 'mode', which `scalars` or `update` does not read"),
    ({"constants": (("nesterov", True),)}, "nesterov=True: formula 'mine' has"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_declarations_without_a_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        declared(**changes)
    assert not {"update", "scalars"} & changes.keys() or "formula 'mine'" in str(caught.value)


def test_values_that_numbers_and_choices_do_not_have_are_refused():
    with pytest.raises(NumberError, match="mode='c' is not allowed; pass 'a' or 'b'"):
        Choice("mode", "c", ("a", "b"))
    with pytest.raises(ValueError, match="only `betas` may be a tuple"):
        Number("etas", (0.5, 1.2))


def test_numbers_without_scalars_are_named():
    by_warmup = function_of("by_warmup(*, lr, warmup)", 'return {"lr": lr / warmup}')
    rule = elementwise(declared(scalars=by_warmup, numbers=(Number("warmup", 1.0, low=0.0),)))
    main = torch.ones(3)
    work = Work(grad=main, main=main, state=rule.init_state(main))
    with pytest.raises(NumberError, match=r"'mine' cannot be computed from lr=0.1, warmup=0.0: .*division by zero"):
        rule.update_([Batch(Hyper(lr=0.1, own={"warmup": 0.0}), [work])])


# --- what is right ----------------------------------------------------------------------------------------------------


def with_fma(*, lr):
    return {"lr": fma(lr, 3.0, 0.1 / 3)}


def with_number_literals(p, g, m, *, lr):
    size = fma(2, g, 1) if lr > 1 else where(g > 0, 0.3, 0.7) / 3
    return p - lr * size, m


@on("torch", "cpp", "triton")
@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_numbers_alone_have_the_bits_of_the_compiled_backends(backend, default):
    formula = declared(scalars=with_fma, update=with_number_literals)
    torch.set_default_dtype(default)
    try:
        for lr in (0.1, 1.0):
            found = []
            for name in ("reference", backend):
                rule = elementwise(formula, backend=name)
                main = torch.linspace(-1.0, 1.0, 130, dtype=torch.float32)
                work = Work(grad=main.clone(), main=main, state=rule.init_state(main))
                rule.update_([Batch(Hyper(lr=lr), [work])])
                found.append(main)
            assert torch.equal(*found)
    finally:
        torch.set_default_dtype(torch.float32)


def averaged(p, m, *, lr):
    m *= lr
    p += m
    return p


def trained(p, m, *, lr):
    return p - m * lr


def test_an_evaluation_changes_neither_weights_nor_states():
    p = torch.tensor([1.0, 2.0])
    m = torch.tensor([4.0, 8.0])
    formula = declared(evaluation=(averaged, trained))
    assert formula.evaluated(p, {"m": m}, Hyper(lr=0.5)).tolist() == [3.0, 6.0]
    assert formula.evaluated(p, {"m": m}, Hyper(lr=0.5), back=True).tolist() == [-1.0, -2.0]
    assert (p.tolist(), m.tolist()) == ([1.0, 2.0], [4.0, 8.0])


# --- numbers that a formula never reads: an explicit value is refused, the default is accepted ------------------------


def weight():
    param = nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
    param.grad = torch.linspace(2, -1, 12).reshape(3, 4)
    return param


def test_defaults_and_what_is_read_are_accepted():
    for options in ({}, {"weight_decay": 0.0}, {"betas": (0.5, 0.99)}, {"betas": [0.9, 0.99]}):
        param = weight()
        beta1 = options.get("betas", (0.9, 0.99))[0]
        optimizer = Undecayed([param], lr=0.5, **options)
        optimizer.step()
        torch.testing.assert_close(param.data, weight().data - 0.5 * (1 - beta1) * param.grad)
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(("name", "value", "allowed"), [("weight_decay", 0.1, 0.0), ("betas", (0.9, 0.5), (0.5, 0.99))])
def test_a_number_without_effect_written_later_is_refused(name, value, allowed):
    param = weight()
    optimizer = Undecayed([param], lr=0.5)
    optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0][name] = value
    with pytest.raises(NumberError, match="never reads"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.param_groups[0][name] = allowed
    optimizer.step()


def test_decaying_hooks_read_weight_decay_and_norm_hooks_do_not():
    for hook in (CautiousDecay(), LrDecoupledDecay(1.0), CoupledDecay()):
        plain = weight()
        decayed = weight()
        Undecayed([plain], lr=0.5, hooks=(hook,)).step()
        Undecayed([decayed], lr=0.5, weight_decay=0.25, hooks=(hook,)).step()
        assert not torch.equal(plain, decayed)
        with pytest.raises(NumberError, match="never reads beta2"):
            Undecayed([weight()], betas=(0.9, 0.5), weight_decay=0.25, hooks=(hook,))
    for hook, factor in ((ClipUpdateRms(1e6), 1.0), (CautiousUpdate(), 12 / 13)):
        param = weight()
        Undecayed([param], lr=0.5, hooks=(hook,)).step()
        # In the first step u = 0.1 g has the sign of g everywhere: nothing is masked or clipped.
        torch.testing.assert_close(param.data, weight().data - factor * 0.5 * 0.1 * param.grad)
        with pytest.raises(NumberError, match=re.escape("weight_decay=0.1 has no effect")):
            Undecayed([weight()], weight_decay=0.1, hooks=(hook,))
        Undecayed([weight()], weight_decay=0.1, hooks=(hook, CautiousDecay()))
