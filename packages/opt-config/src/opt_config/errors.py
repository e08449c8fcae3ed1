"""ConfigError: reports every problem of a configuration at once, each with what is allowed and what to do."""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self


class Problem(NamedTuple):
    """One thing wrong with one field."""

    field: str
    value: object
    reason: str  # what is allowed, what to do

    def __str__(self) -> str:
        return f"{self.field}={self.value!r}: {self.reason}"


class ConfigError(ValueError):
    """An invalid configuration, or one that asks for something that is not available.

    `problems` holds every problem, not only the first. It is empty if the error is not about fields.
    """

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, owner: str, problems: Sequence[Problem]) -> Self:
        """One error for all `problems` of the object called `owner`."""
        if len(problems) == 1:
            message = f"{owner}: {problems[0]}"
        else:
            message = "\n".join([f"{owner}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])
        return cls._with(message, problems)

    def within(self, place: str) -> Self:
        """The same error, its message preceded by `place`, such as the path of a file."""
        return self._with(f"{place}: {self}", self.problems)

    @classmethod
    def _with(cls, message: str, problems: Sequence[Problem]) -> Self:
        error = cls(message)
        error.problems = tuple(problems)
        return error


class UnknownFieldError(ConfigError, TypeError):
    """An unknown field name passed as a keyword. Also a TypeError, as for any unexpected keyword argument."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence that suggests the names in `known` closest to `given`; empty if none is close.

    >>> did_you_mean("adam_beta_1", ["adam_beta1", "lr"])
    ' Did you mean adam_beta1?'
    >>> did_you_mean("colour", ["adam_beta1", "lr"])
    ''
    """
    spelling = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), spelling, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(spelling[name] for name in close)}?" if close else ""
