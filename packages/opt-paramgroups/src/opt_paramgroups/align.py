"""The same groups on every rank: each reports which groups its parameters make, all take the union."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from opt_config import ConfigError
from opt_paramgroups.match import Entries

Gather = Callable[[Any], Sequence[Any]]
"""Takes a picklable value, gives those of all ranks in the same order everywhere."""


class GroupKey(NamedTuple):
    """What makes parameters share a group: the same override, and the same side of the expert divide."""

    entries: Entries | None
    is_expert: bool


class Seen(NamedTuple):
    """A set of keys that some parameter is matched by, and the group that this makes."""

    labels: frozenset[str]
    key: GroupKey


class Report(NamedTuple):
    """What one rank has to say."""

    seen: frozenset[Seen]
    error: str  # why it cannot go on; empty: it can
    frozen: tuple[tuple[str, str], ...] = ()  # label of a key, and the first frozen parameter that it matches

    @classmethod
    def of(cls, seen: Iterable[Seen], *, frozen: Mapping[str, str]) -> Self:
        """The report of a rank that has matched all its parameters."""
        return cls(frozenset(seen), "", tuple(frozen.items()))

    @classmethod
    def failed(cls, error: Exception) -> Self:
        """The report of a rank that cannot go on."""
        return cls(frozenset(), str(error) or repr(error))


class Agreed(NamedTuple):
    """What all ranks build."""

    names: dict[GroupKey, str]  # in the order of the groups
    labels: frozenset[str]  # of all keys that matched a trainable parameter on some rank
    frozen: Mapping[str, str]  # of all keys that matched frozen parameters, and the first of these


def alone(value: Any) -> list[Any]:
    """The gather of a process that is by itself."""
    return [value]


def agree(report: Report, gather: Gather) -> Agreed:
    """The groups of all ranks, named and in one order. Collective: every rank calls it once.

    A rank that has failed gives `Report.failed` to `gather` instead of staying away, so that none waits for it. Raises
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
    """A name for each group: default groups first, then by name; dense before experts."""
    sets: dict[GroupKey, set[str]] = {}
    for labels, key in seen:
        sets.setdefault(key, set()).add(" & ".join(sorted(labels)))
    names = {key: _name(key, label_sets) for key, label_sets in sets.items()}
    _check_distinct(seen, names)
    return dict(sorted(names.items(), key=lambda item: (item[0].entries is not None, item[1], item[0].is_expert)))


def _name(key: GroupKey, label_sets: set[str]) -> str:
    """The keys that lead to a group: `&` where they meet on a parameter, a comma between different parameters' keys."""
    name = "default" if key.entries is None else ", ".join(sorted(label_sets))
    return f"{name} (experts)" if key.is_expert else name


def _check_distinct(seen: frozenset[Seen], names: dict[GroupKey, str]) -> None:
    """One set of keys makes one override, wherever it is met; and no two groups have one name."""
    counted = Counter((" & ".join(sorted(labels)), key.is_expert) for labels, key in seen)
    twice = sorted({labels for (labels, _), count in counted.items() if count > 1})
    if twice or len(set(names.values())) < len(names):
        raise ConfigError(
            f"config_overrides: {' and '.join(map(repr, twice or names.values()))}: the same keys make different "
            "groups; give every rank the same overrides, and different predicates different names"
        )
