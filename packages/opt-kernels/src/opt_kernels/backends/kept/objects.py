"""Whether lists and dicts hold the same objects as in the last step, in one call for hundreds of them."""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

from opt_kernels.backends.cpp.snapshot import compiled_snapshot


def same_objects(some: list[Any], others: list[Any]) -> bool:
    """Whether these are the same objects."""
    compiled = compiled_snapshot()
    if compiled is None or len(some) != len(others):
        return len(some) == len(others) and all(map(is_, some, others))
    return bool(compiled.same_objects(some, others, len(some)))


class Entries:
    """The keys and values of dicts in one step. Keeps the values alive."""

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._keys, self.values = _keys(dicts), _values(dicts)

    def same(self, dicts: list[dict[str, Any]]) -> bool:
        """Whether these dicts, as many as before, have the same objects under the same keys, in the same order."""
        compiled = compiled_snapshot()
        if compiled is None:
            return _keys(dicts) == self._keys and same_objects(_values(dicts), self.values)
        return bool(compiled.same_entries(dicts, len(dicts), self._keys, self.values, len(self.values)))


def _keys(dicts: Sequence[dict[str, Any]]) -> list[str]:
    return list(chain.from_iterable(dicts))


def _values(dicts: Sequence[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(of_dict.values() for of_dict in dicts))
