"""Formulas: an elementwise rule as named states, numbers, scalars and a function of one element.

    def scalars(*, lr, weight_decay, beta1, beta2):
        return {"lr": lr, "decay": 1 - lr * weight_decay, "weight1": 1 - beta1, "weight2": 1 - beta2}

    def update(p, g, exp_avg, *, lr, decay, weight1, weight2):
        direction = sign(fma(weight1, g - exp_avg, exp_avg))
        return p * decay - lr * direction, fma(weight2, g - exp_avg, exp_avg)

    LION = Formula(
        name="lion", states=(State("exp_avg", beta="beta2"),), numbers=(Number("betas", (0.9, 0.99)),), scalars=scalars,
        update=update,
    )

`scalars` takes the numbers of a parameter group and the step (from 1), and returns each scalar as a float64 expression.
`update` takes the main, the gradient and the states, and returns the new main and the new states. Both are translated
from their source: assignments, arithmetic, the functions of `formulas.functions`, and branches on scalars and choices,
never on elements (`where` chooses between elements). Every operation is rounded as written; `fma` is rounded
once.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from opt_kernels.formulas.syntax import (
    Body,
    FormulaError,
    Function,
    body_of,
    for_host,
    for_torch,
    parameters_of,
    scalar_expressions,
)
from opt_kernels.formulas.translate import body_and_results, check, check_scalars
from opt_kernels.works import (
    HYPER_FIELDS,
    Choice,
    Constant,
    Constants,
    Hyper,
    Number,
    NumberError,
    NumberValue,
    Scalar,
    unknown,
)

LR = Number("lr", 1e-3)
WEIGHT_DECAY = Number("weight_decay", 0.0)


@dataclass(frozen=True, slots=True)
class State:
    """One state of a formula: a tensor of the shape of the parameter, zero before the first step."""

    name: str
    signed: bool = True  # False: never negative, like second moments
    when: str | None = None  # kept only if this choice is True
    # The number beta of an average x <- beta x + (1 - beta) y, such as "beta2" or "momentum": in a narrow format that
    # could not follow, it is rounded stochastically. None: not an average, rounded to nearest.
    beta: str | None = None
    gives_signs: bool = False  # updates are signs, whose length does not depend on it


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Formula:
    """An elementwise rule as a value. Drop-ins, configurations and the sweeps of every backend are generated from it.

    When built, raises FormulaError for source that cannot be translated, and for names that do not match.
    """

    name: str  # in configurations and checkpoints
    title: str = ""  # name of its drop-in class; empty: `name`
    states: tuple[State, ...]  # once built, only those that the choices keep
    scalars: Callable[..., Mapping[str, float]]
    update: Function
    numbers: tuple[Number, ...] = ()  # lr and weight_decay are added if they are not declared
    choices: tuple[Choice, ...] = ()
    constants: tuple[tuple[str, Constant], ...] = ()  # values of choices; once built, of all of them
    # For rules with separate weights for evaluation: functions from the trained weights to these, and back. They take
    # p and the states and numbers that their keywords name.
    evaluation: tuple[Function, Function] | None = None
    declared: tuple[State, ...] = ()  # all states, once built

    def __post_init__(self) -> None:
        self._check_kinds()
        chosen = dict(self.constants)
        constants = {choice.name: chosen.get(choice.name, choice.default) for choice in self.choices}
        declared = self.declared or self.states
        kept = tuple(state for state in declared if state.when is None or constants.get(state.when) is True)
        object.__setattr__(self, "title", self.title or self.name)
        object.__setattr__(self, "constants", tuple(constants.items()))
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "states", kept)
        object.__setattr__(self, "numbers", _completed(self.numbers))
        try:
            self._check_names(chosen)
            check_scalars(self.scalars, constants)
            check(self.update, self.result_names, frozenset(self.scalar_names), constants)
            self._check_unread()
        except FormulaError as error:
            message = str(error)
            named = f"formula {self.name!r}"
            raise FormulaError(message if named in message else f"{named}: {message}") from None

    def __hash__(self) -> int:
        """Equal formulas have equal hashes. Not of all fields: every step looks formulas up."""
        return hash((self.name, self.constants))

    def __repr__(self) -> str:
        """Equal in all processes with the same source, because ranks compare it."""
        numbers = ", ".join(f"{name}={default!r}" for name, default in self.defaults.items())
        choices = "".join(f", {name}={value!r}" for name, value in self.constants)
        source = _digest(self.scalars, self.update, *(self.evaluation or ()))
        return f"Formula({self.name!r}, {numbers}{choices}, source={source})"

    def _check_kinds(self) -> None:
        """Raise FormulaError for a name that cannot be one of a class or state, and for values of other types."""
        for name, kind in {"states": State, "numbers": Number, "choices": Choice}.items():
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
                raise FormulaError(f"{name}={values!r} of formula {self.name!r}; pass a tuple of {kind.__name__}(...)")
        for name in (self.name, self.title or self.name, *_names(self.states)):
            if not isinstance(name, str) or not name.isidentifier():
                raise FormulaError(f"formula {self.name!r} has the name {name!r}; use letters, digits and underscores")

    def _check_names(self, chosen: Constants) -> None:
        """Raise FormulaError for names that do not match: of parameters, of what is declared, and of what is read."""
        positional, named = parameters_of(self.update)
        states = _names(self.declared)
        expected = ("p", "g", *states)
        if positional != expected:
            raise FormulaError(
                f"the update of formula {self.name!r} takes {', '.join(positional)}; its positional parameters must be "
                f"{', '.join(expected)}: the main, the gradient, then the states in order"
            )
        choices = {choice.name: choice for choice in self.choices}
        for name, value in chosen.items():
            if name not in choices:
                raise unknown(name, value, list(choices), of=f"formula {self.name!r}")
            choices[name].check(value)
        names_by_kind = {
            "state": states,
            "state's scale": [f"{name}_scale" for name in states],
            "reserved name": ("p", "g", "step", "main", "out", "remainder", "params"),
            "number": _names(self.numbers),
            "choice": choices,
        }
        taken: dict[str, str] = {}
        for kind, names in names_by_kind.items():
            for name in names:
                if taken.setdefault(name, kind) != kind:
                    raise FormulaError(
                        f"formula {self.name!r} has {name!r} as a {taken[name]} and as a {kind}; rename one of them"
                    )
        for state in self.declared:
            if state.when is not None and state.when not in choices:
                raise FormulaError(f"formula {self.name!r}: {state!r} depends on a choice that is not declared")
        if unread := {*named} - {*self.scalar_names} - choices.keys():
            raise FormulaError(
                f"the update of formula {self.name!r} reads {', '.join(sorted(unread))}, which is neither a scalar nor "
                "a choice; return it from `scalars`, or declare it in `choices`"
            )
        # numbers (beta1, beta2, ... for a tuple `betas`) and choices
        declared = choices.keys() | chain.from_iterable(map(_parts, self.numbers))
        read_by = [*self.number_names, *(state.beta for state in self.declared if state.beta)]
        missing = [name for name in read_by if name not in declared and name != "step"]
        if missing:
            raise FormulaError(
                f"the scalars or states of formula {self.name!r} read {', '.join(missing)}, which is not declared; "
                f"allowed are step and the numbers {', '.join(sorted(declared))}. Declare it with its default: "
                f"numbers=(Number({missing[0]!r}, 1.0, low=0.0),)"
            )

    def _check_unread(self) -> None:
        """Raise FormulaError for what is declared, but has no effect."""
        named = parameters_of(self.update)[1]
        numbers = self._read_numbers
        switches = {choice.off_at_zero for choice in self.choices} - {None}
        if "lr" not in numbers:
            raise FormulaError(
                f"the scalars of formula {self.name!r} do not read lr, so that no learning rate would have an effect; "
                "make it a keyword-only parameter"
            )
        unread_numbers = {number.name for number in self.numbers if numbers.isdisjoint(_parts(number))}
        unread = {
            "scalar": {*self.scalar_names}.difference(named),
            "choice": {*_names(self.choices)}.difference(named, numbers),
            "number": unread_numbers - switches - {"weight_decay"},
        }
        readers = {"scalar": "`update`", "choice": "`scalars` or `update`", "number": "`scalars`"}
        for kind, names in unread.items():
            if names:
                raise FormulaError(
                    f"formula {self.name!r} declares the {kind} {min(names)!r}, which {readers[kind]} does not read; "
                    "remove it, or make it a keyword-only parameter"
                )
        if others := switches.difference(_names(self.numbers)):
            name = min(map(str, others))
            raise FormulaError(f"formula {self.name!r}: off_at_zero={name!r} must be the name of one of its numbers")

    @property
    def _read_numbers(self) -> set[str]:
        """The numbers, and the parts of `betas`, that have an effect on weights."""
        found = {*self.number_names}
        for function in self.evaluation or ():
            _, numbers = parameters_of(function)
            found.update(numbers)
        return found

    @property
    def result_names(self) -> tuple[str, ...]:
        """The results of the update that are kept: the main, then the states."""
        return ("p", *_names(self.states))

    def body_and_results(self) -> tuple[Body, list[ast.expr]]:
        """Return the statements of the update, and the expressions of its results that are kept."""
        return body_and_results(self.update, self.result_names, dict(self.constants))

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars, in order."""
        return tuple(name for name, _ in scalar_expressions(self.scalars)[1])

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the numbers that the scalars read."""
        return parameters_of(self.scalars)[1]

    @property
    def own_numbers(self) -> tuple[str, ...]:
        """Names of the numbers that are not fields of `Hyper`."""
        return tuple(number.name for number in self.numbers if number.name not in HYPER_FIELDS)

    @property
    def defaults(self) -> dict[str, NumberValue]:
        """The defaults of the numbers."""
        return {number.name: number.default for number in self.numbers}

    @property
    def description(self) -> str:
        """The docstring of the module that defines the update."""
        return inspect.cleandoc(self.update.__globals__.get("__doc__") or self.name)

    @property
    def reads_weight_decay(self) -> bool:
        """Whether weight decay has an effect."""
        return "weight_decay" in self._read_numbers

    def check_unread(self, values: Mapping[str, Any]) -> None:
        """Raise NumberError for weight decay, or one of betas, that the formula never reads and that is given another
        value than its default, or than 0 for weight decay."""
        decay = values.get("weight_decay") or 0.0
        if not self.reads_weight_decay and decay not in (0, self.defaults["weight_decay"]):
            raise NumberError(
                f"weight_decay={decay!r} has no effect: formula {self.name!r} never reads it; pass 0.0, or a hook that "
                "decays weights: CautiousDecay(), LrDecoupledDecay(max_lr) or CoupledDecay()"
            )
        defaults = self.defaults.get("betas", ())
        assert isinstance(defaults, tuple)
        for index, (value, default) in enumerate(zip(values.get("betas", ()), defaults)):
            if f"beta{index + 1}" not in self._read_numbers and value != default:
                raise NumberError(
                    f"betas={values['betas']!r}: formula {self.name!r} never reads beta{index + 1}; leave it at "
                    f"{default!r}"
                )

    def with_constants(self, **constants: Constant) -> "Formula":
        """Return the formula with these values of choices."""
        return _with_constants(self, tuple(constants.items())) if constants else self

    def with_defaults(self, **defaults: NumberValue) -> "Formula":
        """Return the formula with other defaults of its numbers."""
        numbers = {number.name: number for number in self.numbers}
        for name, value in defaults.items():
            if name not in numbers:
                raise unknown(name, value, [*numbers], of=f"formula {self.name!r}")
            numbers[name] = replace(numbers[name], default=value)
        return replace(self, numbers=tuple(numbers.values()))

    def scalars_of(self, hyper: Hyper) -> dict[str, float]:
        """Compute the scalars for these numbers on the host in float64. Waits for numbers that are device tensors."""
        numbers: dict[str, Any] = {}
        for name in self.number_names:
            value = number_of(hyper, name, self)
            numbers[name] = value if isinstance(value, bool | str) else float(value)
        try:
            return {name: float(value) for name, value in for_host(self.scalars)(**numbers).items()}
        except (ArithmeticError, ValueError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
            raise NumberError(
                f"the scalars of formula {self.name!r} cannot be computed from {given}: {error}"
            ) from None

    def evaluated(self, p: Tensor, states: Mapping[str, Tensor], hyper: Hyper, *, back: bool = False) -> Tensor:
        """Compute the evaluation weights from the trained weights `p` and the states, or the reverse.

        Modifies nothing.
        """
        assert self.evaluation is not None
        function = self.evaluation[back]
        (_, *names), numbers = parameters_of(function)
        given = {name: float(number_of(hyper, name, self)) for name in numbers}
        # Copies: unlike an update, the function may be any code, which may write to what it is given.
        tensors = [x.clone() for x in (p, *map(states.__getitem__, names))]
        result: Tensor = function(*tensors, **given)
        return result

    def updated(self, p: Tensor, g: Tensor, states: Mapping[str, Tensor], scalars: Mapping[str, float]) -> list[Tensor]:
        """Compute the new main and states by torch operations in the dtype of `p`. Modifies nothing."""
        _, named = parameters_of(self.update)
        constants = dict(self.constants)
        values: dict[str, Any] = {}
        for name in named:
            # A tensor of one element: torch would round a Python number differently in each operation.
            values[name] = constants[name] if name in constants else p.new_full((1,), scalars[name])
        update = for_torch(self.update, tuple(constants))
        names = _names(self.declared)
        new = update(p, g, *map(states.get, names), **values)
        results = dict(zip(("p", *names), new if isinstance(new, tuple) else (new,), strict=True))
        return [_like(results[name], p) for name in self.result_names]


def _like(result: Any, p: Tensor) -> Tensor:
    """A result with an element for each of `p`. One of scalars alone has one element, one of literals is a number."""
    if isinstance(result, Tensor) and result.shape == p.shape:
        return result
    return torch.as_tensor(result, dtype=p.dtype, device=p.device).expand(p.shape).clone()


def _names(declared: Iterable[State | Number | Choice]) -> tuple[str, ...]:
    return tuple(one.name for one in declared)


def _parts(number: Number) -> set[str]:
    """The names by which scalars read a number: beta1, beta2, ... of `betas`."""
    if not isinstance(number.default, tuple):
        return {number.name}
    return {f"{number.name.removesuffix('s')}{i + 1}" for i in range(len(number.default))}


def _completed(numbers: tuple[Number, ...]) -> tuple[Number, ...]:
    """lr, the declared numbers, and weight_decay if it is not declared: the order of a drop-in's arguments."""
    by_name = {"lr": LR}
    for number in numbers:
        by_name[number.name] = number
    names = _names(numbers)
    if len({*names}) < len(names):
        raise FormulaError(f"numbers {', '.join(names)}: one of them is declared twice")
    by_name.setdefault("weight_decay", WEIGHT_DECAY)
    return tuple(by_name.values())


@cache
def _digest(*functions: Function) -> str:
    text = ""
    for function in functions:
        try:
            source = [ast.dump(node) for node in body_of(function)]
        except FormulaError:  # it has no source, which is allowed only for `evaluation`
            source = [function.__qualname__]
        text += f"{parameters_of(function)}{source}"
    return sha256(text.encode()).hexdigest()[:8]


@cache  # building a formula translates it, to check it
def _with_constants(formula: Formula, constants: tuple[tuple[str, Constant], ...]) -> Formula:
    return replace(formula, constants=tuple({**dict(formula.constants), **dict(constants)}.items()))


def number_of(hyper: Hyper, name: str, formula: Formula) -> Scalar | str:
    """The value of `name`: a choice of the formula, an entry of `hyper.own`, a field of `hyper` or one of its betas.

    A number that is missing in `hyper.own` has its default.
    """
    for choice, constant in formula.constants:
        if choice == name:
            return constant
    if name in hyper.own:
        return _number(hyper.own[name])
    if name in ("lr", "weight_decay", "step", "eps", "momentum"):
        value: Scalar = getattr(hyper, name)
        return value
    if name.startswith("beta") and name[4:].isdigit():
        if int(name[4:]) > len(hyper.betas):
            raise FormulaError(f"betas={hyper.betas!r} has {len(hyper.betas)} numbers; {formula.name!r} reads {name}")
        return _number(hyper.betas[int(name[4:]) - 1])
    default = formula.defaults[name]
    assert not isinstance(default, tuple)
    return default


def _number(value: Any) -> Scalar:
    return value if isinstance(value, Tensor) else float(value)
