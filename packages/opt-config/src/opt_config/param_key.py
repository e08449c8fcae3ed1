"""ParamKey: selects parameters by name, attribute or predicate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeVar

from torch.nn import Parameter

from opt_config.errors import ConfigError

T = TypeVar("T")

_ATTRIBUTE_LABELS = {"is_embedding_or_output_parameter": "embedding or output", "is_embedding_parameter": "embedding"}


@dataclass(frozen=True)
class ParamPredicate:
    """A named predicate of a parameter. Equality and hash use the name only and ignore the function.

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
    """A named predicate of a parameter and its name in the module. Equality and hash use the name only.

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
    """Whether `param` has a true attribute of this name."""
    return bool(getattr(param, attr, False))


@dataclass(frozen=True, slots=True)
class ParamKey:
    """Selects the parameters that an override applies to. A parameter matches if any value of any field matches.

    Each field holds one value or a tuple of values. Raises `ConfigError` for a key without values, and for values of
    another type. Lists are refused because keys are hashed.

    >>> import torch
    >>> ParamKey(name="*.bias").matches(torch.nn.Parameter(torch.empty(3)), "layers.0.bias")
    True
    """

    name: str | tuple[str, ...] = ()
    """Shell patterns of the parameter's name: `*`, `?`, `[abc]`. Case matters."""
    attr: str | tuple[str, ...] = ()
    """Attributes of the parameter. An attribute matches if it exists and is true."""
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    """Predicates of the parameter."""
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()
    """Predicates of the parameter and its name."""

    def __post_init__(self) -> None:
        for field_name, kind in _KINDS.items():
            given = getattr(self, field_name)
            if not all(isinstance(value, kind) for value in many(given)):
                raise ConfigError(f"ParamKey: {field_name}={given!r}: must be one {kind.__name__} or a tuple of them")
        if not self.label:
            raise ConfigError("ParamKey: is empty, matches nothing; set name, attr, predicate or with_name_predicate")

    def matches(
        self,
        param: Parameter,
        param_name: str,
        *,
        has: Callable[[Parameter, str], bool] = has_attribute,
    ) -> bool:
        """Whether this key matches `param`, named `param_name` in its module. `has` tests for an attribute."""
        if any(fnmatchcase(param_name, pattern) for pattern in many(self.name)):
            return True
        if any(has(param, attr) for attr in many(self.attr)):
            return True
        if any(predicate(param) for predicate in many(self.predicate)):
            return True
        return any(predicate(param, param_name) for predicate in many(self.with_name_predicate))

    @property
    def label(self) -> str:
        """The key in words: its patterns, attributes and names of predicates, sorted and joined by "or".

        >>> ParamKey(name="*.bias", attr="is_embedding_parameter").label
        '*.bias or embedding'
        """
        attrs = (_ATTRIBUTE_LABELS.get(attr, attr) for attr in many(self.attr))
        predicates = {predicate.name for predicate in many(self.predicate)}
        predicates |= {predicate.name for predicate in many(self.with_name_predicate)}
        return " or ".join(sorted({*many(self.name), *attrs, *predicates}))


_KINDS: Mapping[str, type] = {
    "name": str,
    "attr": str,
    "predicate": ParamPredicate,
    "with_name_predicate": ParamWithNamePredicate,
}


def many(values: T | tuple[T, ...]) -> tuple[T, ...]:
    """Return `values` as a tuple: a tuple unchanged, a single value as a tuple of one."""
    return values if isinstance(values, tuple) else (values,)
