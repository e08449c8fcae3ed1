"""What an elementwise rule is: named states, named scalars, and one function on one element.

    def scalars(*, lr, weight_decay, beta1, beta2):
        return {"lr": lr, "decay": 1 - lr * weight_decay, "weight1": 1 - beta1, "weight2": 1 - beta2}

    def update(p, g, exp_avg, *, lr, decay, weight1, weight2):
        direction = sign(fma(weight1, g - exp_avg, exp_avg))
        return p * decay - lr * direction, fma(weight2, g - exp_avg, exp_avg)

    LION = Formula(name="lion", states=(State(name="exp_avg"),), scalars=scalars, update=update)

`scalars` reads the numbers of a parameter group and the step, and gives each scalar as a float64 expression. `update`
takes the main, the gradient and the states, and gives the new main and the new states. Both are translated from their
source: assignments, arithmetic, the functions of `formulas.functions`, and branches on scalars and constants, never on
elements (`where` chooses between elements). Every operation is rounded as it is written; `fma` is rounded once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from opt_kernels.formulas.syntax import FormulaError, parameters_of, scalar_expressions
from opt_kernels.formulas.translate import check
from opt_kernels.works import Hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One state of a formula, with an element for each of the parameter's, zero before the first step."""

    name: str
    signed: bool = True  # False: never negative, as second moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """An elementwise rule. Raises FormulaError, when built, for source that cannot be translated."""

    name: str
    states: tuple[State, ...]
    scalars: Callable[..., Mapping[str, float]]
    update: Callable[..., Any]
    constants: tuple[tuple[str, bool | float], ...] = ()  # structure, by name: the same for every group and step

    def __post_init__(self) -> None:
        positional, named = parameters_of(self.update)
        expected = ("p", "g", *(state.name for state in self.states))
        if positional != expected:
            raise FormulaError(
                f"the update of formula {self.name!r} takes {', '.join(positional)}; its positional parameters must be "
                f"{', '.join(expected)}: the main, the gradient, then the states in order"
            )
        unknown = {*named} - {*self.scalar_names} - {*dict(self.constants)}
        if unknown:
            raise FormulaError(
                f"the update of formula {self.name!r} reads {', '.join(sorted(unknown))}, which is neither a "
                "scalar nor a constant; return it from `scalars`, or give it in `constants`"
            )
        check(self.update, self.result_names, frozenset(self.scalar_names), dict(self.constants))

    @property
    def result_names(self) -> tuple[str, ...]:
        """What the update returns: the main, then the states."""
        return ("p", *(state.name for state in self.states))

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars, in order."""
        return tuple(name for name, _ in scalar_expressions(self.scalars)[1])

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the numbers of a group that the scalars read."""
        return parameters_of(self.scalars)[1]

    def with_constants(self, **constants: bool | float) -> "Formula":
        """The formula with these constants."""
        return replace(self, constants=tuple(sorted({**dict(self.constants), **constants}.items())))

    def scalars_of(self, hyper: Hyper) -> dict[str, float]:
        """The scalars at these numbers, computed on the host in float64. Waits for numbers that are device tensors.

        Raises FormulaError for a number that `hyper` lacks.
        """
        numbers = {name: float(number_of(hyper, name, self)) for name in self.number_names}
        return {name: float(value) for name, value in self.scalars(**numbers).items()}

    def updated(self, p: Tensor, g: Tensor, states: Mapping[str, Tensor], scalars: Mapping[str, float]) -> list[Tensor]:
        """The new main and the new states, by torch's operations in the dtype of `p`; writes nothing."""
        _, named = parameters_of(self.update)
        constants = dict(self.constants)
        # Tensors of one element: a Python number would enter in float64, and be rounded operation by operation.
        numbers = {name: constants[name] if name in constants else p.new_full((1,), scalars[name]) for name in named}
        new = self.update(p, g, *(states[state.name] for state in self.states), **numbers)
        return list(new) if isinstance(new, tuple) else [new]


def number_of(hyper: Hyper, name: str, formula: Formula) -> float | Tensor:
    """The number of this name: of `hyper`, one of its betas, of its own, or a constant of the formula."""
    constants = dict(formula.constants)
    if name in constants:
        return constants[name]
    if name in hyper.own:
        return float(hyper.own[name])
    if name in ("lr", "weight_decay", "step", "eps", "momentum"):
        value: float | Tensor = getattr(hyper, name)
        return value
    if name.startswith("beta") and name[4:].isdigit() and 1 <= int(name[4:]) <= len(hyper.betas):
        return float(hyper.betas[int(name[4:]) - 1])
    raise FormulaError(
        f"formula {formula.name!r} reads {name}, which the group does not have; allowed are lr, weight_decay, step, "
        f"eps, momentum, beta1 to beta{len(hyper.betas)} and the group's own numbers ({', '.join(hyper.own) or 'none'})"
    )
