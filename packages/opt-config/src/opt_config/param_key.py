"""ParamKey: which parameters are meant, by name, by attribute or by a predicate; any match counts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from torch.nn import Parameter

from opt_config.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class ParamPredicate:
    """A named test of a parameter. The name is its identity: equality and hash ignore the function.

    >>> import torch
    >>> shape_1_param = ParamPredicate(name="s1", fn=lambda param: len(param.shape) == 1)
    >>> shape_1_param(torch.empty(10))
    True
    >>> shape_1_param_copy = ParamPredicate(name="s1", fn=lambda param: len(param.shape) == 1)
    >>> shape_1_param == shape_1_param_copy
    True
    >>> {shape_1_param, shape_1_param_copy} == {shape_1_param}
    True
    """

    name: str
    fn: Callable[[Parameter], bool] = field(compare=False, hash=False)

    def __call__(self, param: Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A named test of a parameter together with its name in the module. Equality and hash ignore the function.

    >>> import torch
    >>> shape_1_not_qkln_param = ParamWithNamePredicate(
    ...     name="s1_not_qkln",
    ...     fn=lambda param, name: (len(param.shape) == 1 or name.endswith(".bias"))
    ...     and not ("q_layernorm." in name or "k_layernorm." in name),
    ... )
    >>> shape_1_not_qkln_param(torch.empty(10), "interesting.bias")
    True
    >>> shape_1_not_qkln_param(torch.empty(10), "interesting.q_layernorm.bias")
    False
    """

    name: str
    fn: Callable[[Parameter, str], bool] = field(compare=False, hash=False)

    def __call__(self, param: Parameter, name: str) -> bool:
        return self.fn(param, name)


def has_attribute(param: Parameter, attr: str) -> bool:
    """Whether `param` has an attribute of that name that is true."""
    return bool(getattr(param, attr, False))


@dataclass(frozen=True, slots=True)
class ParamKey:
    """The parameters that share an override. Each field holds one value or a tuple of them; any of them may match.

    Raises `ConfigError` for a key that could match nothing, and for values of another type (a list cannot be hashed,
    and a key is used in dicts).

    >>> import torch
    >>> ParamKey(name="*.bias").matches(torch.nn.Parameter(torch.empty(3)), "layers.0.bias")
    True
    """

    name: str | tuple[str, ...] = ()
    """Patterns of the name, as a shell matches paths: `*`, `?`, `[abc]`; upper and lower case differ."""
    attr: str | tuple[str, ...] = ()
    """Attributes of the parameter: one that exists and is true matches."""
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    """Tests of the parameter."""
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()
    """Tests of the parameter and its name, for matches with exceptions."""

    def __post_init__(self) -> None:
        for field_name, kind in _KINDS:
            given = getattr(self, field_name)
            if not all(isinstance(value, kind) for value in many(given)):
                raise ConfigError(f"ParamKey: {field_name}={given!r}: must be one {kind.__name__} or a tuple of them")
        if not self.label:
            raise ConfigError("ParamKey: matches nothing; give a name, attr, predicate or with_name_predicate")

    def matches(
        self,
        param: Parameter,
        param_name: str,
        *,
        has: Callable[[Parameter, str], bool] = has_attribute,
    ) -> bool:
        """Whether this key means `param`, called `param_name` in its module; `has` answers for attributes."""
        return (
            any(fnmatchcase(param_name, pattern) for pattern in many(self.name))
            or any(has(param, attr) for attr in many(self.attr))
            or any(predicate(param) for predicate in many(self.predicate))
            or any(predicate(param, param_name) for predicate in many(self.with_name_predicate))
        )

    @property
    def label(self) -> str:
        """The canonical name of the key, the same everywhere: patterns, `@attributes`, `<predicates>`."""
        parts = (
            [*many(self.name)]
            + [f"@{attr}" for attr in many(self.attr)]
            + [f"<{predicate.name}>" for predicate in many(self.predicate)]
            + [f"<{predicate.name}>" for predicate in many(self.with_name_predicate)]
        )
        return "|".join(sorted(set(parts)))


_KINDS: tuple[tuple[str, type], ...] = (
    ("name", str),
    ("attr", str),
    ("predicate", ParamPredicate),
    ("with_name_predicate", ParamWithNamePredicate),
)


def many(values: T | tuple[T, ...]) -> tuple[T, ...]:
    """One value or a tuple of them, as a tuple."""
    return values if isinstance(values, tuple) else (values,)
