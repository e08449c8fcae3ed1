"""Reads configurations from dicts, JSON, TOML and YAML, and writes them as plain values. Unknown keys are errors."""

import json
import math
import re
import tomllib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self, get_origin

import torch

from opt_config.errors import (
    ConfigError,
    Problem,
    UnknownFieldError,
    accepts,
    field_types,
    options,
    type_words,
    unknown_field,
)

_DTYPE_NAMES = {
    torch.float32: ("float32", "fp32"),
    torch.float16: ("float16", "fp16"),
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.uint8: ("uint8",),
    torch.int8: ("int8",),
}
DTYPES = {name: dtype for dtype, names in _DTYPE_NAMES.items() for name in names}


class Configuration(ABC):
    """Base class of configurations: dataclasses that are validated when built and can be read from files."""

    def __new__(cls, *args: object, **values: object) -> Self:
        """Refuse unknown field names with a suggestion, before the dataclass's `__init__` raises a bare TypeError.

        The error also has the problems of the other fields.
        """
        hints = field_types(cls)
        unknown = {name: value for name, value in values.items() if name not in hints}
        if not unknown:
            return super().__new__(cls)
        problems = [Problem(name, value, unknown_field(name, value, hints)) for name, value in unknown.items()]
        try:
            cls(*args, **{name: value for name, value in values.items() if name in hints})
        except ConfigError as error:
            problems += error.problems
        raise UnknownFieldError.of(cls.__name__, problems)

    @abstractmethod
    def validate(self) -> None:
        """Check the current values of all fields. Raises `ConfigError` with every problem."""

    def __post_init__(self) -> None:
        """Check all fields. Raises `ConfigError` with every problem."""
        for name in field_types(type(self)):
            if isinstance(value := getattr(self, name), float):  # one of NumPy too, which states must not hold
                setattr(self, name, float(value))
        self.validate()

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Build a configuration from plain values, as files hold them: dtypes and numbers may be strings, tuples lists.

        Missing keys keep their defaults. Raises `ConfigError` with every unknown key and a suggestion, every value
        that cannot be read, and every other problem of the configuration.
        """
        hints = field_types(cls)
        known: dict[str, Any] = {}
        problems: list[Problem] = []
        for name, value in values.items():
            if name not in hints:
                problems.append(Problem(str(name), value, unknown_field(str(name), value, hints)))
                continue
            read = _read(hints[name], value)
            if accepts(hints[name], read):
                known[name] = read
            else:
                problems.append(Problem(name, value, _expected(hints[name])))
        try:
            config = cls(**known)
        except ConfigError as error:
            raise ConfigError.of(cls.__name__, [*problems, *error.problems]) from None
        if problems:
            raise ConfigError.of(cls.__name__, problems)
        return config

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a configuration from a JSON object. Raises `ConfigError`."""
        return cls.from_dict(_table(".json", text))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Return a configuration from a TOML document. Raises `ConfigError`."""
        return cls.from_dict(_table(".toml", text))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Return a configuration from a YAML mapping; needs the `yaml` extra. Raises `ConfigError`."""
        return cls.from_dict(_table(".yaml", text))

    @classmethod
    def load(cls, path: str | Path, *, section: str = "") -> Self:
        """Return a configuration from a file: `.json`, `.toml`, `.yaml` or `.yml`.

        `section` names the table that holds it, with dots between the names of nested tables; empty: the whole file.
        Raises `ConfigError`, whose message begins with the path, and OSError if the file cannot be read.
        """
        path = Path(path)
        try:
            suffix = path.suffix.lower()
            if suffix not in _PARSERS:
                raise ConfigError(f"unknown suffix {path.suffix!r}; allowed are {', '.join(_PARSERS)}")
            return cls.from_dict(_table(suffix, path.read_text(encoding="utf-8"), section))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text: {error}; save the file as UTF-8") from error
        except ConfigError as error:
            raise error.within(str(path)) from None

    def to_dict(self) -> dict[str, object]:
        """Return every field as a plain value that `from_dict` reads; a callable becomes text, which is refused."""
        return {name: _plain(getattr(self, name)) for name in field_types(type(self))}

    def to_json(self) -> str:
        """Return a JSON object that `from_json` reads back. Infinity is the string "inf": JSON has no such number."""
        return json.dumps(self.to_dict(), indent=2)


def _parse_yaml(text: str) -> object:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ConfigError("YAML needs the package pyyaml: python -m pip install pyyaml") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]  # yaml is imported here, since it is optional
        """Refuses keys that are given twice, and floats that are too large."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # Checked before "<<" merges another mapping, whose keys this one may repeat.
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            _check_given_once(keys)
            return super().construct_mapping(node, deep=deep)

        def construct_yaml_float(self, node: Any) -> Any:
            return _finite(node.value, super().construct_yaml_float(node))

    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    # YAML 1.1 reads 1e-4, which lacks a dot, as a string.
    power_of_ten = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", power_of_ten, [*"-+.0123456789"])
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _parse_json(text: str) -> object:
    def table(pairs: list[tuple[str, object]]) -> dict[str, object]:
        _check_given_once([key for key, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table, parse_float=_parse_float)


def _parse_toml(text: str) -> object:
    return tomllib.loads(text, parse_float=_parse_float)  # refuses keys that are given twice


def _check_given_once(keys: Sequence[str]) -> None:
    """Raise ValueError for a key that a table has twice: parsers differ in which of the values they keep."""
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise ValueError(f"key {twice[0]!r} is given twice in one table; keep one of them")


def _parse_float(text: str) -> float:
    return _finite(text, float(text))


def _finite(text: str, value: float) -> float:
    """Return `value`, the float that `text` spells. Raise ValueError if it is infinite but `text` does not say so."""
    if math.isinf(value) and "inf" not in text.lower():
        raise ValueError(f"no float is as large as {text}; write a smaller number, or inf if that is meant")
    return value


_PARSERS: Mapping[str, Callable[[str], object]] = {
    ".json": _parse_json,
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
}


def _table(suffix: str, text: str, section: str = "") -> Mapping[str, object]:
    """The table named `section` in the text of a file with this suffix."""
    try:
        table = _PARSERS[suffix](text)
    except ConfigError:
        raise
    except ValueError as error:
        name = "YAML" if suffix == ".yml" else suffix[1:].upper()
        raise ConfigError(f"not valid {name}: {error}") from error
    for step in filter(None, section.split(".")):
        if not isinstance(table, Mapping) or step not in table:
            raise ConfigError(f"the file has no table {section!r}")
        table = table[step]
    if not isinstance(table, Mapping):
        raise ConfigError(f"expected a table of fields, not {table!r}")
    return table


def _read(hint: Any, value: object) -> object:
    """Convert `value` to the type `hint` if files cannot represent that type; return other values unchanged."""
    kinds = options(hint)
    if isinstance(value, str) and torch.dtype in kinds:
        return DTYPES.get(value.removeprefix("torch."), value)
    if isinstance(value, str) and float in kinds and str not in kinds:
        try:
            return _parse_float(value)  # JSON has no infinity; YAML from another reader has 1e-4 as a string
        except ValueError:
            return value
    if isinstance(value, Mapping):
        return {name: _read_option(name, item) for name, item in value.items()}
    if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    return value


def _read_option(name: str, value: object) -> object:
    """An option of a rule: a list becomes a tuple, and a dtype as `to_dict` writes it, such as "torch.int8", a dtype.

    A dtype without the prefix stays a string, which rules accept, so that it is equal when it is read back.
    """
    if isinstance(value, str) and str(name).endswith("_dtype") and value.startswith("torch."):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        return dtype if isinstance(dtype, torch.dtype) else value
    return tuple(value) if isinstance(value, list) else value


def _expected(hint: Any) -> str:
    if torch.dtype in options(hint):
        return f"must name a dtype: {', '.join(DTYPES)}"
    if any(get_origin(kind) is Callable for kind in options(hint)):
        return "must be a callable, which a file cannot hold; set it in code"
    return f"must be {type_words(hint)}"


def _plain(value: object) -> object:
    """A value that every file format can hold."""
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, float) and value == float("inf"):
        return "inf"
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return f"callable {value!r}" if callable(value) else value
