"""C++ and Python compare identities of objects in the same way."""

from typing import Any

import pytest
import torch

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.kept import objects
from opt_kernels.backends.kept.objects import Entries, same_objects


@pytest.fixture(autouse=True, params=["compiled", "in Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in Python":
        monkeypatch.setattr(objects, "compiled_snapshot", lambda: None)
    elif not usable():
        pytest.skip("no C++ compiler")


def dicts() -> list[dict[str, Any]]:
    return [{"step": torch.zeros(()), "exp_avg": torch.zeros(2)}, {}, {"step": torch.zeros(())}]


def test_objects_are_compared_by_identity() -> None:
    given = [torch.zeros(2), torch.zeros(2)]
    assert same_objects(given, list(given))
    assert same_objects([], [])
    assert not same_objects(given, given[:-1])
    assert not same_objects(given[:-1], given)
    assert not same_objects(given, [given[0], given[1].clone()])
    assert not same_objects([1], [True])


def test_the_same_entries() -> None:
    given = dicts()
    known = Entries(given)
    assert known.same(given)
    assert known.same([dict(of) for of in given])
    assert Entries([]).same([])


CHANGES: dict[str, Any] = {
    "another value": lambda given: given[0].update(exp_avg=torch.zeros(2)),
    "another key": lambda given: given[0].update(other=given[0].pop("exp_avg")),
    "another order": lambda given: given[0].update(step=given[0].pop("step")),
    "one more": lambda given: given[1].update(step=given[0]["step"]),
    "one more at the end": lambda given: given[2].update(exp_avg=given[0]["exp_avg"]),
    "one less": lambda given: given[2].clear(),
    "an equal key of another object": lambda given: given[0].update({"exp_a": given[0].pop("exp_avg")}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_entries_are_noticed(change: str) -> None:
    given = dicts()
    known = Entries(given)
    CHANGES[change](given)
    assert not known.same(given)
