"""Configurations in files: dicts, JSON, TOML and YAML in, plain values out. An unknown key is an error."""

import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, get_origin

import torch

from opt_config.errors import ConfigError, Problem, UnknownFieldError, did_you_mean
from opt_config.validate import accepts, field_types, in_words, options

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "fp32": torch.float32,
        "float16": torch.float16,
        "fp16": torch.float16,
        "bfloat16": torch.bfloat16,
        "bf16": torch.bfloat16,
        "uint8": torch.uint8,
    }
)


class Configuration(ABC):
    """A dataclass that is checked when built and can be read from files. Its subclasses add fields and their checks."""

    def __new__(cls, *args: object, **values: object) -> Self:
        """Refuses keywords that are no fields, before the dataclass's `__init__` calls them unexpected arguments."""
        hints = field_types(cls)
        unknown = [Problem(k, v, f"is no field.{did_you_mean(k, hints)}") for k, v in values.items() if k not in hints]
        if unknown:
            raise UnknownFieldError.of(cls.__name__, unknown)
        return super().__new__(cls)

    @abstractmethod
    def validate(self) -> None:
        """Check every field as it is now. Raises `ConfigError` with all that is wrong."""

    def __post_init__(self) -> None:
        """Check every field. Raises `ConfigError` with all that is wrong."""
        self.validate()

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """A configuration from plain values, as files hold them: dtypes and numbers may be strings, tuples lists.

        Missing keys keep their defaults. Raises `ConfigError` with every unknown key (and what was probably meant),
        every value that cannot be read, and every other problem of the configuration.
        """
        hints = field_types(cls)
        known: dict[str, object] = {}
        problems: list[Problem] = []
        for name, value in values.items():
            if name not in hints:
                problems.append(Problem(str(name), value, f"is no field.{did_you_mean(str(name), hints)}"))
                continue
            read = _read(hints[name], value)
            if accepts(hints[name], read):
                known[name] = read
            else:
                problems.append(Problem(name, value, _expected(hints[name])))
        return cls._construct(known, problems)

    @classmethod
    def _construct(cls, known: Mapping[str, Any], problems: list[Problem]) -> Self:
        """Build from what could be read, so that its problems are reported together with those of reading."""
        try:
            config = cls(**known)
        except ConfigError as error:
            raise ConfigError.of(cls.__name__, [*problems, *error.problems]) from None
        if problems:
            raise ConfigError.of(cls.__name__, problems)
        return config

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A configuration from a JSON object. Raises `ConfigError`."""
        return cls.from_dict(_table(_parse(_KINDS[".json"], text)))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """A configuration from a TOML document. Raises `ConfigError`."""
        return cls.from_dict(_table(_parse(_KINDS[".toml"], text)))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """A configuration from a YAML mapping; needs the `yaml` extra. Raises `ConfigError`."""
        return cls.from_dict(_table(_parse(_KINDS[".yaml"], text)))

    @classmethod
    def load(cls, path: str | Path, *, section: str = "") -> Self:
        """A configuration from a file: `.json`, `.toml`, `.yaml` or `.yml`.

        `section` names the table that holds it, dots for tables within tables; empty: the whole file. Raises
        `ConfigError`, which begins with the path, and OSError where the file cannot be read.
        """
        path = Path(path)
        try:
            document = _parse(_kind_of(path), path.read_text(encoding="utf-8"))
            return cls.from_dict(_table(document, section))
        except ConfigError as error:
            raise error.within(str(path)) from None

    def to_dict(self) -> dict[str, object]:
        """Every field as a plain value that `from_dict` reads back; a callable as a description, which it refuses."""
        return {name: _plain(getattr(self, name)) for name in field_types(type(self))}

    def to_json(self) -> str:
        """A JSON object that `from_json` reads back; infinity is the string "inf", for which JSON has no number."""
        return json.dumps(self.to_dict(), indent=2)


class _Kind(NamedTuple):
    """A file format."""

    name: str
    parse: Callable[[str], object]


def _parse_yaml(text: str) -> object:
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ConfigError("YAML needs the package pyyaml; install opt-config[yaml]") from error
    try:
        document: object = yaml.safe_load(text)
        return document
    except yaml.YAMLError as error:
        raise ValueError(error) from error


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        ".json": _Kind("JSON", json.loads),
        ".toml": _Kind("TOML", tomllib.loads),
        ".yaml": _Kind("YAML", _parse_yaml),
        ".yml": _Kind("YAML", _parse_yaml),
    }
)


def _kind_of(path: Path) -> _Kind:
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"the suffix {path.suffix!r} is none of {', '.join(_KINDS)}")
    return kind


def _parse(kind: _Kind, text: str) -> object:
    try:
        return kind.parse(text)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"this is not {kind.name}: {error}") from error


def _table(document: object, section: str = "") -> Mapping[str, object]:
    """The table called `section` in a parsed file."""
    found = document
    for step in filter(None, section.split(".")):
        if not isinstance(found, Mapping) or step not in found:
            raise ConfigError(f"there is no table {section!r}")
        found = found[step]
    if not isinstance(found, Mapping):
        raise ConfigError(f"a configuration is a table of fields, not {found!r}")
    return found


def _read(hint: Any, value: object) -> object:
    """`value` as the type that `hint` asks for where a file cannot say it; anything else as it is."""
    kinds = options(hint)
    if isinstance(value, str) and torch.dtype in kinds:
        return DTYPES.get(value.removeprefix("torch."), value)
    if isinstance(value, str) and float in kinds and str not in kinds:
        return _number(value)
    if isinstance(value, Mapping):
        return {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    return value


def _number(text: str) -> object:
    # YAML reads 1e-4, which lacks a dot, as a string.
    try:
        return float(text)
    except ValueError:
        return text


def _expected(hint: Any) -> str:
    if torch.dtype in options(hint):
        return f"must name a dtype: {', '.join(DTYPES)}"
    if any(get_origin(kind) is Callable for kind in options(hint)):
        return "is a callable, which a file cannot hold; set it in code"
    return f"must be {in_words(hint)}"


def _plain(value: object) -> object:
    """A value that every file format can hold."""
    if isinstance(value, torch.dtype):
        return str(value)
    if value == float("inf"):
        return "inf"
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return f"callable {value!r}" if callable(value) else value
