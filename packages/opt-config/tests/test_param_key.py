"""ParamKey and its predicates: any match counts, and predicates of one name are equal."""

import pytest
import torch
from torch.nn import Parameter

from opt_config import ConfigError, ParamKey, ParamPredicate, ParamWithNamePredicate

VECTOR = ParamPredicate(name="1-D", fn=lambda param: param.dim() == 1)
MATRIX = ParamPredicate(name="2-D", fn=lambda param: param.dim() == 2)
NAMED = ParamWithNamePredicate(name="2-D gate", fn=lambda param, name: param.dim() == 2 and "gate" in name)


def parameter(*shape, **attributes):
    param = Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


VECTORS = ParamKey(name="*.bias", predicate=VECTOR)
MATCHES = [  # a key, a parameter and its name
    (ParamKey(name="*.bias"), parameter(3), "layers.0.bias", True),
    (ParamKey(name="*.bias"), parameter(3), "bias", False),
    (ParamKey(name="layers.[01].*"), parameter(3), "layers.1.weight", True),
    (ParamKey(name="layers.?.*"), parameter(3), "layers.11.weight", False),
    (ParamKey(name="*.Bias"), parameter(3), "layers.0.bias", False),
    (ParamKey(name=("*.weight", "*.bias")), parameter(3), "a.bias", True),
    (ParamKey(attr="is_embedding"), parameter(3, is_embedding=True), "a", True),
    (ParamKey(attr="is_embedding"), parameter(3, is_embedding=False), "a", False),
    (ParamKey(attr="is_embedding"), parameter(3), "a", False),
    (ParamKey(attr=("x", "y")), parameter(3, y=1), "a", True),
    (ParamKey(predicate=VECTOR), parameter(3), "a", True),
    (ParamKey(predicate=(VECTOR, MATRIX)), parameter(3, 3), "a", True),
    (ParamKey(with_name_predicate=NAMED), parameter(3, 3), "gate.w", True),
    (ParamKey(with_name_predicate=(NAMED,)), parameter(3, 3), "up.w", False),
    (VECTORS, parameter(3), "norm.weight", True),
    (VECTORS, parameter(3, 3), "norm.weight", False),
]


@pytest.mark.parametrize(("key", "param", "name", "expected"), MATCHES)
def test_a_key_matches_by_any_of_its_fields(key, param, name, expected):
    assert key.matches(param, name) is expected


@pytest.mark.parametrize("kind", [ParamPredicate, ParamWithNamePredicate])
def test_predicates_are_equal_by_name_alone(kind):
    first = kind("a", lambda *_: True)
    same = kind("a", lambda *_: False)
    other = kind("b", lambda *_: True)
    assert first == same != other
    assert {first, same} == {first}
    name = "predicate" if kind is ParamPredicate else "with_name_predicate"
    assert len({ParamKey(**{name: predicate}) for predicate in (first, same)}) == 1


def test_a_key_that_cannot_work_is_refused():
    for given, message in (
        ({}, "is empty, matches nothing; set name, attr, predicate or with_name_predicate"),
        ({"name": ["*.bias"]}, "name=['*.bias']: must be one str or a tuple of them"),
        ({"attr": 3}, "attr=3: must be one str or a tuple of them"),
        ({"predicate": NAMED}, f"predicate={NAMED!r}: must be one ParamPredicate or a tuple of them"),
    ):
        with pytest.raises(ConfigError) as caught:
            ParamKey(**given)
        assert str(caught.value) == f"ParamKey: {message}"


def test_the_label_names_every_part_in_one_order():
    key = ParamKey(name=("b", "a"), attr="shared", predicate=VECTOR, with_name_predicate=NAMED)
    assert key.label == "1-D or 2-D gate or a or b or shared"
    assert ParamKey(name=("a", "b")).label == ParamKey(name=("b", "a")).label
