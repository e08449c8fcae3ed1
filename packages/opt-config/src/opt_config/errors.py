"""ConfigError reports every problem of a configuration at once, each with what is allowed and what to do; `check` finds
them: values of other types, outside their intervals, or in conflict."""

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, Self, Union, get_args, get_origin, get_type_hints

import torch

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
        text = f"{self.field}={shown}: {self.reason}"
        return f"{text}; {hint}" if hint else text


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


def unknown_field(name: str, value: object, known: Collection[str]) -> str:
    """Return why a field is refused: what to write instead of another library's name, or the closest field.

    >>> unknown_field("betas", (0.9, 0.95), ["adam_beta1", "lr"])
    'unknown field; set adam_beta1 and adam_beta2.'
    >>> unknown_field("adam_beta_1", 0.9, ["adam_beta1", "lr"])
    'unknown field. Did you mean adam_beta1?'
    >>> unknown_field("--lr", 0.1, ["adam_beta1", "lr"])
    'unknown field; write lr.'
    """
    word = name.lower().lstrip("-").replace("-", "_")
    answer = f"write {word}" if word in known else FOREIGN_WORDS.get(word)
    # "Set it in DistributedDataParallelConfig" does not help with a field of that configuration.
    if answer is None or ("DistributedData" in answer and "bucket_size" in known):
        return f"unknown field.{did_you_mean(name, known)}"
    if answer == "set optimizer" and (rule := foreign_value("optimizer", value)):
        answer = rule
    return f"unknown field; {answer}."


class Dataclass(Protocol):
    """Any instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class Interval(NamedTuple):
    """The numbers from `low` to `high`. Either end may be excluded."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = True  # with the default `high`, excludes infinity

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or is_too_large(value):
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}{')' if self.high_open else ']'}"

    @property
    def sentence(self) -> str:
        """The allowed values in words, for messages."""
        if not math.isinf(self.high):
            return f"must be in {self}"
        bound = f"must be {'greater than' if self.low_open else 'at least'} {self.low:g}"
        return f"{bound} and finite" if self.high_open else bound


AT_LEAST_ONE = Interval(1)
INT8_CODES = "for int8 codes with a scale per block, pass optimizer_options={'exp_avg_dtype': torch.int8}"


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """Return the annotated types of the fields of a dataclass, in order."""
    hints = get_type_hints(cls)
    return types.MappingProxyType({field.name: hints[field.name] for field in dataclasses.fields(cls)})


Finding = tuple[str, str]
"""The name of a field, and what is allowed and what to do."""


def check(
    config: Dataclass,
    find_invalid: Callable[[Any], Iterable[Finding]],
    find_conflicts: Callable[[Any], Iterable[Finding]],
) -> None:
    """Raise `ConfigError` with every problem of `config`.

    `find_invalid` finds problems of single fields, which count unless the field has a wrong type. `find_conflicts`
    finds conflicts between fields, and is called only if every field is valid.
    """
    reasons = dict(_type_problems(config))
    for name, reason in find_invalid(config):
        reasons.setdefault(name, reason)
    if found := [*reasons.items()] or [*find_conflicts(config)]:
        problems = [Problem(name, getattr(config, name), reason) for name, reason in found]
        raise ConfigError.of(type(config).__name__, problems)


def changed_fields(config: Dataclass, names: Collection[str]) -> list[str]:
    """Return the fields among `names` that do not have their defaults, in the order of the configuration.

    A default is that of the class which declares the field first: a subclass with another one changes it.
    """
    classes = [cls for cls in reversed(type(config).__mro__) if dataclasses.is_dataclass(cls)]
    defaults = {field.name: field.default for cls in reversed(classes) for field in dataclasses.fields(cls)}
    fields = [field.name for field in dataclasses.fields(config) if field.name in names]
    return [name for name in fields if getattr(config, name) != defaults[name]]


def _type_problems(config: Dataclass) -> Iterator[Finding]:
    """Find values of another type than annotated, NaN, and integers that int64 does not hold."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        if not accepts(hint, value):
            yield name, f"must be {type_words(hint)}{_dtype_hint(hint, value)}"
        elif int in options(hint) and isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield name, "must be an integer of at most 64 bits"


def interval_problems(config: Dataclass, intervals: Mapping[str, Interval]) -> Iterator[Finding]:
    """Find numbers outside their intervals. Other values pass: `_type_problems` finds those of a wrong type."""
    for name in field_types(type(config)):
        value = getattr(config, name)
        if name in intervals and isinstance(value, int | float) and value not in intervals[name]:
            yield name, intervals[name].sentence


def options(hint: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows: the members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def accepts(hint: Any, value: object) -> bool:
    """Whether a field annotated `hint` may hold `value`."""
    if len(options(hint)) > 1:
        return any(accepts(option, value) for option in options(hint))
    if hint is types.NoneType:
        return value is None
    if get_origin(hint) is tuple:
        (item, _) = get_args(hint)
        return isinstance(value, tuple) and all(accepts(item, each) for each in value)
    if get_origin(hint) is Callable:
        return callable(value)
    if get_origin(hint) is Mapping:
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    try:
        return isinstance(value, hint)
    except TypeError:  # an annotation of a subclass, such as a Literal
        return True


def type_words(hint: Any) -> str:
    """Return a type in words, for messages."""
    if len(options(hint)) > 1:
        return " or ".join(type_words(option) for option in options(hint))
    if get_origin(hint) is tuple:
        return f"a tuple, each item {type_words(get_args(hint)[0])}"
    if get_origin(hint) is Callable:
        return "a callable"
    if get_origin(hint) is Mapping:
        return "a table of options by name"
    words = {
        bool: "True or False",
        int: "an int",
        float: "a number",
        str: "a string",
        torch.dtype: "a torch.dtype",
        types.NoneType: "None",
    }
    return words[hint]


def _dtype_hint(hint: Any, value: object) -> str:
    if hint is not torch.dtype or not isinstance(value, str):
        return ""
    if value in ("int8", "torch.int8"):
        return f"; {INT8_CODES}"
    return "; from_dict and load_config read dtypes from strings"
