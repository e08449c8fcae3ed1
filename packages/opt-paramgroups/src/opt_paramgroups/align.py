"""Agreement on groups: each rank reports the groups of its parameters, and every rank builds their union."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from opt_config import ConfigError
from opt_paramgroups.match import Entries

Gather = Callable[[Any], Sequence[Any]]
"""Takes a picklable value and returns the values of all ranks, in the same order on every rank."""


class GroupKey(NamedTuple):
    """Identifies a group: its merged override, and whether its parameters belong to experts."""

    entries: Entries | None
    is_expert: bool


class Seen(NamedTuple):
    """The labels of all keys that match some parameter, and the group that this parameter belongs to."""

    labels: frozenset[str]
    key: GroupKey


class Report(NamedTuple):
    """What one rank sends to the others."""

    seen: frozenset[Seen]
    error: str  # why the rank failed; empty: it did not
    frozen: tuple[tuple[str, str], ...] = ()  # label of a key, and the first frozen parameter that it matches

    @classmethod
    def of(cls, seen: Iterable[Seen], *, frozen: Mapping[str, str]) -> Self:
        """The report of a rank that matched all its parameters."""
        return cls(frozenset(seen), "", tuple(frozen.items()))

    @classmethod
    def failed(cls, error: Exception) -> Self:
        """The report of a rank that failed."""
        return cls(frozenset(), str(error) or repr(error))


class Agreed(NamedTuple):
    """What every rank builds its groups from."""

    names: dict[GroupKey, str]  # in the order of the groups
    labels: frozenset[str]  # of all keys that matched a trainable parameter on some rank
    frozen: Mapping[str, str]  # label of a key that matched frozen parameters on some rank: the first of these


def alone(value: Any) -> list[Any]:
    """The gather of a single process."""
    return [value]


def agree(report: Report, gather: Gather) -> Agreed:
    """The groups of all ranks, named and in one order. Collective: every rank calls it once.

    A rank that failed passes `Report.failed` to `gather`, so that the other ranks do not wait for it forever. Raises
    `ConfigError` if another rank failed, or if ranks were given different overrides.
    """
    reports: list[Report] = list(gather(report))
    for rank, report in enumerate(reports):
        if report.error:
            raise ConfigError(f"rank {rank}: {report.error}")
    seen = frozenset[Seen]().union(*(report.seen for report in reports))
    frozen = {label: name for report in reversed(reports) for label, name in report.frozen}
    return Agreed(_named(seen), frozenset[str]().union(*(labels for labels, _ in seen)), frozen)


def _named(seen: frozenset[Seen]) -> dict[GroupKey, str]:
    """The name of each group, in the order of the groups: default first, then by name, dense before experts."""
    sets: dict[GroupKey, set[str]] = {}
    for labels, key in seen:
        sets.setdefault(key, set()).add(_both(labels))
    names = {key: _name(key, label_sets) for key, label_sets in sets.items()}
    _check_distinct(seen, names)
    return dict(sorted(names.items(), key=lambda item: (item[0].entries is not None, item[1], item[0].is_expert)))


def _both(labels: Iterable[str]) -> str:
    """The labels of all keys that match a parameter, joined by "and"."""
    parts = sorted(labels)
    return " and ".join(f"({part})" if " or " in part and len(parts) > 1 else part for part in parts)


def _name(key: GroupKey, label_sets: set[str]) -> str:
    """The keys of a group: "and" joins keys that match the same parameter, a comma those of different parameters."""
    name = "default" if key.entries is None else ", ".join(sorted(label_sets))
    return f"{name} (experts)" if key.is_expert else name


def _check_distinct(seen: frozenset[Seen], names: dict[GroupKey, str]) -> None:
    """Raise `ConfigError` if a set of keys leads to two different groups, or if two groups have the same name."""
    counts = Counter((_both(labels), key.is_expert) for labels, key in seen)
    ambiguous = sorted({labels for (labels, _), count in counts.items() if count > 1})
    if ambiguous or len(set(names.values())) < len(names):
        raise ConfigError(
            f"config_overrides: {' and '.join(map(repr, ambiguous or names.values()))}: the same keys make different "
            "groups; give every rank the same overrides, and different predicates different names"
        )
