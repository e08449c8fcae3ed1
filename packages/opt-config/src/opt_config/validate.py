"""Checks shared by all configurations: annotated types, intervals and lists of choices."""

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol, Union, get_args, get_origin, get_type_hints

import torch

from opt_config.errors import ConfigError, Problem, did_you_mean


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
        if not isinstance(value, int | float):
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


INT8_CODES = "for int8 codes with a scale per block, pass optimizer_options={'exp_avg_dtype': torch.int8}"

NOT_NEGATIVE = Interval(0)
POSITIVE = Interval(0, low_open=True)
POSITIVE_OR_INFINITE = Interval(0, low_open=True, high_open=False)
AT_LEAST_ONE = Interval(1)
DECAY_RATE = Interval(0, 1)
FRACTION = Interval(0, 1, high_open=False)


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """The annotated types of the fields of a dataclass, in order."""
    hints = get_type_hints(cls)
    return types.MappingProxyType({field.name: hints[field.name] for field in dataclasses.fields(cls)})


def field_default(field: dataclasses.Field[Any]) -> object:
    """The default of a dataclass field; every field of a configuration has one."""
    assert field.default is not dataclasses.MISSING
    return field.default


def check(
    config: Dataclass, singly: Callable[[], Iterable[Problem]], together: Callable[[], Iterable[Problem]]
) -> None:
    """Raise `ConfigError` with every problem of `config`.

    `singly` finds problems of single fields, of which those of a wrong type are left out; `together`, called once
    every field is valid, finds conflicts between fields.
    """
    problems = list(type_problems(config))
    wrong = {problem.field for problem in problems}
    problems += [problem for problem in singly() if problem.field not in wrong]
    if problems := problems or list(together()):
        raise ConfigError.of(type(config).__name__, problems)


def type_problems(config: Dataclass) -> Iterator[Problem]:
    """A problem for each field whose value is not of its annotated type. NaN is not accepted as a number."""
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        if not accepts(hint, value):
            yield Problem(name, value, f"must be {in_words(hint)}{_hint_at_dtype(hint, value)}")


def interval_problems(config: Dataclass, intervals: Mapping[str, Interval]) -> Iterator[Problem]:
    """A problem for each number outside its interval. None passes: `type_problems` checks whether it is allowed."""
    for name in field_types(type(config)):
        value = getattr(config, name)
        if name in intervals and value is not None and value not in intervals[name]:
            yield Problem(name, value, intervals[name].sentence)


def choice_problems(config: Dataclass, choices: Mapping[str, Iterable[object]]) -> Iterator[Problem]:
    """A problem for each value that is not one of its field's choices."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value is not None and value not in allowed:
            known = [str(choice) for choice in allowed]
            hint = did_you_mean(value, known) if isinstance(value, str) else ""
            hint = f" {INT8_CODES.capitalize()}." if value is torch.int8 and "exp_avg" in name else hint
            yield Problem(name, value, f"must be one of {', '.join(known)}.{hint}")


def options(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows: the members of a union, or the annotation itself."""
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
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def in_words(hint: Any) -> str:
    """A type in words, for messages."""
    if len(options(hint)) > 1:
        return " or ".join(in_words(option) for option in options(hint))
    if get_origin(hint) is tuple:
        return f"a tuple, each item {in_words(get_args(hint)[0])}"
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


def _hint_at_dtype(hint: Any, value: object) -> str:
    if hint is not torch.dtype or not isinstance(value, str):
        return ""
    if value in ("int8", "torch.int8"):
        return f"; {INT8_CODES}"
    return "; from_dict and load_config read dtypes from strings"
