"""The configuration of a formula: numbers, read from parameter groups, and choices of structure."""

import math
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor

NumberValue = float | tuple[float, ...]
Constant = bool | float | str


class NumberError(ValueError):
    """A number or choice of a rule that is unknown or not allowed."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a parameter group. `betas` is a tuple, which scalars read as beta1, beta2, ...

    `lr`, `weight_decay`, `eps` and `momentum` are at least 0, and each of `betas` is in [0, 1), unless declared
    otherwise.
    """

    name: str
    default: NumberValue
    low: float | None = None  # the smallest number allowed
    high: float | None = None  # the largest number allowed; infinity is allowed only if it is this
    below: float | None = None  # upper bound, itself not allowed

    def __post_init__(self) -> None:
        if isinstance(self.default, tuple) and self.name != "betas":
            raise NumberError(
                f"{self.name}={self.default!r}: only `betas` may be a tuple; declare each number separately"
            )
        if self.low is None and self.high is None and self.below is None:
            if self.name in ("lr", "weight_decay", "eps", "momentum", "betas"):
                object.__setattr__(self, "low", 0.0)
            if self.name == "betas":
                object.__setattr__(self, "below", 1.0)
        self.check(self.default)

    def check(self, value: object) -> None:
        """Raise NumberError for a value that is not allowed."""
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        count = len(self.default) if isinstance(self.default, tuple) else 1
        is_sequence = isinstance(value, tuple | list)
        if is_sequence != isinstance(self.default, tuple) or len(values) != count or not all(map(self._allows, values)):
            verb = "are" if is_sequence else "is"
            finite = "finite " if any(isinstance(x, float) and math.isinf(x) for x in values) else ""
            raise NumberError(f"{self.name}={value!r} {verb} not allowed; pass {self._allowed(finite)}")

    def _allows(self, value: object) -> bool:
        if not isinstance(value, int | float | Tensor) or isinstance(value, bool):
            return False
        if isinstance(value, Tensor) and value.numel() != 1:
            return False
        x = float(value)
        return (
            (math.isfinite(x) or x == self.high)
            and (self.low is None or x >= self.low)
            and (self.high is None or x <= self.high)
            and (self.below is None or x < self.below)
        )

    def _allowed(self, finite: str) -> str:
        bounds = {"at least": self.low, "at most": self.high, "below": self.below}
        parts = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None and math.isfinite(bound)]
        of = f" of {' and '.join(parts)}" if parts else ""
        if isinstance(self.default, tuple):
            return f"{len(self.default)} {finite}number{'s' if len(self.default) > 1 else ''}{of}"
        return f"a {finite}number{of}"


@dataclass(frozen=True, slots=True)
class Choice:
    """Structure of a formula, equal in all groups and steps: a constant of its source.

    A choice with `off_at_zero` is False while the number of that name is zero. State_dicts record all other choices,
    unless `recorded` is False, for one that changes only how results are rounded.
    """

    name: str
    default: Constant
    allowed: tuple[Constant, ...] = (False, True)
    off_at_zero: str | None = None
    recorded: bool = True

    def __post_init__(self) -> None:
        self.check(self.default)

    @property
    def is_recorded(self) -> bool:
        """Whether state_dicts record its value, so that state of another value is refused."""
        return self.recorded and self.off_at_zero is None

    def check(self, value: object) -> None:
        """Raise NumberError for a value that is not allowed."""
        if not any(value is x or (not isinstance(x, bool) and value == x) for x in self.allowed):
            raise NumberError(f"{self.name}={value!r} is not allowed; pass {' or '.join(map(repr, self.allowed))}")


def unknown(name: str, value: object, allowed: list[str], *, of: str) -> NumberError:
    """The error for an unknown option."""
    near = get_close_matches(name, allowed, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    return NumberError(f"{name}={value!r}: {of} has no such option; allowed are {', '.join(allowed)}{hint}")
