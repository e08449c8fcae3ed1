"""ConfigError: reports every problem of a configuration at once, each with what is allowed and what to do."""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from opt_config.foreign import FOREIGN_WORDS, foreign_value


def is_too_large(value: float) -> bool:
    """Whether a number is an int beyond the range of floats."""
    try:
        float(value)
    except OverflowError:
        return True
    return False


class Problem(NamedTuple):
    """One thing wrong with one field."""

    field: str
    value: object
    reason: str  # what is allowed, what to do

    def __str__(self) -> str:
        is_long = isinstance(self.value, int) and is_too_large(self.value)
        shown = "an int of hundreds of digits" if is_long else repr(self.value)
        hint = foreign_value(self.field, self.value)
        return f"{self.field}={shown}: {self.reason}{'; ' * bool(hint)}{hint}"


class ConfigError(ValueError):
    """An invalid configuration, or one that asks for something that is not available.

    `problems` holds every problem, not only the first. It is empty if the error is not about fields.
    """

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, owner: str, problems: Sequence[Problem]) -> Self:
        """Return one error for all `problems` of the object called `owner`."""
        if len(problems) == 1:
            message = f"{owner}: {problems[0]}"
        else:
            message = "\n".join([f"{owner}: {len(problems)} problems", *(f"  {problem}" for problem in problems)])
        return cls._with(message, problems)

    def within(self, place: str) -> Self:
        """Return the same error, its message preceded by `place`, such as the path of a file."""
        return self._with(f"{place}: {self}", self.problems)

    @classmethod
    def _with(cls, message: str, problems: Sequence[Problem]) -> Self:
        error = cls(message)
        error.problems = tuple(problems)
        return error


class UnknownFieldError(ConfigError, TypeError):
    """An unknown field name passed as a keyword. Also a TypeError, as for any unexpected keyword argument."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the names in `known` closest to `given`; empty if none is close.

    >>> did_you_mean("adam_beta_1", ["adam_beta1", "lr"])
    ' Did you mean adam_beta1?'
    >>> did_you_mean("colour", ["adam_beta1", "lr"])
    ''
    """
    spelling = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), spelling, n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(spelling[name] for name in close)}?" if close else ""


def unknown_field(name: str, value: object, known: Iterable[str]) -> str:
    """Return why a field is refused: what to write instead of another library's name, or the closest field.

    >>> unknown_field("betas", (0.9, 0.95), ["adam_beta1", "lr"])
    'unknown field; set adam_beta1 and adam_beta2.'
    >>> unknown_field("adam_beta_1", 0.9, ["adam_beta1", "lr"])
    'unknown field. Did you mean adam_beta1?'
    >>> unknown_field("--lr", 0.1, ["adam_beta1", "lr"])
    'unknown field; write lr.'
    """
    known = list(known)
    word = name.lower().lstrip("-").replace("-", "_")
    answer = f"write {word}" if word in known else FOREIGN_WORDS.get(word)
    if answer is None or ("DistributedData" in answer and "bucket_size" in known):
        return f"unknown field.{did_you_mean(name, known)}"
    if answer == "set optimizer" and (rule := foreign_value("optimizer", value)):
        answer = rule
    return f"unknown field; {answer}."
