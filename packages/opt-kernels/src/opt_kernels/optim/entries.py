"""Changes of parameter groups between steps, so that no entry that chooses how parameters are updated is ignored."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from opt_kernels.optim.hooks import HOOKS

Group = Mapping[str, Any]
SCHEDULED = ("lr", "weight_decay")  # read in every step, and changed too often to be compared


class Change(NamedTuple):
    """A group whose entries differ from those in the last step."""

    number: int  # of the group
    before: Group
    names: frozenset[str]  # of the entries that were changed or added, and "hooks" if they were removed


class GroupEntries:
    """The entries of groups in the last step. Comparing unchanged groups takes a few passes in C."""

    def __init__(self, names: Sequence[str], groups: Sequence[Group], *, scheduled: Sequence[str] = SCHEDULED) -> None:
        """`names` are the entries that every group must have; those in `scheduled` may become any number."""
        self._names = tuple(names)
        self._free = tuple(scheduled)
        self._scheduled = _picker([name for name in names if name in scheduled])
        self._watched = _picker([name for name in names if name not in scheduled])
        self._seen: list[Group] = []
        self.accept(groups)

    def accept(self, groups: Sequence[Group]) -> None:
        """Compare with the present entries from now on."""
        self._seen = [{name: frozen(group[name]) for name in group if name != "params"} for group in groups]
        self._sizes = [len(group) for group in groups]
        self._values = list(chain.from_iterable(map(self._watched, self._seen)))
        self._hooks = [seen.get(HOOKS) for seen in self._seen]

    def changes(self, groups: Sequence[Group]) -> list[Change]:
        """The changes since `accept`. Raises ValueError for an entry that was removed."""
        if list(map(len, groups)) == self._sizes and self._are_seen(groups):
            return []
        for index, group in enumerate(groups):
            for name in self._names:
                if name not in group:
                    raise ValueError(f"parameter group {index} has no entry {name!r}, which every step reads; set it")
        return list(self._changes(groups))

    def _are_seen(self, groups: Sequence[Group]) -> bool:
        """Whether the watched entries are the same objects."""
        try:
            list(map(self._scheduled, groups))
            return all(map(is_, chain.from_iterable(map(self._watched, groups)), self._values)) and all(
                map(is_, [group.get(HOOKS) for group in groups], self._hooks)
            )
        except KeyError:
            return False

    def _changes(self, groups: Sequence[Group]) -> Iterator[Change]:
        for index, group in enumerate(groups):
            seen: Group = self._seen[index] if index < len(self._seen) else {}
            names = [name for name in group if name not in ("params", *self._free) and not _is_in(seen, name, group)]
            if HOOKS in seen and HOOKS not in group:
                names.append(HOOKS)
            if names:
                yield Change(index, seen, frozenset(names))


def frozen(value: object) -> object:
    """`value` itself if it cannot change in place, else lists as tuples and mappings as tuples of their items."""
    if isinstance(value, Mapping):
        return tuple((name, frozen(one)) for name, one in value.items())
    if not isinstance(value, list | tuple):
        return value
    parts = tuple(map(frozen, value))
    return value if isinstance(value, tuple) and all(map(is_, value, parts)) else parts


def _is_in(seen: Group, name: str, group: Group) -> bool:
    if name not in seen:
        return False
    present = frozen(group[name])
    return present is seen[name] or bool(present == seen[name])


def _picker(names: Sequence[str]) -> Callable[[Group], Sequence[Any]]:
    """A function that returns these entries of a group."""
    return itemgetter(*names) if len(names) > 1 else lambda group: [group[name] for name in names]
