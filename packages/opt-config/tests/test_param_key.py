"""ParamKey and its predicates: any match counts, and predicates of one name are equal."""

import pytest
import torch
from torch.nn import Parameter

from opt_config import ConfigError, ParamKey, ParamPredicate, ParamWithNamePredicate

VECTOR = ParamPredicate(name="1-D", fn=lambda param: param.dim() == 1)
MATRIX = ParamPredicate(name="2-D", fn=lambda param: param.dim() == 2)
NAMED = ParamWithNamePredicate(name="2-D gate", fn=lambda param, name: param.dim() == 2 and "gate" in name)


def parameter(*shape: int, **attributes: object) -> Parameter:
    param = Parameter(torch.zeros(shape))
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


@pytest.mark.parametrize(
    ("key", "param", "name", "expected"),
    [
        pytest.param(ParamKey(name="*.bias"), parameter(3), "layers.0.bias", True, id="glob"),
        pytest.param(ParamKey(name="*.bias"), parameter(3), "bias", False, id="glob wants its dot"),
        pytest.param(ParamKey(name="layers.[01].*"), parameter(3), "layers.1.weight", True, id="character class"),
        pytest.param(ParamKey(name="layers.?.*"), parameter(3), "layers.11.weight", False, id="one character"),
        pytest.param(ParamKey(name="*.Bias"), parameter(3), "layers.0.bias", False, id="case counts"),
        pytest.param(ParamKey(name=("*.weight", "*.bias")), parameter(3), "a.bias", True, id="any of the names"),
        pytest.param(ParamKey(attr="is_embedding"), parameter(3, is_embedding=True), "a", True, id="attribute"),
        pytest.param(ParamKey(attr="is_embedding"), parameter(3, is_embedding=False), "a", False, id="false attribute"),
        pytest.param(ParamKey(attr="is_embedding"), parameter(3), "a", False, id="no attribute"),
        pytest.param(ParamKey(attr=("x", "y")), parameter(3, y=1), "a", True, id="any of the attributes"),
        pytest.param(ParamKey(predicate=VECTOR), parameter(3), "a", True, id="predicate"),
        pytest.param(ParamKey(predicate=(VECTOR, MATRIX)), parameter(3, 3), "a", True, id="any of the predicates"),
        pytest.param(ParamKey(with_name_predicate=NAMED), parameter(3, 3), "gate.w", True, id="predicate with name"),
        pytest.param(ParamKey(with_name_predicate=(NAMED,)), parameter(3, 3), "up.w", False, id="the name decides"),
        pytest.param(
            ParamKey(name="*.bias", predicate=VECTOR), parameter(3), "norm.weight", True, id="fields are or-ed"
        ),
        pytest.param(ParamKey(name="*.bias", predicate=VECTOR), parameter(3, 3), "norm.weight", False, id="no field"),
    ],
)
def test_a_key_matches_by_any_of_its_fields(key, param, name, expected):
    assert key.matches(param, name) is expected


@pytest.mark.parametrize("kind", [ParamPredicate, ParamWithNamePredicate])
def test_predicates_are_equal_by_name_alone(kind):
    one, same, other = kind("a", lambda *_: True), kind("a", lambda *_: False), kind("b", lambda *_: True)
    assert one == same != other
    assert {one, same} == {one}


def test_equal_keys_are_one_key_of_a_dict():
    one = ParamKey(name="*.bias", predicate=ParamPredicate("v", lambda _: True))
    same = ParamKey(name="*.bias", predicate=ParamPredicate("v", lambda _: False))
    assert len({one: 1, same: 2}) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "ParamKey: is empty, matches nothing; set name, attr, predicate or with_name_predicate"),
        ({"name": ["*.bias"]}, "ParamKey: name=['*.bias']: must be one str or a tuple of them"),
        ({"attr": 3}, "ParamKey: attr=3: must be one str or a tuple of them"),
        ({"predicate": NAMED}, f"ParamKey: predicate={NAMED!r}: must be one ParamPredicate or a tuple of them"),
    ],
    ids=["empty", "a list", "a number", "the other kind of predicate"],
)
def test_a_key_that_cannot_work_is_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        ParamKey(**given)
    assert str(caught.value) == message


def test_the_label_names_every_part_in_one_order():
    key = ParamKey(name=("b", "a"), attr="shared", predicate=VECTOR, with_name_predicate=NAMED)
    assert key.label == "1-D or 2-D gate or a or b or shared"
    assert ParamKey(name=("a", "b")).label == ParamKey(name=("b", "a")).label


def test_attributes_may_be_answered_by_someone_else():
    key = ParamKey(attr="is_embedding")
    assert key.matches(parameter(3), "a", has=lambda param, attr: attr == "is_embedding")
